"""Checks of the sampler against the policy: do log-probs belong to the tokens and rows that they stand beside?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.rows import need_samples
from flows.audit.verify.step import Look, place_of
from storage import Ragged
from storage.schema import without_round
from tasks.algorithms.advantages import row_of_token

CHANCE = 1e-9
"""Two samples of a group that are equal though that is less likely than this were not drawn independently."""

TWO_POLICIES = 1.0
"""Mean |difference| of the sampler's and the policy's log-probs of one response, nats, from which on the two are hardly
of the same tokens: rounding, also in bfloat16, stays below a tenth of it."""

SAME = TWO_POLICIES / 10
"""Up to here they are."""


def retokenised(look: Look, account: Account) -> None:
    """No response is its own text encoded again: log-probs and ending belong to the tokens as they were sampled.

    A text often encodes to the very ids that were sampled, so this alone proves nothing. Named are responses whose
    stored log-probs or ending do not fit their ids, while their text encodes to these ids.
    """
    for stage in look.having("rollouts"):
        with account.attempt(look.step):
            table = need_samples(look, stage)
            ids = Ragged.from_arrow(table["response_ids"])
            account.look(len(ids))
            suspects = _suspects(look, stage, table, ids)
            if not suspects:
                continue
            texts = [table["response_text"][row].as_py() for row in suspects]
            encoded = look.bench.tokenizer(texts, add_special_tokens=False)["input_ids"]
            for (row, evidence), again in zip(suspects.items(), encoded, strict=True):
                if again == ids[row].tolist():
                    says = f"its {len(again)} ids are its text encoded again: {evidence}"
                    account.fail(says, look.step, stage, str(table["sample_id"][row]))


def _suspects(look: Look, stage: str, table: pa.Table, ids: Ragged) -> dict[int, str]:
    """Rows whose ids do not fit what is stored beside them, and in which way."""
    found: dict[int, str] = {}
    ends = look.bench.end_tokens
    stops = look.cfg(stage).actor_rollout_ref.rollout.stop
    for row, reason in enumerate(table["finish_reason"].to_pylist()):
        if reason == "stop" and not stops and (not len(ids[row]) or int(ids[row][-1]) not in ends):
            found[row] = "it stopped, and the end token it stopped at is gone"
    for other, name in (("rollouts", "rollout_log_probs"), ("old_log_probs", "old_log_probs")):
        for row, length in enumerate(_lengths(look, stage, other, name)):
            if length is not None and length != len(ids[row]):
                found[row] = f"{name} has values of {length} tokens"
    for row, gap in _gaps(look, stage, ids):
        if gap > TWO_POLICIES and not _elsewhere(look, stage, row):
            found.setdefault(row, f"the policy's log-probs differ from the sampler's by {gap:.2g} nats a token")
    return found


def _elsewhere(look: Look, stage: str, row: int) -> bool:
    """Whether the policy's log-probs of a row are the sampler's of a neighbouring token or of another sample."""
    sampled, old = _two_log_probs(look, stage)
    return bool(_shift(sampled[row], old[row])) or any(_gap(one, old[row]) <= SAME for one in sampled)


def _lengths(look: Look, stage: str, other: str, name: str) -> Iterable[int | None]:
    try:
        column = look.joined(other, stage, [name])[name]
    except Cannot:
        return []
    return [None if row is None else len(row) for row in column.to_pylist()]


def _gaps(look: Look, stage: str, ids: Ragged) -> list[tuple[int, float]]:
    """Mean |difference| of the two log-probs of each response, nats; nothing where they are not of one kind."""
    try:
        sampled, old = _two_log_probs(look, stage)
    except Cannot:
        return []
    if not (np.array_equal(sampled.offsets, old.offsets) and np.array_equal(old.offsets, ids.offsets)):
        return []
    gap = np.abs(sampled.values.astype(np.float64) - old.values)
    sums = np.bincount(row_of_token(old), weights=gap, minlength=len(old))
    return list(enumerate((sums / np.maximum(old.lengths, 1)).tolist()))


def _two_log_probs(look: Look, stage: str) -> tuple[Ragged, Ragged]:
    """The sampler's and the policy's log-probs of the same tokens.

    Raises:
        Cannot: one of them is not there, or they are of two distributions (temperature, filters, raw logits).
    """
    notes, other = look.manifest(stage).notes, look.manifest("old_log_probs").notes
    if other.get("of") == "engine":
        raise Cannot("in bypass mode the old log-probs are the sampler's own")
    kinds = [{key: one.get(key, default) for key, default in _KIND.items()} for one in (notes, other)]
    if kinds[0] != kinds[1]:
        said = "; ".join(
            f"{key} {kinds[0][key]} and {kinds[1][key]}" for key in _KIND if kinds[0][key] != kinds[1][key]
        )
        raise Cannot(f"the sampler's log-probs are of another distribution than the policy's ({said})")
    column = look.table(stage)["rollout_log_probs"]
    if column.null_count:
        raise Cannot("the sampler's log-probs were not asked for")
    old = look.joined("old_log_probs", stage, ["old_log_probs"])["old_log_probs"]
    return Ragged.from_arrow(column), Ragged.from_arrow(old)


_KIND = {"log_probs": "processed", "temperature": 1.0, "filters": "none"}
"""Notes that say which distribution log-probs are of."""


def rows(look: Look, account: Account) -> None:
    """The log-probs of a row are those of the tokens of its sample, not of neighbours or of another sample."""
    for stage in ("rollouts",) if "old_log_probs" in look.stages else ():
        with account.attempt(look.step):
            table = need_samples(look, stage)
            sampled, old = _two_log_probs(look, stage)
            names = table["sample_id"].to_pylist()
            account.look(len(names))
            for row, name in enumerate(names):
                if _gap(sampled[row], old[row]) <= TWO_POLICIES:
                    continue
                if by := _shift(sampled[row], old[row]):
                    says = f"its log-probs are those of the token {'before' if by < 0 else 'behind'}"
                    account.fail(says, look.step, "old_log_probs", name, 0)
                elif others := [n for i, n in enumerate(names) if i != row and _gap(sampled[i], old[row]) <= SAME]:
                    says = f"its log-probs are those of {others[0]}: rows have changed places"
                    account.fail(says, look.step, "old_log_probs", name)


def _gap(sampled: np.ndarray, old: np.ndarray) -> float:
    """Mean |difference| of two rows of log-probs, nats; infinite where they are not as long."""
    if len(sampled) != len(old):
        return float("inf")
    return float(np.abs(sampled.astype(np.float64) - old).mean()) if len(old) else 0.0


def _shift(sampled: np.ndarray, old: np.ndarray) -> int:
    """1 or -1 where the policy's log-probs stand one token too early or too late; 0: they do not."""
    if len(sampled) != len(old) or len(old) < 3:
        return 0
    return 1 if _gap(sampled[1:], old[:-1]) <= SAME else -1 if _gap(sampled[:-1], old[1:]) <= SAME else 0


