"""SQL and diff over runs of 10 and of 100 steps: time to the first row, time of a diff, and peak memory."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import yaml

from storage import Ragged, RunWriter, artifacts, build_table, open_run
from tasks.config import RunConfig

STEPS, FEW = 100, 10
GROUPS, N, PROMPT, RESPONSE = 32, 8, 64, 384
METRICS = 90

QUERIES = {
    "first row of samples": "select * from samples limit 1",
    "one score of step 7": "select score from samples where step = 7 limit 1",
    "mean score by step": "select step, avg(score) from rewards group by step order by step",
    "no-signal share by step": "select step, count(no_signal) / count(*) from samples group by 1 order by 1",
    "worst token by sampler gap": "select step, sample_id, position, sampler_gap from tokens "
    "order by abs(sampler_gap) desc limit 1",
}


def make_run(root: Path, seed: int) -> None:
    """A run of `STEPS` steps with all stages, whose numbers are random."""
    config = yaml.safe_dump(RunConfig().model_dump(mode="json"))
    with RunWriter.create(root, root.name, {"config.yaml": config}) as run:
        for step in range(1, STEPS + 1):
            _make_step(run, step, np.random.default_rng([seed, step]))


def _make_step(run: RunWriter, step: int, random: np.random.Generator) -> None:
    count = GROUPS * N
    group = [f"{step:06d}-{i:04d}" for i in range(GROUPS)]
    keys = {
        "sample_id": [f"{group[i // N]}-{i % N:03d}" for i in range(count)],
        "group_id": [group[i // N] for i in range(count)],
    }
    lengths = random.integers(RESPONSE // 2, RESPONSE + 1, count)
    floats = lambda: Ragged.from_lengths(-random.random(int(lengths.sum()), dtype=np.float32), lengths)  # noqa: E731
    ids = Ragged.from_lengths(random.integers(0, 49_000, int(lengths.sum()), dtype=np.int32), lengths)
    tables = {
        "prompts": {
            "group_id": group,
            "prompt_index": np.arange(GROUPS) + step * GROUPS,
            "data_source": ["synthetic"] * GROUPS,
            "prompt": [f'"question {step * GROUPS + i}"' for i in range(GROUPS)],
            "prompt_text": [f"question {step * GROUPS + i}" for i in range(GROUPS)],
            "prompt_ids": Ragged.from_rows([np.arange(PROMPT)] * GROUPS, np.int32),
            "ground_truth": ['"1"'] * GROUPS,
            "extra_info": ["{}"] * GROUPS,
        },
        "rollouts": {
            **keys,
            "sample_index": np.arange(count, dtype=np.int32) % N,
            "response_ids": ids,
            "response_text": ["x" * 4 * int(length) for length in lengths],
            "rollout_log_probs": floats(),
            "finish_reason": ["stop"] * count,
            "seed": np.arange(count),
            "policy_version": np.full(count, step - 1),
        },
        "old_log_probs": {**keys, "old_log_probs": floats(), "entropy": floats(), "sum_pi_squared": [None] * count},
        "ref_log_probs": {**keys, "ref_log_probs": floats()},
        "rewards": {
            **keys,
            "score": random.integers(0, 2, count).astype(float),
            "status": ["ok"] * count,
            "parts": [[("exact", 1.0)]] * count,
            "extracted": ["1"] * count,
            "extra": ["{}"] * count,
            "message": [None] * count,
            "seconds": random.random(count, dtype=np.float32),
        },
        "advantages": {
            **keys,
            "token_rewards": floats(),
            "advantages": floats(),
            "returns": floats(),
            "loss_mask": Ragged.from_lengths(np.ones(int(lengths.sum()), dtype=bool), lengths),
            "group_mean": random.random(count),
            "group_std": random.random(count),
            "rollout_is_weights": [None] * count,
            "no_signal": [None] * count,
        },
        "updates": _updates(step, random),
    }
    made = {}
    for stage, columns in tables.items():
        about = {"key": stage, "policy_version": step - 1, "started_at": datetime.now(UTC)}
        about["made_from"] = {"config": {}, "also": {}, "modules": {}}
        made[stage] = run.commit(step, stage, build_table(stage, columns), **about).digest
    metrics = {f"synthetic/{i}": float(random.random()) for i in range(METRICS)}
    run.finish_step(step, {"metrics": metrics, "artifacts": made})


def _updates(step: int, random: np.random.Generator) -> dict[str, object]:
    names = "loss pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl ratio_max log_ratio_max kl_loss entropy grad_norm lr"
    return {
        "update_index": [0],
        "epoch": [0],
        "sequences": [GROUPS * N],
        "tokens": [1],
        "micro_batches": [1],
        **{name: [float(random.random())] for name in names.split()},
        "kl_clamped": [0],
        "skipped": [None],
        "seconds": [1.0],
        "policy_version_in": [step - 1],
        "policy_version_out": [step],
        "weights_digest": [f"{random.integers(1 << 60):064x}"],
    }


def measure(what: str, steps: int, roots: list[str]) -> None:
    """One query or diff in this process; prints seconds to the first row and in all, its CPU's, and peak memory, MB."""
    import duckdb  # noqa: F401  # its import is no part of a query

    from flows.audit.diff import compare
    from flows.audit.query import ask, opened
    from flows.audit.sources import open_source

    started, busy = time.perf_counter(), time.process_time()
    sources = [open_source(root) for root in roots]
    if what == "diff":
        compare(sources[0], sources[1], steps=f"1..{steps}")
        first = time.perf_counter() - started
    else:
        with opened(sources[:1], f"1..{steps}") as (connection, seen):
            reader = ask(connection, seen, QUERIES[what])
            reader.read_next_batch()
            first = time.perf_counter() - started
            for _ in reader:
                pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([first, time.perf_counter() - started, time.process_time() - busy, peak]))


