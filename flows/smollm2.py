"""What the recipe `smollm2` starts from: SmolLM2-135M-Instruct out of a Python package, and small additions for it.

convert_gguf -> commit              into <storage.root>/smollm2/<key>/, once for all seeds
write_small_additions -> commit     into <storage.root>/small_additions/<key>/
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.prepared import Say, made_from, make_once
from flows.stages import Stages
from storage.durable import sha256_file
from storage.prepared import commit_prepared, new_folder
from tasks.warm_start.small_additions import TRAIN_FILE, VAL_FILE, write_small_additions
from tasks.warm_start.smollm2 import convert_gguf, gguf_file

if TYPE_CHECKING:
    from flows.prefect_server import PrefectAPI

logger = logging.getLogger(__name__)

MODEL_CODE = ("tasks.warm_start.smollm2",)
MODEL_LIBRARIES = ("gguf", "tokenizers", "torch", "transformers")
DATA_CODE = ("tasks.warm_start.problem_files", "tasks.warm_start.small_additions", "tasks.seeds")
DATA_LIBRARIES = ("numpy", "pyarrow")


def ensure_smollm2(root: Path, *, api: PrefectAPI | None = None, say: Say = logger.info) -> Path:
    """Find the converted model or convert it; return its folder in Hugging Face format.

    Args:
        root: `storage.root`.
        api: Prefect server to report to; None: call the stages plainly.
        say: told what is done, in sentences.

    Raises:
        ValueError: the package that carries the model is not installed.
    """
    source = gguf_file()
    key = made_from({"sha256": sha256_file(source)}, MODEL_CODE, MODEL_LIBRARIES)
    folder = root / "smollm2" / key
    about = f"Converting {source.name} into {folder}; this takes about a minute, once"
    make_once(folder, key, convert_smollm2, source, about=about, api=api, say=say)
    return folder


def ensure_small_additions(
    root: Path, seed: int, held_out: int, *, api: PrefectAPI | None = None, say: Say = logger.info
) -> tuple[Path, Path]:
    """Find or write the files of training and validation prompts of a seed; `held_out` prompts are for validation."""
    key = made_from({"seed": seed, "held_out": held_out}, DATA_CODE, DATA_LIBRARIES)
    folder = root / "small_additions" / key
    about = f"Writing small additions into {folder}"
    make_once(folder, key, make_small_additions, seed, held_out, about=about, api=api, say=say)
    return folder / TRAIN_FILE, folder / VAL_FILE


def convert_smollm2(folder: Path, key: str, source: Path, stages: Stages) -> dict[str, Any]:
    """Convert the GGUF file and commit the folder; return the manifest."""
    with new_folder(folder, "the converted model") as aside:
        stages.run(convert_gguf, source, aside)
        return stages.run(commit_prepared, aside, folder, key, {"source": source.name})


def make_small_additions(folder: Path, key: str, seed: int, held_out: int, stages: Stages) -> dict[str, Any]:
    """Write the prompts and commit the folder; return the manifest."""
    with new_folder(folder, "the prompts") as aside:
        stages.run(write_small_additions, aside, seed, held_out)
        return stages.run(commit_prepared, aside, folder, key, {"seed": seed, "held_out": held_out})
