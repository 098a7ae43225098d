"""Checks of rewards: scores against their parts, and responses scored again by the run's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.step import Look, base_of, prompts_of
from tasks.seeds import hashed

if TYPE_CHECKING:
    from tasks.rewards.pool import RewardRow, Verdict

SCORED = ("rewards", "greedy_rewards", "val_rewards")

SAME_SCORE = 1e-9
"""Relative difference of two sums of the same float64 numbers."""


def scores(look: Look, account: Account) -> None:
    """A score is the weighted sum of its parts, and is null exactly where the status says that there is no verdict."""
    from tasks.rewards.calls import RewardError
    from tasks.rewards.functions import configured_functions

    for stage in look.having(*SCORED):
        with account.attempt(look.step):
            table = look.table(stage)
            names = ("sample_id", "score", "status", "parts")
            try:
                own = {function.name: function.weight for function in configured_functions(look.cfg(stage))}
            except (RewardError, OSError) as error:
                raise Cannot(f"the weights of the reward functions are not at hand: {error}") from error
            for sample, score, status, parts in zip(*(table[name].to_pylist() for name in names), strict=True):
                _check_score(look, stage, sample, score, status, dict(parts), own, account)


def _check_score(
    look: Look,
    stage: str,
    sample: str,
    score: float | None,
    status: str,
    parts: Mapping[str, float | None],
    weights: Mapping[str, float],
    account: Account,
) -> None:
    if (score is None) == (status in ("ok", "unparsed")):
        account.fail(f"status is {status}, score is {score}", look.step, stage, sample)
    if score is None:
        account.look()
        return
    # The built-in function of a data source has weight 1.
    wanted = sum(weights.get(name, 1.0) * part for name, part in parts.items() if part is not None)
    account.look(1, abs(score - wanted))
    if not abs(score - wanted) <= SAME_SCORE * max(1.0, abs(wanted)):
        account.fail(f"score is {score:g}, its parts make {wanted:g}", look.step, stage, sample)


def rewards(look: Look, account: Account) -> None:
    """Responses scored again by the run's own reward functions get the score, parts, status and answer stored.

    Samples that have no verdict through an error or a time limit are left out: another time may have another outcome.
    """
    from tasks.reward import reward_rows

    for stage in look.having(*SCORED):
        with account.attempt(look.step):
            stored = look.joined(stage, base_of(stage), ["sample_id", "score", "status", "parts", "extracted"])
            cfg = look.cfg(stage)
            pool = look.bench.pool(cfg)
            known = (look.manifest(stage).made_from or {}).get("also", {}).get("functions")
            if known is not None and known != pool.code_digest:
                raise Cannot("the source of the reward functions is another one than the run's")
            _ = look.table(prompts_of(stage))
            try:
                rows = reward_rows(look.artifact(prompts_of(stage)), look.artifact(base_of(stage)))
            except KeyError as error:
                raise Cannot("a response answers no prompt, see `ids`") from error
            chosen = _chosen(look, stage, rows, stored["status"].to_pylist())
            verdicts = _scored(pool, [rows[i] for i in chosen])
            account.look(len(chosen))
            for i, verdict in zip(chosen, verdicts, strict=True):
                _compare_verdict(look, stage, stored.slice(i, 1).to_pylist()[0], verdict, account)


def _chosen(look: Look, stage: str, rows: Sequence[RewardRow], statuses: Sequence[str]) -> list[int]:
    """Rows to score again: all, or as many as asked for, drawn by their names, with their whole groups.

    A function of TRL's form sees a group at a time, so groups are taken whole.
    """
    judged = [i for i, status in enumerate(statuses) if status in ("ok", "unparsed", "not_applicable")]
    if look.bench.rescore is None:
        return judged
    by_group: dict[str, list[int]] = {}
    for i in judged:
        by_group.setdefault(rows[i].group_id, []).append(i)
    drawn: list[int] = []
    for group in sorted(by_group, key=lambda name: hashed("rescore", look.step, stage, name)):
        if len(drawn) >= look.bench.rescore:
            break
        drawn += by_group[group]
    return sorted(drawn)


def _scored(pool: Any, rows: list[RewardRow]) -> list[Verdict]:
    from tasks.rewards.pool import RewardError

    try:
        verdicts: list[Verdict] = pool.score(rows)
    except RewardError as error:
        raise Cannot(f"the reward functions cannot score here: {error}") from error
    return verdicts


def _compare_verdict(look: Look, stage: str, stored: Mapping[str, Any], made: Verdict, account: Account) -> None:
    sample = stored["sample_id"]
    if made.status in ("error", "timeout"):
        account.skip(f"a reward function failed when it was called again: {made.message}"[:160], look.step)
        return
    pairs: list[tuple[str, Any, Any]] = [
        ("score", stored["score"], made.score),
        ("status", stored["status"], made.status),
    ]
    pairs.append(("extracted", stored["extracted"], made.extracted))
    parts = dict(stored["parts"])
    pairs += [(f"part {name}", parts.get(name), value) for name, value in made.parts.items()]
    for name, have, want in pairs:
        if isinstance(have, float) and isinstance(want, float):
            account.look(0, abs(have - want))
            if abs(have - want) <= SAME_SCORE * max(1.0, abs(want)):
                continue
        if have != want:
            account.fail(f"{name} is {have!r}, scored again it is {want!r}", look.step, stage, sample)