def check_cost(root: str) -> tuple[float, float, float]:
    """Seconds to open token artifacts of all steps, checking their SHA-256 and not again; and their bytes."""
    run = open_run(root)
    times, size = [], 0
    for _ in range(2):
        started = time.perf_counter()
        for step in run.steps():
            for stage in ("rollouts", "old_log_probs", "advantages"):
                artifact = run.step(step).artifact(stage)
                artifacts.read_table(artifact)
                size += artifact.bytes
        times.append(time.perf_counter() - started)
    return times[0], times[1], size / 2


def main() -> None:
    """Make two runs, and measure each thing in a process of its own."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        roots = [str(Path(folder) / name) for name in ("a", "b")]
        for seed, root in enumerate(roots):
            make_run(Path(root), seed)
        size = sum(path.stat().st_size for path in Path(roots[0]).rglob("*.arrow"))
        shape = f"{GROUPS} x {N} samples of {RESPONSE // 2} to {RESPONSE} tokens"
        print(f"runs of {STEPS} steps, {shape}: {size / 1e6:.0f} MB each")
        print(
            f"{'':<28} {'steps':>5} {'first row, s':>13} {'all, s':>8} {'CPU, s':>7} {'peak memory, MB':>16}",
            flush=True,
        )
        for what in (*QUERIES, "diff", "diff with itself"):
            for steps in (FEW, STEPS):
                pair = [roots[0], roots[0]] if what == "diff with itself" else roots
                command = [sys.executable, "-m", "benchmarks.audit_queries", what.split(" with")[0], str(steps), *pair]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                first, whole, busy, peak = json.loads(told)
                print(f"{what:<28} {steps:>5} {first:>13.2f} {whole:>8.2f} {busy:>7.2f} {peak:>16.0f}", flush=True)
        checked, again, read = check_cost(roots[0])
        told = f"{checked:.2f} s with SHA-256 ({read / checked / 1e6:.0f} MB/s), again {again:.2f} s"
        print(f"opening {read / 1e6:.0f} MB of artifacts: {told}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    else:
        main()
