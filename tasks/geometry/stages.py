"""The shape table of one step: what every stage computes and stores, over all devices and on one. Pure.

Two views of the same batch: padded, as tensors meet it in memory, and as stored, where a row of a list column is as
long as its own prompt or response and nothing is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from tasks.config import RunConfig
from tasks.geometry.numbers import Cut, Numbers

_BITS = {"int64": 64, "int32": 32, "float64": 64, "float32": 32, "bool": 1}
_OFFSET_BYTES = 8
"""Width of an Arrow `large_list` offset."""


@dataclass(frozen=True)
class StageShape:
    """One tensor or column of one stage.

    Shapes are [sequences or prompts, tokens], padded to the longest; `local_shape` is the part of one `local_unit`.
    """

    stage: str
    column: str
    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...] | None
    local_unit: str
    stored_bytes: int | None
    """Arrow bytes of the column when every row has full length; None: exists in memory only."""
    note: str = ""

    @property
    def padded_bytes(self) -> int:
        """Bytes of the padded tensor over all devices."""
        return ceil(prod(self.global_shape) * _BITS[self.dtype] / 8)


def stage_shapes(cfg: RunConfig, numbers: Numbers) -> tuple[StageShape, ...]:
    """The stages of a step in their order."""
    return (
        *_prompts(numbers),
        *_generate(numbers),
        *(_filtered(numbers) if cfg.algorithm.filter_groups.enable else ()),
        *(_greedy(numbers) if cfg.estimator_needs("greedy_score") else ()),
        *_old_log_probs(cfg, numbers),
        *_log_probs(numbers, "ref_log_prob", ("ref_log_probs",), numbers.ref_log_prob_cut),
        _stored("reward", "score", "float64", (numbers.sequences_per_step,), None, ""),
        *_advantage(numbers),
        *_update(numbers),
    )


def _stored(
    stage: str,
    column: str,
    dtype: str,
    shape: tuple[int, ...],
    local: tuple[int, ...] | None,
    unit: str,
    note: str = "",
) -> StageShape:
    """A committed column: a list per row where the shape has tokens, else one value per row."""
    values = ceil(prod(shape) * _BITS[dtype] / 8)
    offsets = (shape[0] + 1) * _OFFSET_BYTES if len(shape) > 1 else 0
    return StageShape(stage, column, dtype, shape, local, unit, values + offsets, note)


def _prompts(numbers: Numbers) -> tuple[StageShape, ...]:
    shape = (numbers.gen_batch_prompts, numbers.prompt_length)
    note = "gen_batch"
    return (_stored("prompts", "prompt_ids", "int32", shape, None, "", note),)


def _generate(numbers: Numbers) -> tuple[StageShape, ...]:
    unit, rows, tokens = "replica", numbers.sequences_per_gen_batch, numbers.response_length
    requests = _rows(numbers.sequences_per_rollout_replica)
    response = (requests, tokens) if requests else None
    prompts = _rows(numbers.prompts_per_rollout_replica)
    return (
        StageShape(
            "generate",
            "prompts",
            "int64",
            (numbers.gen_batch_prompts, numbers.prompt_length),
            (prompts, numbers.prompt_length) if prompts else None,
            unit,
            None,
            f"{numbers.samples_per_prompt} samples each",
        ),
        _stored("generate", "response_ids", "int32", (rows, tokens), response, unit, "gen_batch_output"),
        _stored("generate", "rollout_log_probs", "float32", (rows, tokens), response, unit),
        StageShape(
            "generate",
            "prompt + response",
            "int64",
            (rows, numbers.padded_sequence_tokens),
            (requests, numbers.padded_sequence_tokens) if requests else None,
            unit,
            None,
            "never built as a whole",
        ),
    )


def _filtered(numbers: Numbers) -> tuple[StageShape, ...]:
    """What is left of all generate calls of a step, and what the stages behind it work on."""
    shape = (numbers.sequences_per_step, numbers.response_length)
    return (_stored("filter_groups", "response_ids", "int32", shape, None, "", "groups with a signal"),)


def _greedy(numbers: Numbers) -> tuple[StageShape, ...]:
    shape = (numbers.prompts_per_step, numbers.response_length)
    return (_stored("generate", "greedy response_ids", "int32", shape, None, "", "the baseline of each prompt"),)


def _old_log_probs(cfg: RunConfig, numbers: Numbers) -> tuple[StageShape, ...]:
    if numbers.old_log_prob_cut is None:
        shape = (numbers.sequences_per_step, numbers.response_length)
        note = "the engine's: no forward"
        return (_stored("old_log_prob", "old_log_probs", "float32", shape, None, "", note),)
    squares = ("sum_pi_squared",) if cfg.estimator_needs("sum_pi_squared") else ()
    columns = ("old_log_probs", "entropy", *squares)
    return _log_probs(numbers, "old_log_prob", columns, numbers.old_log_prob_cut)


def _log_probs(numbers: Numbers, stage: str, columns: tuple[str, ...], cut: Cut | None) -> tuple[StageShape, ...]:
    if cut is None:
        return ()
    rows, tokens = numbers.sequences_per_step, numbers.response_length
    local = (numbers.sequences_per_rank, tokens) if numbers.sequences_per_rank else None
    forwards = cut.micro_batches(numbers.sequences_per_rank)
    whole = (rows, numbers.padded_sequence_tokens)
    return (
        StageShape(
            stage,
            "one forward",
            "int64",
            whole,
            _micro(numbers, cut),
            "micro-batch",
            None,
            _times(cut, forwards, "forward"),
        ),
        *(_stored(stage, column, "float32", (rows, tokens), local, "rank") for column in columns),
    )


def _advantage(numbers: Numbers) -> tuple[StageShape, ...]:
    shape = (numbers.sequences_per_step, numbers.response_length)
    return (
        *(
            _stored("advantage", name, "float32", shape, None, "")
            for name in ("token_rewards", "advantages", "returns")
        ),
        _stored("advantage", "loss_mask", "bool", shape, None, ""),
    )


def _update(numbers: Numbers) -> tuple[StageShape, ...]:
    cut, tokens = numbers.update_cut, numbers.padded_sequence_tokens
    share = numbers.sequences_per_mini_batch_per_rank
    batch = (numbers.sequences_per_step, tokens)
    counts = numbers.micro_batches_per_mini_batch
    return (
        StageShape(
            "update",
            "one mini-batch",
            "int64",
            (min(numbers.sequences_per_mini_batch, numbers.sequences_per_step), tokens),
            (share, tokens) if share else None,
            "rank",
            None,
            f"{len(numbers.prompts_of_mini_batches)} per epoch",
        ),
        StageShape(
            "update",
            "one forward/backward",
            "int64",
            batch,
            _micro(numbers, cut),
            "micro-batch",
            None,
            _times(cut, counts[0] if counts else None, "micro-batch") + " each",
        ),
        StageShape(
            "update",
            "updates",
            "float64",
            (numbers.optimizer_steps_per_step,),
            None,
            "",
            None,
            "one row per optimizer step",
        ),
    )


def _micro(numbers: Numbers, cut: Cut) -> tuple[int, int] | None:
    held = cut.full_length_sequences_per_micro_batch
    return (held, numbers.padded_sequence_tokens) if held else None


_PLURAL = {"forward": "forwards", "micro-batch": "micro-batches"}


def _times(cut: Cut, times: int | None, word: str) -> str:
    if times is None:
        return f"no whole number of {_PLURAL[word]}"
    return f"{times} {word if times == 1 else _PLURAL[word]}" + (
        f" at full length under {cut.token_budget} tokens" if cut.by_tokens else ""
    )


def _rows(share: float | None) -> int | None:
    """The largest share: replicas may differ by one."""
    return None if share is None else ceil(share)
