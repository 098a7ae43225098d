"""Checks of tokens: which prompts were given, by which random streams was sampled, what it reads as, how it ended."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.rows import need_samples
from flows.audit.verify.step import Look, place_of, prompts_of
from storage import Ragged
from storage.schema import escape_surrogates
from tasks.config import RunConfig
from tasks.seeds import sample_seed

RESPONSES = ("rollouts", "greedy_rollouts", "val_rollouts")


def prompts(look: Look, account: Account) -> None:
    """Every prompt is the row of the data set that its number names, and the rows are those of this step's turn."""
    for stage in look.having("prompts", "val_prompts"):
        with account.attempt(look.step):
            manifest, table, cfg = look.manifest(stage), look.table(stage), look.cfg(stage)
            digest = (manifest.made_from or {}).get("also", {}).get("data") or _digest_of_calls(look)
            which = "val" if stage == "val_prompts" else "train"
            data = look.bench.prompts(cfg, which, digest).table
            index = table["prompt_index"].to_numpy()
            account.look(len(index))
            for row in np.flatnonzero((index < 0) | (index >= data.num_rows)):
                says = f"prompt_index is {index[row]}, the data set has {data.num_rows} rows"
                account.fail(says, look.step, stage, str(table["group_id"][int(row)]))
            if ((index >= 0) & (index < data.num_rows)).all():
                _same_rows(look, stage, data.take(pa.array(index)), account)
                _in_turn(look, stage, data.num_rows, cfg, account)


def _digest_of_calls(look: Look) -> str:
    """Digest of the data of a step whose prompts were kept out of those of several generate calls."""
    for stage in look.having("prompts"):
        digest = (look.manifest(stage).made_from or {}).get("also", {}).get("data")
        if digest:
            return str(digest)
    raise Cannot("which data the prompts were taken from was not written down")


def _same_rows(look: Look, stage: str, data: pa.Table, account: Account) -> None:
    table = look.table(stage)
    for name in data.column_names:
        if table[name].equals(data[name]):
            continue
        for row, (stored, wanted) in enumerate(zip(table[name].to_pylist(), data[name].to_pylist(), strict=True)):
            if stored != wanted:
                says = f"{name} is {_brief(stored)}, in the data set {_brief(wanted)}"
                account.fail(says, look.step, stage, str(table["group_id"][row]))


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _in_turn(look: Look, stage: str, rows: int, cfg: RunConfig, account: Account) -> None:
    """The rows follow from (seed, epoch, step); those that dynamic sampling kept come from calls that do."""
    from tasks.data import step_rows

    table, data = look.table(stage), cfg.data
    if stage == "val_prompts":
        wanted = np.arange(rows)
    elif "prompts-01" in look.stages and stage == "prompts":
        return
    else:
        number = stage.removeprefix("prompts").removeprefix("-")
        turn = _calls_before(look) + int(number) if number else look.step
        size = (data.gen_batch_size or data.train_batch_size) if number else data.train_batch_size
        wanted = step_rows(turn, rows, size, cfg.trainer.seed if data.seed is None else data.seed, data.shuffle)[1]
    found = table["prompt_index"].to_numpy()
    account.look(len(found))
    for row in range(max(len(found), len(wanted))):
        if row >= len(found) or row >= len(wanted) or found[row] != wanted[row]:
            says = f"prompt {row} is row {found[row] if row < len(found) else 'none'} of the data set, its turn was "
            says += f"row {wanted[row]}" if row < len(wanted) else "no row's"
            account.fail(says, look.step, stage, str(table["group_id"][row]) if row < len(found) else None)


def _calls_before(look: Look) -> int:
    if look.step < 2:
        return 0
    before = look.run.step(look.step - 1).manifest("prompts")
    if before is None:
        raise Cannot("the step before has no prompts that say how many generate calls were made")
    return int(before.notes.get("generate_calls", 0))


def seeds(look: Look, account: Account) -> None:
    """Every response has the random stream of its place: run seed, step, row of the data set, slot and number."""
    for stage in look.having(*RESPONSES):
        with account.attempt(look.step):
            table, prompts = look.table(stage), look.table(prompts_of(stage))
            index = dict(zip(*(prompts[name].to_pylist() for name in ("group_id", "prompt_index")), strict=True))
            seed = look.cfg(stage).trainer.seed
            names = ("sample_id", "group_id", "sample_index", "seed")
            account.look(table.num_rows)
            for sample, group, number, stored in zip(*(table[name].to_pylist() for name in names), strict=True):
                if group not in index:
                    continue
                wanted = sample_seed(seed, look.step, index[group], int(group.rsplit("-", 1)[1]), number)
                if stored != wanted:
                    account.fail(f"its seed is {stored}, of this place {wanted}", look.step, stage, sample)


