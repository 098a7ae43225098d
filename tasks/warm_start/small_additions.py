"""Additions of small numbers as chat messages: what a small pretrained model nearly knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.seeds import hashed
from tasks.warm_start.problem_files import Problem, write_problems

DATA_SOURCE = "grpoflow/small_additions"
OPERANDS = range(2, 20)
TRAIN_FILE = "train.parquet"
VAL_FILE = "val.parquet"


def write_small_additions(folder: Path, seed: int, held_out: int) -> None:
    """Write every pair of operands once, `held_out` of them as validation; a pair and its mirror image stay together.

    Args:
        folder: gets the two files.
        seed: chooses the held-out pairs and the order.
        held_out: how many, an even number.
    """
    random = np.random.default_rng(hashed("small_additions", seed))
    below = random.permutation([(a, b) for a in OPERANDS for b in OPERANDS if a < b])
    same = np.array([(a, a) for a in OPERANDS])
    out, left = below[: held_out // 2], below[held_out // 2 :]
    val = _questions(random, np.concatenate([out, out[:, ::-1]]))
    train = _questions(random, np.concatenate([left, left[:, ::-1], same]))
    write_problems(folder / VAL_FILE, val, DATA_SOURCE, "val")
    write_problems(folder / TRAIN_FILE, train, DATA_SOURCE, "train")


def _questions(random: np.random.Generator, pairs: np.ndarray) -> list[Problem]:
    return [
        Problem([{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}], a, b)
        for a, b in random.permutation(pairs).tolist()
    ]
