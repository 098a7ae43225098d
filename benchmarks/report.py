"""How long a report takes and how large it is, for one step of 512 samples x 1,000 tokens and a vocabulary of 32,000.

    python -m benchmarks.report [SAMPLES [TOKENS]]

The run is made without a model: every stage's table is drawn at random, in the shapes and with the spread of a real
one, and committed as a stage would. Ids follow Zipf's law, as words do, so that they deflate about as text does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from storage import Artifact, Ragged, Run, RunWriter, build_table

SAMPLES, TOKENS, PER_GROUP, WORDS = 512, 1000, 8, 32_000


def words_of(count: int) -> list[str]:
    """Made-up words, frequent ones short; the first ones are white space, an end token and what could break a page."""
    hard = ["<end>", "\n", " ", "</script>", "<b>", "שלום", "🙂", "\u202e", "\0", "&amp;"]
    syllables = ["ka", "lo", "mi", "ne", "ru", "sa", "ti", "vo", "we", "xa"]
    made = [" " + "".join(syllables[int(digit)] for digit in str(number)) for number in range(count - len(hard))]
    return hard + made


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """A tokenizer.json in which id i stands for word i."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([words[0]])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def synthetic_run(
    root: Path, *, samples: int = SAMPLES, tokens: int = TOKENS, words: int = WORDS, steps: int = 1
) -> Run:
    """A run whose steps hold random batches.

    Args:
        root: the run's folder; its tokenizer is written beside it.
        samples: of a step.
        tokens: of the longest response; most are as long.
        words: size of the vocabulary.
        steps: how many; all hold a batch.
    """
    from flows.config import load_config, to_yaml

    texts = words_of(words)
    model = root.parent / "model"
    write_tokenizer(model, texts)
    cfg = load_config([], [f"actor_rollout_ref.model.path={model}", "data.train_files=train.parquet"])
    run = RunWriter.create(root, root.name, {"config.yaml": to_yaml(cfg)})
    with run:
        for step in range(1, steps + 1):
            _write_step(run, step, samples, tokens, texts)
    return Run(root)


def _write_step(run: RunWriter, step: int, samples: int, tokens: int, texts: list[str]) -> None:
    generator = np.random.default_rng(step)
    lengths = np.where(generator.random(samples) < 0.9, tokens, generator.integers(1, tokens + 1, samples))
    total = int(lengths.sum())
    ids = np.minimum(generator.zipf(1.3, total) + 1, len(texts) - 1).astype(np.int32)
    keys = {
        "sample_id": [f"{step:06d}-{row // PER_GROUP:04d}-{row % PER_GROUP:03d}" for row in range(samples)],
        "group_id": [f"{step:06d}-{row // PER_GROUP:04d}" for row in range(samples)],
    }
    made: dict[str, Artifact] = {}
    for stage, columns in _tables(generator, step, ids, lengths, texts).items():
        own = {} if stage == "prompts" else keys
        made[stage] = run.commit(
            step,
            stage,
            build_table(stage, {**own, **columns}),
            key=f"{stage}-{step}",
            policy_version=step - 1,
            started_at=datetime.now(UTC),
            parents=[*made.values()][-1:],
            shapes={"rows": len(next(iter(columns.values()))), "tokens": total, "longest": int(lengths.max())},
            notes={"temperature": 1.0},
        )
    metrics = {"training/global_step": float(step), "critic/score/mean": 0.5, "response_length/mean": lengths.mean()}
    digests = {stage: artifact.digest for stage, artifact in made.items()}
    run.finish_step(step, {"metrics": metrics, "artifacts": digests})


def _tables(
    generator: np.random.Generator, step: int, ids: np.ndarray, lengths: np.ndarray, texts: list[str]
) -> Mapping[str, Mapping[str, Any]]:
    """Columns of each stage beside the ids of samples and groups."""
    samples, groups = len(lengths), len(lengths) // PER_GROUP
    log_probs = -generator.exponential(0.6, len(ids))
    scores = generator.integers(0, 11, samples) / 10

    def rows(values: np.ndarray) -> Ragged:
        return Ragged.from_lengths(np.ascontiguousarray(values), lengths)

    def floats(values: np.ndarray) -> Ragged:
        return rows(values.astype(np.float32))

    spoken = ["".join(texts[number] for number in row) for row in rows(ids)]
    advantages = np.repeat(scores - 0.5, lengths)
    return {
        "prompts": {
            "group_id": [f"{step:06d}-{group:04d}" for group in range(groups)],
            "prompt_index": np.arange(groups),
            "data_source": ["synthetic"] * groups,
            "prompt": [json.dumps(f"question {group}") for group in range(groups)],
            "prompt_text": [f"<user> question {group}: how many?\n" for group in range(groups)],
            "prompt_ids": [[1, 2, 3]] * groups,
            "ground_truth": [json.dumps(str(group)) for group in range(groups)],
            "extra_info": ["{}"] * groups,
        },
        "rollouts": {
            "sample_index": np.arange(samples, dtype=np.int32) % PER_GROUP,
            "response_ids": rows(ids),
            "response_text": spoken,
            "rollout_log_probs": floats(np.minimum(log_probs + generator.normal(0, 0.003, len(ids)), 0)),
            "finish_reason": ["length" if length == lengths.max() else "stop" for length in lengths],
            "seed": generator.integers(0, 2**62, samples),
            "policy_version": np.full(samples, step - 1),
        },
        "old_log_probs": {
            "old_log_probs": floats(log_probs),
            "entropy": floats(generator.exponential(0.4, len(ids))),
            "sum_pi_squared": [None] * samples,
        },
        "ref_log_probs": {"ref_log_probs": floats(np.minimum(log_probs + generator.normal(0, 0.1, len(ids)), 0))},
        "rewards": {
            "score": scores,
            "status": ["ok"] * samples,
            "parts": [[("correct", score), ("format", 1.0)] for score in scores],
            "extracted": [str(row) for row in range(samples)],
            "extra": ["{}"] * samples,
            "message": [None] * samples,
            "seconds": generator.random(samples).astype(np.float32),
        },
        "advantages": {
            "token_rewards": floats(np.zeros(len(ids))),
            "advantages": floats(advantages),
            "returns": floats(advantages),
            "loss_mask": rows(generator.random(len(ids)) < 0.99),
            "group_mean": np.repeat(scores.reshape(-1, PER_GROUP).mean(1), PER_GROUP),
            "group_std": np.repeat(scores.reshape(-1, PER_GROUP).std(1, ddof=1), PER_GROUP),
            "rollout_is_weights": [None] * samples,
            "no_signal": [None] * samples,
        },
    }


def main() -> None:
    """Make the run, then its report three times, each in a new process as a user does."""
    import subprocess

    samples, tokens = (int(word) for word in (*sys.argv[1:3], *(str(SAMPLES), str(TOKENS))[len(sys.argv[1:3]) :]))
    with tempfile.TemporaryDirectory() as folder:
        run = synthetic_run(Path(folder) / "synthetic", samples=samples, tokens=tokens)
        stored = sum(path.stat().st_size for path in run.root.glob("steps/**/*.arrow"))
        file = Path(folder) / "report.html"
        print(f"{samples} samples x {tokens} tokens, {stored / 1e6:.1f} MB of artifacts")
        for _ in range(3):
            started = time.perf_counter()
            command = "import sys; from flows.cli import main; main()"
            words = [sys.executable, "-c", command, "report", str(run.root), "-o", str(file)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            print(f"{time.perf_counter() - started:.1f} s, {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
