"""Run folders with made-up artifacts, written through the project's own storage: a healthy run, and how to bend it."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from flows.config import to_yaml
from storage import Ragged, RunWriter, build_table, open_run
from tasks.config import RunConfig

GROUPS, N = 8, 4


@dataclass
class Shape:
    """One made-up step; a test's bend changes what it wants to plant.

    Attributes:
        step: its number, from 1.
        scores, lengths: of each sample, group by group.
        and so on: the columns' values, as one number for all tokens or samples.
    """

    step: int
    prompts: list
    scores: list
    lengths: list
    truncated: set = field(default_factory=set)
    texts: dict = field(default_factory=dict)
    entropy: float = 0.5
    kl: float = 0.01
    gap: float = 0.0
    parts: list | None = None
    status: list | None = None
    message: list | None = None
    lr: float = 1e-5
    grad_norm: tuple = (0.4, 0.5)
    ratio_max: float = 1.2
    first_log_ratio: float = 1e-6
    clipfrac: float = 0.01
    skipped: str | None = None


def healthy(step):
    """Scores rise a little, groups are mixed, nothing else moves."""
    draw = np.random.default_rng(step)
    right = min(0.3 + 0.03 * step, 0.6)
    scores = (draw.random(GROUPS * N) < right).astype(float)
    scores[::N], scores[1::N] = 1.0, 0.0  # every group is mixed
    lengths = draw.integers(8, 12, GROUPS * N).tolist()
    return Shape(step, [(step * GROUPS + i) % 64 for i in range(GROUPS)], scores.tolist(), lengths)


def made_up_run(folder, steps, bend=lambda shape: None, **config):
    """Write a run of so many steps, each bent by a function, and open it."""
    cfg = RunConfig.model_validate(config)
    with RunWriter.create(folder / "run", "made-up", {"config.yaml": to_yaml(cfg)}) as writer:
        for step in range(1, steps + 1):
            shape = healthy(step)
            bend(shape)
            _write(writer, shape)
    return open_run(folder / "run")


def _write(writer, shape):
    groups = [f"{shape.step:06d}-{i:04d}" for i in range(GROUPS)]
    group_id = [name for name in groups for _ in range(N)]
    keys = {"sample_id": [f"{name}-{i % N:03d}" for i, name in enumerate(group_id)], "group_id": group_id}
    count = len(group_id)
    draw = np.random.default_rng(shape.step)
    ids = [draw.integers(0, 1000, length) for length in shape.lengths]
    for row, other in shape.texts.items():
        ids[row] = ids[other]
    lengths = np.asarray([len(row) for row in ids])
    total = int(lengths.sum())

    def tokens(value):
        return Ragged.from_lengths(np.full(total, value, dtype=np.float32), lengths)

    silent = [len({shape.scores[i] for i in range(g * N, g * N + N)}) == 1 for g in range(GROUPS)]
    parts = shape.parts or [{"score": score} for score in shape.scores]
    tables = {
        "prompts": {
            "group_id": groups,
            "prompt_index": np.asarray(shape.prompts),
            "data_source": ["toy"] * GROUPS,
            "prompt": ['"1 + 1"'] * GROUPS,
            "prompt_text": ["1 + 1"] * GROUPS,
            "prompt_ids": Ragged.from_rows([[1, 2]] * GROUPS, np.int32),
            "ground_truth": ['"2"'] * GROUPS,
            "extra_info": ["{}"] * GROUPS,
        },
        "rollouts": {
            **keys,
            "sample_index": np.tile(np.arange(N, dtype=np.int32), GROUPS),
            "response_ids": Ragged.from_rows(ids, np.int32),
            "response_text": [" ".join(map(str, row)) for row in ids],
            "rollout_log_probs": tokens(-0.5 + shape.gap),
            "finish_reason": ["length" if i in shape.truncated else "stop" for i in range(count)],
            "seed": np.arange(count),
            "policy_version": np.full(count, shape.step - 1),
        },
        "old_log_probs": {
            **keys,
            "old_log_probs": tokens(-0.5),
            "entropy": tokens(shape.entropy),
            "sum_pi_squared": [None] * count,
        },
        # k3 is about half the square of the gap.
        "ref_log_probs": {**keys, "ref_log_probs": tokens(-0.5 - np.sqrt(2 * shape.kl))},
        "rewards": {
            **keys,
            "score": shape.scores,
            "status": shape.status or ["ok"] * count,
            "parts": [list(row.items()) for row in parts],
            "extracted": [None] * count,
            "extra": ["{}"] * count,
            "message": shape.message or [None] * count,
            "seconds": np.zeros(count, dtype=np.float32),
        },
        "advantages": {
            **keys,
            **{name: tokens(0.0) for name in ("token_rewards", "advantages", "returns")},
            "loss_mask": Ragged.from_lengths(np.ones(total, dtype=bool), lengths),
            "group_mean": [None] * count,
            "group_std": [None] * count,
            "rollout_is_weights": [None] * count,
            "no_signal": ["all scores are equal" if silent[i // N] else None for i in range(count)],
        },
        "updates": _updates(shape),
    }
    for stage, columns in tables.items():
        writer.commit(
            shape.step,
            stage,
            build_table(stage, columns),
            key="",
            policy_version=shape.step - 1,
            started_at=datetime.now(UTC),
            shapes={"tokens": total},
        )
    gap = abs(float(np.exp(-0.5 + shape.gap) - np.exp(-0.5)))
    known = [score for score in shape.scores if score is not None]
    metrics = {
        "critic/score/mean": float(np.mean(known)) if known else None,
        "response_length/mean": float(lengths.mean()),
        "actor/entropy": shape.entropy,
        "training/rollout_probs_diff_mean": gap,
        "actor/lr": shape.lr,
        "actor/grad_norm": float(np.mean(shape.grad_norm)),
        **{f"reward/{name}/mean": float(np.mean([row[name] or 0.0 for row in parts])) for name in parts[-1]},
    }
    writer.finish_step(shape.step, {"metrics": metrics, "artifacts": {}})


def _updates(shape):
    rows, made = len(shape.grad_norm), shape.skipped is None
    number = [0.1 if made else None] * rows
    log_ratios = [shape.first_log_ratio, *[float(np.log(shape.ratio_max))] * (rows - 1)]
    return {
        "update_index": np.arange(rows, dtype=np.int32),
        "epoch": np.zeros(rows, dtype=np.int32),
        "sequences": np.full(rows, GROUPS * N // rows),
        "tokens": np.full(rows, 100),
        "micro_batches": np.ones(rows, dtype=np.int32),
        **dict.fromkeys(("loss", "pg_loss", "kl_loss"), number),
        "pg_clipfrac": [shape.clipfrac if made else None] * rows,
        "pg_clipfrac_lower": [0.0 if made else None] * rows,
        "ppo_kl": number,
        "ratio_max": [shape.ratio_max if made else None] * rows,
        "log_ratio_max": log_ratios if made else [None] * rows,
        "kl_clamped": [0] * rows,
        "entropy": [None] * rows,
        "grad_norm": list(shape.grad_norm) if made else [None] * rows,
        "lr": [shape.lr] * rows,
        "skipped": [shape.skipped] * rows,
        "seconds": np.zeros(rows, dtype=np.float32),
        "policy_version_in": np.full(rows, shape.step - 1),
        "policy_version_out": np.full(rows, shape.step),
        "weights_digest": [None] * (rows - 1) + ["0" * 64],
    }
