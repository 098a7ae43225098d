"""The policy on its way to an engine with weights of its own, for a worker that has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.engines.policy_folder import check_of, finish
from tasks.engines.vllm_engine import VllmEngine
from tasks.workers.export import save_whole
from tasks.workers.model import without_progress_bar
from tasks.workers.sequences import MicroBatching
from tasks.workers.weights import files_bytes, full_disk_as_os_error

if TYPE_CHECKING:
    from tasks.workers.policy import PolicyWorker


def hand_over(worker: PolicyWorker, engine: VllmEngine) -> bool:
    """Have the engine hold the worker's weights as they are now. For a worker that has the whole policy.

    Returns:
        Whether they had to be loaded.

    Raises:
        OSError: there is no room for the weights.
        WeightsNotTaken: the engine does not compute what the worker computes.
    """
    version, digest = worker.policy_version, worker.weights_digest()
    if engine.holds(version, digest):
        return False
    needed = files_bytes(dict(worker.model.network.named_parameters()))
    folder = engine.new_folder(version, needed)
    write_policy(worker, folder)
    engine.load(folder, version, digest)
    return True


def write_policy(worker: PolicyWorker, folder: Path) -> None:
    """Write the policy as it is now, an adapter merged, with its check, into an empty folder.

    Raises:
        OSError: the files cannot be written.
    """
    with full_disk_as_os_error(folder), without_progress_bar():
        save_whole(worker.model, folder)
    check = check_of(worker.cfg, folder)
    log_probs = worker.log_probs(check, MicroBatching(1, None), temperature=1.0).log_probs.values
    finish(folder, worker.policy_version, worker.weights_digest(), check, log_probs)
