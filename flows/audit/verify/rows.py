"""Checks of rows against each other: the same samples in every stage, whole groups, columns as long as the response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.step import Look, base_of, place_of, prompts_of
from storage import Ragged
from storage.schema import TOKEN_FLOATS, schema_of, without_round

PER_SAMPLE = ("rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages")
"""Kinds of artifacts with one row per sample, those of greedy and validation responses under their own names."""

GREEDIEST = 1e-4
"""A log-prob may lie above 0, and an entropy below it, by this much: rounding of a softmax in float32."""


def _of_samples(look: Look) -> Iterator[str]:
    kinds = [*PER_SAMPLE, "greedy_rollouts", "greedy_rewards", "val_rollouts", "val_rewards"]
    yield from look.having(*kinds)


def ids(look: Look, account: Account) -> None:
    """Every stage of a step holds the same samples, each once, in the same groups, and each answers a prompt."""
    for stage in look.having("prompts", "val_prompts"):
        with account.attempt(look.step):
            _unique(look, stage, "group_id", account)
    for stage in _of_samples(look):
        with account.attempt(look.step):
            _unique(look, stage, "sample_id", account)
            base = base_of(stage)
            if stage == base:
                _answers(look, stage, account)
            else:
                _same_samples(look, stage, base, account)


def _unique(look: Look, stage: str, column: str, account: Account) -> None:
    names = look.table(stage)[column]
    account.look(len(names))
    if pc.count_distinct(names).as_py() != len(names):
        for name, number in Counter(names.to_pylist()).items():
            if number > 1:
                account.fail(f"{column} is there {number} times", look.step, stage, name)


def _answers(look: Look, stage: str, account: Account) -> None:
    """The groups of a batch of responses are its prompts; a sample is named after its group and its number in it."""
    table = look.table(stage)
    wanted, found = look.table(prompts_of(stage))["group_id"].to_pylist(), table["group_id"].to_pylist()
    for name in sorted(set(found) - set(wanted)):
        account.fail(f"no prompt is called so in {prompts_of(stage)}", look.step, stage, name)
    for name in sorted(set(wanted) - set(found)):
        account.fail("this prompt has no response", look.step, stage, name)
    ending = "greedy" if stage.startswith("greedy_") else None
    columns = zip(table["sample_id"].to_pylist(), found, table["sample_index"].to_pylist(), strict=True)
    for sample, group, index in columns:
        if sample != f"{group}-{ending or f'{index:03d}'}":
            account.fail(f"it is named otherwise than response {index} of group {group}", look.step, stage, sample)


def _same_samples(look: Look, stage: str, base: str, account: Account) -> None:
    table, of = look.table(stage), look.table(base)
    pairs = [
        dict(zip(*(one[name].to_pylist() for name in ("sample_id", "group_id")), strict=True)) for one in (table, of)
    ]
    found, wanted = pairs
    for name in sorted(wanted.keys() - found.keys()):
        account.fail(f"it is in {base} and not here", look.step, stage, name)
    for name in sorted(found.keys() - wanted.keys()):
        account.fail(f"it is here and not in {base}", look.step, stage, name)
    for name in sorted(found.keys() & wanted.keys()):
        if found[name] != wanted[name]:
            account.fail(f"it is in group {found[name]}, in {base} in {wanted[name]}", look.step, stage, name)


def groups(look: Look, account: Account) -> None:
    """Every prompt has as many responses as asked for, numbered from 0, and a step has as many prompts."""
    for stage in look.having("rollouts", "greedy_rollouts", "val_rollouts"):
        with account.attempt(look.step):
            rollout = look.cfg(stage).actor_rollout_ref.rollout
            n = {"rollouts": rollout.n, "greedy_rollouts": 1, "val_rollouts": rollout.val_kwargs.n}
            _count(look, stage, n[without_round(stage)], account)
    for stage in look.having("prompts"):
        with account.attempt(look.step):
            data = look.cfg(stage).data
            candidates = stage != "prompts"
            wanted = (data.gen_batch_size if candidates else None) or data.train_batch_size
            rows = look.table(stage).num_rows
            account.look()
            if rows != wanted:
                key = "gen_batch_size" if candidates and data.gen_batch_size else "train_batch_size"
                account.fail(f"{rows} prompts, data.{key} is {wanted}", look.step, stage)


def _count(look: Look, stage: str, n: int, account: Account) -> None:
    table = look.table(stage)
    members: dict[str, list[int]] = {}
    for name, index in zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True):
        members.setdefault(name, []).append(index)
    account.look(len(members))
    for name, numbers in members.items():
        if sorted(numbers) != list(range(n)):
            account.fail(f"its responses are numbered {sorted(numbers)}, asked for are {n}", look.step, stage, name)


def lengths(look: Look, account: Account) -> None:
    """Log-probs, entropies, rewards, advantages and masks have one value for every token of the response."""
    for stage in _of_samples(look):
        with account.attempt(look.step):
            base = base_of(stage)
            wanted = pc.list_value_length(look.table(base)["response_ids"]).to_numpy()
            columns = [c.name for c in schema_of(stage) if pa.types.is_large_list(c.type) and c.name != "response_ids"]
            table = look.joined(stage, base, ["sample_id", *columns])
            for name in columns:
                _same_length(look, stage, table, name, wanted, account)
    for stage in look.having("rollouts", "greedy_rollouts", "val_rollouts", "prompts", "val_prompts"):
        with account.attempt(look.step):
            _within_limits(look, stage, account)


def _same_length(look: Look, stage: str, table: pa.Table, name: str, wanted: np.ndarray, account: Account) -> None:
    column = table[name]
    if column.null_count == len(column):
        return
    account.look(len(column))
    found = pc.list_value_length(column).to_pylist()
    for row, (have, want) in enumerate(zip(found, wanted.tolist(), strict=True)):
        if have != want:
            says = "is null, of other samples it is not" if have is None else f"has {have} values"
            account.fail(
                f"{name} {says}, the response has {want} tokens", look.step, stage, str(table["sample_id"][row])
            )


def _within_limits(look: Look, stage: str, account: Account) -> None:
    cfg, of_prompts = look.cfg(stage), without_round(stage).endswith("prompts")
    column, name = ("prompt_ids", "group_id") if of_prompts else ("response_ids", "sample_id")
    limit = cfg.prompt_length if of_prompts else cfg.response_length
    found = pc.list_value_length(look.table(stage)[column]).to_numpy()
    account.look(len(found))
    for row in np.flatnonzero(found > limit):
        says = f"{column} has {found[row]} tokens, the limit is {limit}"
        account.fail(says, look.step, stage, str(look.table(stage)[name][int(row)]))


def finite(look: Look, account: Account) -> None:
    """No score, log-prob, advantage, loss or gradient norm is NaN or infinite; a log-prob is at most 0."""
    for stage in look.stages:
        with account.attempt(look.step):
            table = look.table(stage)
            for column in schema_of(stage):
                if column.type == TOKEN_FLOATS:
                    _finite_tokens(look, stage, table, column.name, account)
                elif pa.types.is_floating(column.type):
                    _finite_rows(look, stage, table, column.name, account)


def _finite_tokens(look: Look, stage: str, table: pa.Table, name: str, account: Account) -> None:
    if table[name].null_count:
        return
    rows = Ragged.from_arrow(table[name])
    account.look(len(rows.values))
    bad = ~np.isfinite(rows.values)
    if name.endswith("log_probs"):
        bad |= rows.values > GREEDIEST
    elif name == "entropy":
        bad |= rows.values < -GREEDIEST
    for place in np.flatnonzero(bad):
        row, token = place_of(rows, int(place))
        says = f"{name} is {rows.values[place]}"
        account.fail(says, look.step, stage, str(table["sample_id"][row]), token)


def _finite_rows(look: Look, stage: str, table: pa.Table, name: str, account: Account) -> None:
    values = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
    known = table[name].is_valid().to_numpy()
    account.look(int(known.sum()))
    for row in np.flatnonzero(known & ~np.isfinite(values)):
        sample = str(table["sample_id"][int(row)]) if "sample_id" in table.column_names else f"update {row}"
        account.fail(f"{name} is {values[row]}", look.step, stage, sample)


def need_samples(look: Look, stage: str) -> pa.Table:
    """A batch of responses with at least one row.

    Raises:
        Cannot: it cannot be read, or has none.
    """
    table = look.table(stage)
    if not table.num_rows:
        raise Cannot(f"{stage} has no rows")
    return table
