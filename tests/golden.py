"""The golden vectors in tests/data/golden: numbers that verl, TRL, SkyRL and others gave for the same inputs."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from storage.ragged import Ragged

FOLDER = Path(__file__).parent / "data" / "golden"


def unjson(value):
    if isinstance(value, dict):
        return float(value["$float"]) if set(value) == {"$float"} else {k: unjson(x) for k, x in value.items()}
    return [unjson(x) for x in value] if isinstance(value, list) else value


@cache
def archive(name):
    with np.load(FOLDER / name, allow_pickle=False) as file:
        return dict(file)


def cases(category, keep=lambda case: True):
    found = [case for case in json.loads((FOLDER / f"{category}.json").read_text()) if keep(case)]
    return pytest.mark.parametrize("case", found, ids=[case["name"] for case in found])


def values(case, side):
    return {
        name: unjson(ref["json"]) if "json" in ref else archive(ref["npz"])[ref["key"]]
        for name, ref in case[side].items()
    }


def check(case, got, want, what=""):
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    tolerance = case["tolerance"]
    assert got.shape == want.shape, what
    np.testing.assert_allclose(got, want, rtol=tolerance["rtol"], atol=tolerance["atol"], equal_nan=True, err_msg=what)


def check_metrics(case, got, want):
    assert set(got) == set(want)
    for name in want:
        check(case, got[name], want[name], name)


def ragged(matrix):
    matrix = np.asarray(matrix)
    return Ragged.from_lengths(matrix.reshape(-1), np.full(len(matrix), matrix.shape[1]))


def square(rows, like):
    return np.asarray(rows.values if isinstance(rows, Ragged) else rows).reshape(like.shape)
