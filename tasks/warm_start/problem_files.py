"""Files of prompts with verl's columns, written with fixed types so that the same problems give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """A question about two whole numbers and its answer.

    Attributes:
        prompt: text that is used as it is, or chat messages.
        a: first operand.
        b: second operand.
    """

    prompt: str | list[Message]
    a: int
    b: int

    @property
    def answer(self) -> str:
        """The reference answer: the sum's digits."""
        return str(self.a + self.b)


_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_REWARD_MODEL = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
_EXTRA_INFO = pa.struct([("split", pa.string()), ("index", pa.int64()), ("a", pa.int64()), ("b", pa.int64())])


def write_problems(path: Path, problems: Sequence[Problem], data_source: str, split: str) -> None:
    """Write problems as parquet: data_source, prompt, ability, reward_model, extra_info."""
    kind = pa.string() if isinstance(problems[0].prompt, str) else _MESSAGES
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", kind),
            ("ability", pa.string()),
            ("reward_model", _REWARD_MODEL),
            ("extra_info", _EXTRA_INFO),
        ]
    )
    rows = [_row(i, problem, data_source, split) for i, problem in enumerate(problems)]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _row(index: int, problem: Problem, data_source: str, split: str) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": problem.prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "a": problem.a, "b": problem.b},
    }
