"""Write and read rates of the worked example's batch, 720 sequences of 8192 + 1024 tokens, against raw file I/O."""

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from storage import Artifact, Ragged, RunWriter, artifacts, build_table, read_table

SEQUENCES, PROMPT, RESPONSE, ROUNDS = 720, 8192, 1024, 7


def rollouts() -> object:
    """A `rollouts` table at full length; the response column carries prompt and response, 9,216 tokens a row."""
    generator = np.random.default_rng(0)
    lengths = np.full(SEQUENCES, PROMPT + RESPONSE)
    tokens = int(lengths.sum())
    ids = Ragged.from_lengths(generator.integers(0, 150_000, tokens, dtype=np.int32), lengths)
    log_probs = Ragged.from_lengths(-generator.random(tokens, dtype=np.float32), lengths)
    return build_table(
        "rollouts",
        {
            "sample_id": [f"s{i}" for i in range(SEQUENCES)],
            "group_id": [f"g{i // 12}" for i in range(SEQUENCES)],
            "sample_index": np.arange(SEQUENCES, dtype=np.int32) % 12,
            "response_ids": ids,
            "response_text": ["x" * 4 * RESPONSE] * SEQUENCES,
            "rollout_log_probs": log_probs,
            "finish_reason": ["length"] * SEQUENCES,
            "seed": np.arange(SEQUENCES),
            "policy_version": np.zeros(SEQUENCES, dtype=np.int64),
        },
    )


def seconds(call: Callable[[], object]) -> float:
    """Duration of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_raw(path: Path, data: bytes) -> None:
    """The same bytes into a plain file, synced."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_all(artifact: Artifact, trusted: bool) -> None:
    """Read an artifact and touch every token; `trusted`: this process wrote or checked it before."""
    if not trusted:
        artifacts._trusted.clear()
    table = read_table(artifact)
    for column in ("response_ids", "rollout_log_probs"):
        Ragged.from_arrow(table[column]).values.sum()


def main() -> None:
    """Interleave the four things and print medians and ratios."""
    table = rollouts()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, RunWriter.create(Path(folder) / "run", "run") as run:
        size = 0
        for index in range(ROUNDS):
            made: list[Artifact] = []

            def commit(index: int = index, made: list[Artifact] = made) -> None:
                started = datetime.now(UTC)
                made.append(run.commit(index, "rollouts", table, key="", policy_version=0, started_at=started))

            times.setdefault("commit (write, fsync, SHA-256, manifest)", []).append(seconds(commit))
            path = made[0].folder / "part-00000.arrow"
            data, size = path.read_bytes(), made[0].bytes
            raw = Path(folder) / "raw"
            times.setdefault("raw write, fsync", []).append(seconds(lambda: write_raw(raw, data)))  # noqa: B023
            times.setdefault("read, checked before", []).append(seconds(lambda: read_all(made[0], True)))  # noqa: B023
            times.setdefault("read, checking SHA-256", []).append(seconds(lambda: read_all(made[0], False)))  # noqa: B023
            times.setdefault("raw read", []).append(seconds(raw.read_bytes))
    print(f"batch of {SEQUENCES} x ({PROMPT} + {RESPONSE}) tokens: {size / 1e6:.1f} MB, median of {ROUNDS}")
    medians = {name: median(values) for name, values in times.items()}
    for name, value in medians.items():
        base = medians["raw write, fsync" if "rite" in name else "raw read"]
        print(f"{name:<42} {value * 1000:8.1f} ms {size / value / 1e6:9.0f} MB/s   {value / base:5.2f} x raw")


if __name__ == "__main__":
    main()
