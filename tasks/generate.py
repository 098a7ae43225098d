"""Stage `generate`: n responses to every prompt, sampled by the rollout engine from a named policy version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from storage.schema import round_of
from tasks.algorithms.sample_metrics import length_metrics
from tasks.config import RunConfig
from tasks.seeds import sample_seed
from tasks.stage import Stage, StageError, Step

if TYPE_CHECKING:
    from tasks.engines.protocol import Responses, RolloutEngine, Sampling


class Tokenizer(Protocol):
    """What this stage needs of a tokenizer."""

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Texts of rows of token ids."""


_ROLLOUT = ("name", "n", "do_sample", "temperature", "top_p", "top_k", "stop", "ignore_eos", "calculate_log_probs")
_LIMITS = ("response_length", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
READS = (
    *(f"actor_rollout_ref.rollout.{name}" for name in (*_ROLLOUT, *_LIMITS)),
    "actor_rollout_ref.model",
    "data.max_response_length",
    "trainer.seed",
)
VALIDATION_READS = (*READS, "actor_rollout_ref.rollout.val_kwargs")
CODE = ("tasks.generate", "tasks.seeds", "tasks.engines")


def generate(
    step: Step, prompts: Artifact, engine: RolloutEngine, tokenizer: Tokenizer, number: int | None = None
) -> Artifact:
    """Commit `rollouts`: `rollout.n` responses to each prompt.

    Args:
        step: the step.
        prompts: its prompts, or those of one generate call.
        engine: holds the policy before the step.
        tokenizer: for the responses' text.
        number: of the generate call, from 1, where a step makes several: commits `rollouts-01` and so on.

    Raises:
        StageError: the engine holds another policy than this step samples from, or every group holds n equal responses.
    """
    name = "rollouts" if number is None else round_of("rollouts", number)
    stage = step.open(name, reads=READS, code=CODE, parents=[prompts])
    if done := stage.committed():
        return done
    rollout = step.cfg.actor_rollout_ref.rollout
    columns, responses = _sample(step, prompts, engine, training_sampling(step.cfg), rollout.n, stage.policy_version)
    columns["response_text"] = _decode(tokenizer, responses.response_ids)
    prompt_lengths = Ragged.from_arrow(read_table(prompts, ["prompt_ids"])["prompt_ids"]).lengths
    metrics = response_metrics(responses.response_ids, responses.finish_reason, prompt_lengths, step.cfg)
    if metrics.get("rollout/duplicate_share") == 1.0 and rollout.do_sample and rollout.temperature > 0:
        raise StageError(
            f"step {step.index}: all {rollout.n} responses of every group are the same although "
            f"actor_rollout_ref.rollout.temperature is {rollout.temperature}. A step on them teaches nothing. The "
            "policy has collapsed, or the engine ignores its seeds: look at `grpoflow show`, start again from an "
            "earlier checkpoint, or raise the temperature."
        )
    return _commit(stage, columns, responses, engine, metrics)


def generate_greedy(step: Step, prompts: Artifact, engine: RolloutEngine, tokenizer: Tokenizer) -> Artifact:
    """Commit `greedy_rollouts`: the greedy response to each prompt, whose score is remax's baseline."""
    stage = step.open("greedy_rollouts", reads=READS, code=CODE, parents=[prompts])
    if done := stage.committed():
        return done
    sampling = replace(training_sampling(step.cfg), greedy=True, log_probs=False)
    columns, responses = _sample(step, prompts, engine, sampling, 1, stage.policy_version)
    columns["sample_id"] = [f"{name}-greedy" for name in read_table(prompts, ["group_id"])["group_id"].to_pylist()]
    columns["response_text"] = _decode(tokenizer, responses.response_ids)
    return _commit(stage, columns, responses, engine)


def generate_validation(step: Step, prompts: Artifact, engine: RolloutEngine, tokenizer: Tokenizer) -> Artifact:
    """Commit `val_rollouts`: `val_kwargs.n` responses to each validation prompt, by the policy after this step."""
    # A step that is made again may come to other weights under the same version.
    also = {"policy": engine.policy_digest}
    stage = step.open(
        "val_rollouts", reads=VALIDATION_READS, code=CODE, parents=[prompts], policy_version=step.index, also=also
    )
    if done := stage.committed():
        return done
    n = step.cfg.actor_rollout_ref.rollout.val_kwargs.n
    columns, responses = _sample(step, prompts, engine, validation_sampling(step.cfg), n, stage.policy_version)
    columns["response_text"] = _decode(tokenizer, responses.response_ids)
    return _commit(stage, columns, responses, engine)


def training_sampling(cfg: RunConfig) -> Sampling:
    """How training responses are sampled."""
    from tasks.engines.protocol import Sampling

    rollout = cfg.actor_rollout_ref.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=not rollout.do_sample or rollout.temperature == 0,
        max_tokens=cfg.response_length,
        max_model_len=rollout.max_model_len,
        stop=rollout.stop,
        ignore_eos=rollout.ignore_eos,
        log_probs=rollout.calculate_log_probs,
    )


