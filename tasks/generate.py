"""Stage `generate`: n responses to every prompt, sampled by the rollout engine from a named policy version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from storage.artifacts import Part
from storage.schema import round_of
from tasks.algorithms.sample_metrics import length_metrics
from tasks.config import RunConfig
from tasks.seeds import sample_seed
from tasks.stage import PartFolder, Stage, StageError, Step
from tasks.workers.rank import Rank, share_of

if TYPE_CHECKING:
    from tasks.engines.protocol import Sampling
    from tasks.workers.group import WorkerGroup


class Tokenizer(Protocol):
    """What this stage needs of a tokenizer."""

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Texts of rows of token ids."""


_ENGINE = ("name", "stop", "ignore_eos", "response_length", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
_SAMPLING = ("n", "do_sample", "temperature", "top_p", "top_k", "calculate_log_probs")
_OF_ALL = (
    *(f"actor_rollout_ref.rollout.{name}" for name in _ENGINE),
    "actor_rollout_ref.model",
    "data.max_response_length",
    "trainer.seed",
)
READS = (*_OF_ALL, *(f"actor_rollout_ref.rollout.{name}" for name in _SAMPLING))
VALIDATION_READS = (*_OF_ALL, "actor_rollout_ref.rollout.val_kwargs")
CODE = ("tasks.generate", "tasks.seeds", "tasks.engines")


def generate(step: Step, prompts: Artifact, group: WorkerGroup, number: int | None = None) -> Artifact:
    """Commit `rollouts`: `rollout.n` responses to each prompt.

    Args:
        step: the step.
        prompts: its prompts, or those of one generate call.
        group: holds the policy before the step.
        number: of the generate call, from 1, where a step makes several: commits `rollouts-01` and so on.

    Raises:
        StageError: the ranks hold another policy than this step samples from, or every group holds n equal responses.
    """
    name = "rollouts" if number is None else round_of("rollouts", number)
    stage = step.open(name, reads=READS, code=CODE, parents=[prompts], policy_digest=group.weights_digest)
    if done := stage.committed():
        return done
    rollout = step.cfg.actor_rollout_ref.rollout
    request = _request(stage, prompts, training_sampling(step.cfg), rollout.n)
    with _sampled(stage, group, request) as (commit, table, rows):
        prompt_lengths = Ragged.from_arrow(read_table(prompts, ["prompt_ids"])["prompt_ids"]).lengths
        responses = Ragged.from_arrow(table["response_ids"])
        metrics = response_metrics(responses, table["finish_reason"].to_pylist(), prompt_lengths, step.cfg)
        metrics.update(across_ranks(responses, rows))
        if metrics.get("rollout/duplicate_share") == 1.0 and rollout.do_sample and rollout.temperature > 0:
            raise StageError(
                f"step {step.index}: all {rollout.n} responses of every group are the same although "
                f"actor_rollout_ref.rollout.temperature is {rollout.temperature}. A step on them teaches nothing. The "
                "policy has collapsed, or the engine ignores its seeds: look at `grpoflow show`, start again from an "
                "earlier checkpoint, or raise the temperature."
            )
        return commit(metrics)


def generate_greedy(step: Step, prompts: Artifact, group: WorkerGroup) -> Artifact:
    """Commit `greedy_rollouts`: the greedy response to each prompt, whose score is remax's baseline."""
    policy = group.weights_digest
    stage = step.open("greedy_rollouts", reads=READS, code=CODE, parents=[prompts], policy_digest=policy)
    if done := stage.committed():
        return done
    sampling = replace(training_sampling(step.cfg), greedy=True, log_probs=False)
    with _sampled(stage, group, _request(stage, prompts, sampling, 1, baseline=True)) as (commit, *_):
        return commit({})


def generate_validation(step: Step, prompts: Artifact, group: WorkerGroup) -> Artifact:
    """Commit `val_rollouts`: `val_kwargs.n` responses to each validation prompt, by the policy after this step."""
    # A step that is made again may come to other weights under the same version.
    also = {"policy": group.weights_digest()}
    stage = step.open(
        "val_rollouts", reads=VALIDATION_READS, code=CODE, parents=[prompts], policy_version=step.index, also=also
    )
    if done := stage.committed():
        return done
    n = step.cfg.actor_rollout_ref.rollout.val_kwargs.n
    with _sampled(stage, group, _request(stage, prompts, validation_sampling(step.cfg), n)) as (commit, *_):
        return commit({})


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


# ------------------------------------------------------------------------------------------------------- on the ranks


@dataclass(frozen=True)
class Request:
    """What is to be sampled.

    Attributes:
        prompts: G prompts.
        n: responses to each.
        sampling: how.
        step: number of the step, and
        seed: the run's seed: they decide the samples' random streams.
        policy_version: of the policy that is sampled from.
        replica_ranks: ranks of one replica of the rollout engine.
        first_samples: the first rank of a replica hosts its engine and samples for the others.
        baseline: the responses are remax's baselines, and are named so.
    """

    prompts: Artifact
    n: int
    sampling: Sampling
    step: int
    seed: int
    policy_version: int
    replica_ranks: int = 1
    first_samples: bool = False
    baseline: bool = False


@dataclass(frozen=True)
class Sampled:
    """What a rank has sampled.

    Attributes:
        part: rows that it wrote.
        policy_digest: of the weights that they are sampled from.
        notes: how the log-probs were made.
    """

    part: Part
    policy_digest: str
    notes: dict[str, Any]


def sample_responses(rank: Rank, folder: PartFolder, request: Request) -> Sampled | None:
    """Rank task: sample this rank's rows, as its part of the artifact; None: it has no engine, and no rows.

    Raises:
        StageError: the engine holds another policy than is asked for.
    """
    rank.ready_to_sample()
    engine = rank.engine
    if engine is None:
        return None
    if engine.policy_version != request.policy_version:
        raise StageError(
            f"step {request.step} samples from policy {request.policy_version} but the engine holds "
            f"{engine.policy_version}"
        )
    table = read_table(request.prompts, ["group_id", "prompt_index", "prompt_ids"])
    rows = rank_rows(table.num_rows * request.n, rank.number, rank.ranks, request)
    group, sample = rows // request.n, rows % request.n
    seeds = _seeds(table, group, sample, request)
    responses = engine.generate(Ragged.from_arrow(table["prompt_ids"]), group, seeds, request.sampling)
    group_ids = table["group_id"].take(pa.array(group))
    numbers = ["greedy"] * len(rows) if request.baseline else [f"{i:03d}" for i in sample]
    columns = {
        "sample_id": [f"{name}-{i}" for name, i in zip(group_ids.to_pylist(), numbers, strict=True)],
        "group_id": group_ids,
        "sample_index": sample.astype(np.int32),
        "response_ids": responses.response_ids,
        "response_text": _decode(rank.tokenizer, responses.response_ids),
        "rollout_log_probs": [None] * len(rows) if responses.log_probs is None else responses.log_probs,
        "finish_reason": responses.finish_reason,
        "seed": seeds,
        "policy_version": np.full(len(rows), request.policy_version, dtype=np.int64),
    }
    return Sampled(folder.write(rank.number, columns), engine.policy_digest, responses.notes)


def rank_rows(rows: int, number: int, ranks: int, request: Request) -> np.ndarray:
    """Rows that a rank samples: consecutive ones for each replica, and within it for each of its ranks.

    Args:
        rows: of all ranks.
        number: of the rank.
        ranks: how many there are; those of a replica are consecutive.
        request: how large replicas are, and who samples in them.
    """
    replica, place = divmod(number, request.replica_ranks)
    of_replica = share_of(rows, replica, ranks // request.replica_ranks)
    if request.first_samples:
        return of_replica if place == 0 else of_replica[:0]
    return of_replica[share_of(len(of_replica), place, request.replica_ranks)]


def _seeds(prompts: pa.Table, group: np.ndarray, sample: np.ndarray, request: Request) -> np.ndarray:
    """[rows] seed of each response's own random stream."""
    index = prompts["prompt_index"].to_numpy()
    slot = [int(name.rsplit("-", 1)[1]) for name in prompts["group_id"].to_pylist()]
    seeds = [
        sample_seed(request.seed, request.step, int(index[g]), slot[g], int(i))
        for g, i in zip(group, sample, strict=True)
    ]
    return np.asarray(seeds, dtype=np.int64)


def _decode(tokenizer: Tokenizer, response_ids: Ragged) -> list[str]:
    # Tokenizers take a list of no rows for one empty row.
    rows = [row.tolist() for row in response_ids]
    return tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []


def _request(stage: Stage, prompts: Artifact, sampling: Sampling, n: int, *, baseline: bool = False) -> Request:
    cfg = stage.step.cfg
    return Request(
        prompts,
        n,
        sampling,
        step=stage.step.index,
        seed=cfg.trainer.seed,
        policy_version=stage.policy_version,
        replica_ranks=cfg.replica_devices,
        first_samples=cfg.actor_rollout_ref.rollout.name == "vllm",
        baseline=baseline,
    )


@contextmanager
def _sampled(
    stage: Stage, group: WorkerGroup, request: Request
) -> Iterator[tuple[Callable[[dict[str, float]], Artifact], pa.Table, list[int]]]:
    """Let the ranks sample; yield how to commit what they wrote with metrics, its rows, and how many each rank has."""
    with stage.parts() as folder:
        done = [one for one in group.sample(sample_responses, folder, request) if one is not None]
        parts = [one.part for one in done]
        table = stage.read_parts(folder, parts)
        digests = {one.policy_digest for one in done}
        if len(digests) != 1:
            raise StageError(f"step {stage.step.index}: the ranks sample from different weights: {sorted(digests)}")

        def commit(metrics: dict[str, float]) -> Artifact:
            shapes = {
                **token_shapes(Ragged.from_arrow(table["response_ids"])),
                "ranks": group.sampling_ranks,
                "replicas": group.sampling_ranks // request.replica_ranks,
                "rows_per_rank": max(part.rows for part in parts),
            }
            notes = {**done[0].notes, "policy_digest": done[0].policy_digest}
            return stage.commit_parts(folder, parts, metrics=metrics, shapes=shapes, notes=notes)

        yield commit, table, [part.rows for part in parts]


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


def across_ranks(response_ids: Ragged, rows: Sequence[int]) -> dict[str, float]:
    """Share of responses that an earlier rank has given as well, to any prompt; nothing where one rank samples.

    Engines that ignore their seeds repeat each other; short answers coincide by themselves.

    Args:
        response_ids: N rows, rank by rank.
        rows: of each rank that samples.
    """
    if len(rows) < 2 or not len(response_ids):
        return {}
    given, repeated, row = set[bytes](), 0, 0
    for count in rows:
        own = [response_ids[place].tobytes() for place in range(row, row + count)]
        repeated, row = repeated + sum(one in given for one in own), row + count
        given.update(own)
    return {"rollout/duplicate_share_across_ranks": repeated / len(response_ids)}


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
