"""The warm start: a model and its data that the quickstart makes for itself, as a flow of stages, once per key.

    make_data -> train_and_measure -> commit          into <storage.root>/warm_start/<key>/

The key is a digest of the parameters, the seed, the code and the versions of the libraries; a folder that is committed
under it and still as it was committed is used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from storage.durable import sha256_json
from storage.prepared import commit_prepared, find_prepared, new_folder, sole_maker
from tasks.stage import code_digest
from tasks.warm_start.parameters import WarmStartParameters
from tasks.warm_start.stages import MODEL, TRAIN_FILE, VAL_FILE, make_data, train_and_measure

logger = logging.getLogger(__name__)

CODE = ("tasks.warm_start", "tasks.seeds", "tasks.rewards.gsm8k")
LIBRARIES = ("numpy", "pyarrow", "tokenizers", "torch", "transformers")

Call = Callable[..., Any]
"""How a stage is called: `call(stage, *args)` runs it plainly or as a Prefect task."""


@dataclass(frozen=True)
class WarmStart:
    """A committed warm start.

    Attributes:
        model_path: folder in Hugging Face format, tokenizer included.
        train_file: prompts for training.
        val_file: prompts over held-out operand pairs.
        metrics: of the supervised training, and the model's accuracy on the held-out prompts.
        reused: whether an earlier run had made it.
    """

    model_path: Path
    train_file: Path
    val_file: Path
    metrics: dict[str, float]
    reused: bool


def ensure_warm_start(
    root: Path, parameters: WarmStartParameters, seed: int, *, orchestrated: bool = False, say: Call = logger.info
) -> WarmStart:
    """Find the warm start of these parameters and this seed, or make it; other processes that want it wait.

    Args:
        root: `storage.root`.
        parameters: what it is made from.
        seed: of data, demonstrations and first weights.
        orchestrated: make it as a Prefect flow; a server must be configured.
        say: told what is done, in sentences.
    """
    key = warm_start_key(parameters, seed)
    folder = root / "warm_start" / key
    with sole_maker(folder):
        manifest = find_prepared(folder, key, lambda reason: say(f"The warm start is made again: {reason}."))
        reused = manifest is not None
        if manifest is None:
            steps, batch = parameters.schedule.steps, parameters.schedule.batch
            say(f"Warm start: {steps} supervised steps of {batch} demonstrations, once; kept in {folder}.")
            make = _as_flow if orchestrated else _plainly
            manifest = make(folder, key, parameters, seed)
    metrics = manifest["metrics"]
    return WarmStart(folder / MODEL, folder / TRAIN_FILE, folder / VAL_FILE, metrics, reused)


def warm_start_key(parameters: WarmStartParameters, seed: int) -> str:
    """Sixteen hex digits of what decides the result."""
    made_from = {
        "parameters": asdict(parameters),
        "seed": seed,
        "code": code_digest(CODE),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return sha256_json(made_from)[:16]


def warm_start(folder: Path, key: str, parameters: WarmStartParameters, seed: int, call: Call) -> dict[str, Any]:
    """Run the stages in order and return the manifest of what they committed."""
    with new_folder(folder, "the warm start") as aside:
        call(make_data, aside, parameters, seed)
        metrics = call(train_and_measure, aside, parameters, seed)
        about = {"parameters": asdict(parameters), "seed": seed, "metrics": metrics}
        return call(commit_prepared, aside, folder, key, about)


def _plainly(folder: Path, key: str, parameters: WarmStartParameters, seed: int) -> dict[str, Any]:
    return warm_start(folder, key, parameters, seed, lambda stage, *args: stage(*args))


def _as_flow(folder: Path, key: str, parameters: WarmStartParameters, seed: int) -> dict[str, Any]:
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    def as_task(stage: Call, *args: Any) -> Any:
        return task(stage, name=stage.__name__, cache_policy=NO_CACHE, persist_result=False)(*args)

    run = flow(
        warm_start,
        name="warm_start",
        flow_run_name=f"warm-start-{key}",
        validate_parameters=False,
        persist_result=False,
    )
    return run(folder, key, parameters, seed, as_task)