def validation_sampling(cfg: RunConfig) -> Sampling:
    """How validation responses are sampled: `val_kwargs` over the training settings."""
    wanted = cfg.actor_rollout_ref.rollout.val_kwargs
    return replace(
        training_sampling(cfg),
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        greedy=not wanted.do_sample or wanted.temperature == 0,
        log_probs=False,
    )


def _sample(
    step: Step, prompts: Artifact, engine: RolloutEngine, sampling: Sampling, n: int, version: int
) -> tuple[dict[str, object], Responses]:
    if engine.policy_version != version:
        held = engine.policy_version
        raise StageError(f"step {step.index} samples from policy {version} but the engine holds {held}")
    table = read_table(prompts, ["group_id", "prompt_index", "prompt_ids"])
    group = np.repeat(np.arange(table.num_rows), n)
    sample = np.tile(np.arange(n), table.num_rows)
    index = table["prompt_index"].to_numpy()
    slot = [int(name.rsplit("-", 1)[1]) for name in table["group_id"].to_pylist()]
    seeds = [
        sample_seed(step.cfg.trainer.seed, step.index, int(index[g]), slot[g], int(i))
        for g, i in zip(group, sample, strict=True)
    ]
    responses = engine.generate(
        Ragged.from_arrow(table["prompt_ids"]), group, np.asarray(seeds, dtype=np.int64), sampling
    )
    group_ids = table["group_id"].take(pa.array(group))
    columns: dict[str, object] = {
        "sample_id": [f"{name}-{i:03d}" for name, i in zip(group_ids.to_pylist(), sample, strict=True)],
        "group_id": group_ids,
        "sample_index": sample.astype(np.int32),
        "response_ids": responses.response_ids,
        "rollout_log_probs": responses.log_probs if responses.log_probs is not None else [None] * len(group),
        "finish_reason": responses.finish_reason,
        "seed": np.asarray(seeds, dtype=np.int64),
        "policy_version": np.full(len(group), version, dtype=np.int64),
    }
    return columns, responses


def _decode(tokenizer: Tokenizer, response_ids: Ragged) -> list[str]:
    return tokenizer.batch_decode([row.tolist() for row in response_ids], skip_special_tokens=True)


def _commit(
    stage: Stage,
    columns: dict[str, object],
    responses: Responses,
    engine: RolloutEngine,
    metrics: dict[str, float] | None = None,
) -> Artifact:
    notes = {**responses.notes, "policy_digest": engine.policy_digest}
    return stage.commit(columns, metrics=metrics, shapes=token_shapes(responses.response_ids), notes=notes)


def response_metrics(
    response_ids: Ragged, finish_reason: Sequence[str], prompt_lengths: np.ndarray, cfg: RunConfig
) -> dict[str, float]:
    """Lengths under verl's names, the share of responses cut by length or empty, and duplicates within groups.

    Args:
        response_ids: N rows; the `rollout.n` responses of a group are neighbours.
        finish_reason: [N].
        prompt_lengths: [G] tokens of the prompts they answer.
        cfg: the run's configuration.
    """
    cut = np.asarray([reason == "length" for reason in finish_reason], dtype=bool)
    return {
        **length_metrics(response_ids.lengths, cut, prompt_lengths, cfg.prompt_length),
        "rollout/duplicate_share": _duplicate_share(response_ids, cfg.actor_rollout_ref.rollout.n),
    }


def _duplicate_share(response_ids: Ragged, n: int) -> float:
    """Share of responses beyond the first that repeat an earlier one of their group; 0 for groups of one."""
    if n == 1 or not len(response_ids):
        return 0.0
    rows = [row.tobytes() for row in response_ids]
    distinct = sum(len(set(rows[start : start + n])) for start in range(0, len(rows), n))
    groups = len(rows) // n
    return (len(rows) - distinct) / (len(rows) - groups)


def token_shapes(rows: Ragged) -> dict[str, int]:
    """Tokens of all rows, and of the longest."""
    return {"tokens": int(rows.lengths.sum()), "longest": int(rows.lengths.max(initial=0))}