def text(look: Look, account: Account) -> None:
    """The text that reward functions read is what the sampled ids decode to."""
    for stage in look.having(*RESPONSES):
        with account.attempt(look.step):
            table, tokenizer = look.table(stage), look.bench.tokenizer
            ids = Ragged.from_arrow(table["response_ids"])
            rows = [row.tolist() for row in ids]
            account.look(len(rows))
            for place in np.flatnonzero(ids.values < 0):
                row, token = place_of(ids, int(place))
                says = f"token id {ids.values[place]} is none"
                account.fail(says, look.step, stage, str(table["sample_id"][row]), token)
                rows[row] = []
            decoded = tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []
            stored = table["response_text"].to_pylist()
            for row, (have, want) in enumerate(zip(stored, map(escape_surrogates, decoded), strict=True)):
                if len(rows[row]) != ids.lengths[row]:
                    continue
                if have != want:
                    says = f"response_text is {_brief(have)}, its ids decode to {_brief(want)}"
                    account.fail(says, look.step, stage, str(table["sample_id"][row]))


def endings(look: Look, account: Account) -> None:
    """A response that stopped ends with an end token or a stop text; one cut by length fills its limit without."""
    for stage in look.having(*RESPONSES):
        with account.attempt(look.step):
            table, cfg = need_samples(look, stage), look.cfg(stage)
            ends = look.bench.end_tokens
            ids = Ragged.from_arrow(table["response_ids"])
            is_end = np.isin(ids.values, list(ends)) & (not cfg.actor_rollout_ref.rollout.ignore_eos)
            last = np.zeros(len(is_end), dtype=bool)
            last[ids.offsets[1:][ids.lengths > 0] - 1] = True
            account.look(len(ids))
            for place in np.flatnonzero(is_end & ~last):
                row, token = place_of(ids, int(place))
                says = f"token {ids.values[place]} ends a response, and this one goes on behind it"
                account.fail(says, look.step, stage, str(table["sample_id"][row]), token)
            _check_reasons(look, stage, is_end, account)


def _check_reasons(look: Look, stage: str, is_end: np.ndarray, account: Account) -> None:
    table, cfg = look.table(stage), look.cfg(stage)
    ids, stops = Ragged.from_arrow(table["response_ids"]), cfg.actor_rollout_ref.rollout.stop
    limits = _limits(look, stage, cfg)
    names = ("sample_id", "finish_reason", "response_text")
    for row, (sample, reason, said) in enumerate(zip(*(table[name].to_pylist() for name in names), strict=True)):
        length = int(ids.lengths[row])
        ended = length > 0 and bool(is_end[ids.offsets[row + 1] - 1])
        if reason == "stop" and not ended and not any(stop in said for stop in stops):
            account.fail("finish_reason is stop, and no end token or stop text is there", look.step, stage, sample)
        elif reason == "length" and ended:
            account.fail("finish_reason is length, and it ends with an end token", look.step, stage, sample)
        elif reason == "length" and length < limits[row]:
            says = f"finish_reason is length, it has {length} tokens of {limits[row]} that it may have"
            account.fail(says, look.step, stage, sample)


def _limits(look: Look, stage: str, cfg: RunConfig) -> list[int]:
    """[N] tokens that each response may have; where the model's context is not known, none is too short."""
    context = cfg.actor_rollout_ref.rollout.max_model_len or _context(cfg)
    if context is None:
        return [0] * look.table(stage).num_rows
    prompts = look.table(prompts_of(stage))
    size = {
        name: len(ids) for name, ids in zip(*(prompts[c].to_pylist() for c in ("group_id", "prompt_ids")), strict=True)
    }
    names = look.table(stage)["group_id"].to_pylist()
    return [min(max(context - size.get(name, context), 1), cfg.response_length) for name in names]


def _context(cfg: RunConfig) -> int | None:
    path = Path(cfg.actor_rollout_ref.model.path or "").expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    tokens: int | None = (config.get("text_config") or config).get("max_position_embeddings")
    return tokens
