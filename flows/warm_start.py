"""The warm start: a tiny model and its data, which the quickstart makes for itself.

make_data -> train_and_measure -> commit          into <storage.root>/warm_start/<key>/
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.prepared import Say, made_from, make_once
from flows.stages import Stages
from storage.prepared import commit_prepared, new_folder
from tasks.warm_start.parameters import WarmStartParameters
from tasks.warm_start.stages import MODEL, TRAIN_FILE, VAL_FILE, make_data, train_and_measure

if TYPE_CHECKING:
    from flows.prefect_server import PrefectAPI

logger = logging.getLogger(__name__)

CODE = (
    "tasks.warm_start.parameters",
    "tasks.warm_start.problem_files",
    "tasks.warm_start.stages",
    "tasks.warm_start.supervised",
    "tasks.warm_start.word_problems",
    "tasks.rewards.gsm8k",
    "tasks.seeds",
)
LIBRARIES = ("numpy", "pyarrow", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class WarmStart:
    """A committed warm start.

    Attributes:
        model_path: folder in Hugging Face format, tokenizer included.
        train_file: prompts for training.
        val_file: prompts over held-out operand pairs.
        metrics: of the supervised training, and the model's accuracy on the held-out prompts.
    """

    model_path: Path
    train_file: Path
    val_file: Path
    metrics: dict[str, float]


def ensure_warm_start(
    root: Path,
    parameters: WarmStartParameters,
    seed: int,
    *,
    api: PrefectAPI | None = None,
    say: Say = logger.info,
) -> WarmStart:
    """Find the warm start of these parameters and this seed, or make it.

    Args:
        root: `storage.root`.
        parameters: what it is made from.
        seed: of data, demonstrations and first weights.
        api: Prefect server to report to; None: call the stages plainly.
        say: told what is done, in sentences.
    """
    key = made_from({"parameters": asdict(parameters), "seed": seed}, CODE, LIBRARIES)
    folder = root / "warm_start" / key
    schedule = parameters.schedule
    about = f"Warm start: {schedule.steps} supervised steps of {schedule.batch} demonstrations, kept in {folder}"
    manifest = make_once(folder, key, warm_start, parameters, seed, about=about, api=api, say=say)
    return WarmStart(folder / MODEL, folder / TRAIN_FILE, folder / VAL_FILE, manifest["metrics"])


def warm_start(folder: Path, key: str, parameters: WarmStartParameters, seed: int, stages: Stages) -> dict[str, Any]:
    """Make the data, train on the demonstrations, measure, commit; return the manifest."""
    with new_folder(folder, "the warm start") as aside:
        stages.run(make_data, aside, parameters, seed)
        metrics = stages.run(train_and_measure, aside, parameters, seed)
        about = {"parameters": asdict(parameters), "seed": seed, "metrics": metrics}
        return stages.run(commit_prepared, aside, folder, key, about)