def duplicates(look: Look, account: Account) -> None:
    """Samples of a group are drawn independently: none share a random stream, or are equal against all odds."""
    for stage in look.having("rollouts"):
        with account.attempt(look.step):
            table = need_samples(look, stage)
            account.look(table.num_rows)
            seen: dict[int, str] = {}
            for sample, seed in zip(table["sample_id"].to_pylist(), table["seed"].to_pylist(), strict=True):
                if seed in seen:
                    account.fail(f"it has the random stream of {seen[seed]}", look.step, stage, sample)
                seen.setdefault(seed, sample)
            rollout = look.cfg(stage).actor_rollout_ref.rollout
            if not rollout.do_sample or rollout.temperature == 0:
                account.skip("greedy responses to a prompt are equal", look.step)
            elif without_round(stage) == stage:
                _against_all_odds(look, stage, table, account)


def _against_all_odds(look: Look, stage: str, table: pa.Table, account: Account) -> None:
    old = Ragged.from_arrow(look.joined("old_log_probs", stage, ["old_log_probs"])["old_log_probs"])
    ids = Ragged.from_arrow(table["response_ids"])
    if not np.array_equal(old.offsets, ids.offsets):
        raise Cannot("the old log-probs are not as long as the responses, see `lengths`")
    chance = np.bincount(row_of_token(old), weights=old.values, minlength=len(old))
    n, first = look.cfg(stage).actor_rollout_ref.rollout.n, dict[tuple[str, bytes], str]()
    names = zip(table["sample_id"].to_pylist(), table["group_id"].to_pylist(), strict=True)
    for row, (sample, group) in enumerate(names):
        key = (group, ids[row].tobytes())
        if key in first and chance[row] + np.log(max(n - 1, 1)) < np.log(CHANCE):
            says = f"it is equal to {first[key]}, of which the chance is e^{chance[row]:.0f}"
            account.fail(says, look.step, stage, sample)
        first.setdefault(key, sample)


def sampler_gap(look: Look, account: Account) -> None:
    """The engine's probabilities of the sampled tokens are the policy's, within the bound of `trainer.alarms`.

    Compared are log-probs of one kind alone: with the same temperature, without filters, after or before both.
    """
    from tasks.log_prob import sampler_gap as measure

    for stage in ("rollouts",) if "old_log_probs" in look.stages else ():
        with account.attempt(look.step):
            table = need_samples(look, stage)
            sampled, old = _two_log_probs(look, stage)
            if not np.array_equal(sampled.offsets, old.offsets):
                raise Cannot("the two log-probs have other lengths, see `lengths`")
            measured, bound = measure(table, old), look.cfg().trainer.alarms.rollout_probs_diff_mean
            mean = measured.get("training/rollout_probs_diff_mean", 0.0)
            account.look(len(old.values), mean)
            if bound is not None and mean > bound:
                gap = np.abs(np.exp(sampled.values.astype(np.float64)) - np.exp(old.values.astype(np.float64)))
                row, token = place_of(old, int(gap.argmax()))
                says = f"mean difference {mean:.4g}, largest here: {gap.max():.4g}"
                account.fail(says, look.step, stage, str(table["sample_id"][row]), token)
