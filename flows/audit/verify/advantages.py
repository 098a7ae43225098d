"""Checks of advantages and loss masks: made again from the stored scores, and compared token by token."""

from __future__ import annotations

import shutil
from contextlib import suppress

import numpy as np
import pyarrow as pa

from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.step import Look
from storage import Artifact, Ragged
from storage.artifacts import Manifest, read_manifest
from storage.schema import TOKEN_FLAGS, TOKEN_FLOATS, schema_of
from tasks.algorithms.advantages import row_of_token
from tasks.stage import StageError, Step, code_digest

SAME_ADVANTAGE = 1e-6
"""Relative difference of advantages and returns: float32 values out of the same float64 arithmetic, on machines whose
sums are rounded in another order."""


def advantages_again(look: Look) -> tuple[pa.Table, Manifest]:
    """The advantages made again from the stored scores, in the order of the stored ones; made once for all checks.

    Raises:
        Cannot: an input is not there, or the estimator refuses it.
    """
    if "advantages" not in look.made_again:
        try:
            look.made_again["advantages"] = _advantages_again(look)
        except Cannot as reason:
            look.made_again["advantages"] = reason
    found = look.made_again["advantages"]
    if isinstance(found, Cannot):
        raise found
    table, manifest = found
    return table, manifest


def _advantages_again(look: Look) -> tuple[pa.Table, Manifest]:
    from storage import read_table
    from tasks.advantage import advantage

    cfg = look.cfg("advantages")
    names = ["rollouts", "rewards", "old_log_probs"]
    names += ["ref_log_probs"] if cfg.needs_ref else []
    names += ["greedy_rollouts", "greedy_rewards"] if cfg.estimator_needs("greedy_score") else []
    for name in names:
        _ = look.table(name)
    found: dict[str, Artifact] = {name: look.artifact(name) for name in names}
    before = look.run.step(look.step - 1).artifact("advantages") if look.step > 1 else None
    greedy = (found["greedy_rollouts"], found["greedy_rewards"]) if "greedy_rollouts" in found else None
    step = Step(look.step, look.bench.scratch, cfg)
    try:
        made = advantage(
            step,
            found["rollouts"],
            found["rewards"],
            found["old_log_probs"],
            found.get("ref_log_probs"),
            before,
            greedy,
        )
    except StageError as error:
        raise Cannot(f"the stage refuses its stored inputs: {error}") from error
    table, manifest = read_table(made), read_manifest(made.folder)
    # The mapped file stays readable until the table is gone; the folder need not wait for the end of the command.
    shutil.rmtree(made.folder.parent.parent, ignore_errors=True)
    return table, manifest


def advantages(look: Look, account: Account) -> None:
    """Token rewards, advantages, returns, group statistics and weights follow from the stored scores."""
    _compare_again(look, account, masks=False)


def loss_masks(look: Look, account: Account) -> None:
    """The tokens that take part in the loss, and why others do not, follow from the stored scores and responses."""
    _compare_again(look, account, masks=True)


def _compare_again(look: Look, account: Account, *, masks: bool) -> None:
    for stage in look.having("advantages"):
        with account.attempt(look.step):
            stored = look.joined(stage, "rollouts", look.table(stage).column_names)
            made, _ = advantages_again(look)
            ids = made["sample_id"]
            for column in schema_of(stage):
                if column.name in ("sample_id", "group_id") or (column.name in ("loss_mask", "no_signal")) != masks:
                    continue
                _compare_column(look, stage, column, stored[column.name], made[column.name], ids, account)


def _compare_column(
    look: Look,
    stage: str,
    column: pa.Field,
    stored: pa.ChunkedArray,
    made: pa.ChunkedArray,
    ids: pa.ChunkedArray,
    account: Account,
) -> None:
    account.look(len(stored))
    if column.type in (TOKEN_FLOATS, TOKEN_FLAGS) and not (stored.null_count or made.null_count):
        _compare_tokens(look, stage, column.name, Ragged.from_arrow(stored), Ragged.from_arrow(made), ids, account)
        return
    for row, (have, want) in enumerate(zip(stored.to_pylist(), made.to_pylist(), strict=True)):
        same = have == want
        if isinstance(have, float) and isinstance(want, float):
            account.look(0, abs(have - want))
            same = abs(have - want) <= SAME_ADVANTAGE * max(1.0, abs(want))
        if not same:
            says = f"{column.name} is {have!r}, made again it is {want!r}{_other_code(look, stage)}"
            account.fail(says, look.step, stage, str(ids[row]))


def _compare_tokens(
    look: Look, stage: str, name: str, stored: Ragged, made: Ragged, ids: pa.ChunkedArray, account: Account
) -> None:
    """Every sample that differs is named, at its first token that does."""
    rows = list(range(len(made)))
    if np.array_equal(stored.offsets, made.offsets):
        if made.values.dtype != bool:
            account.look(0, float(np.abs(stored.values - made.values).max(initial=0.0)))
        rows = np.unique(row_of_token(made)[_beyond(stored.values, made.values)]).tolist()
    for row in rows:
        have, want, sample = stored[row], made[row], str(ids[row])
        if len(have) != len(want):
            account.fail(f"{name} has {len(have)} values, made again {len(want)}", look.step, stage, sample)
        elif (bad := _beyond(have, want)).any():
            token = int(bad.argmax())
            says = f"{name} is {have[token]}, made again it is {want[token]}{_other_code(look, stage)}"
            account.fail(says, look.step, stage, sample, token)


def _beyond(have: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two arrays of values, or of flags, differ by more than rounding."""
    if want.dtype == bool:
        return have != want
    return ~(np.abs(have.astype(np.float64) - want) <= SAME_ADVANTAGE * np.maximum(1.0, np.abs(want)))


def _other_code(look: Look, stage: str) -> str:
    """Says where the code that makes an artifact is another one than it was made by: that too may be why."""
    modules = (look.manifest(stage).made_from or {}).get("modules", {})
    with suppress(ValueError):
        changed = [name for name, digest in modules.items() if code_digest((name,)) != digest]
        if changed:
            return f" (the code of {', '.join(changed)} is another one than the run's)"
    return ""
