"""`grpoflow show` and `status`: ids are whole, tables fit, changes and near names are in words."""

from __future__ import annotations

import pytest

from flows.show import _event_in_words, _nearest_artifact, _widths

CELLS = {
    "sample_id": ["000012-0000-000", "val-000012-0000-000"],
    "group_id": ["000012-0000", "000012-0000"],
    "response_ids": ["[" + "10 " * 20 + "]"] * 2,
    "score": ["1", "0"],
}


def test_ids_are_whole_however_narrow_the_terminal() -> None:
    for room in (10, 40, 60, 200):
        widths = _widths(CELLS, room)
        assert (widths["sample_id"], widths["group_id"]) == (19, 11)


def test_other_columns_get_narrower_and_then_fewer() -> None:
    # With two characters of padding each: 21 + 13 + 34 + 7 = 75.
    assert _widths(CELLS, 75) == {"sample_id": 19, "group_id": 11, "response_ids": 32, "score": 5}
    assert _widths(CELLS, 60)["response_ids"] == 16
    assert list(_widths(CELLS, 50)) == ["sample_id", "group_id", "response_ids"]
    assert list(_widths(CELLS, 30)) == ["sample_id", "group_id"]


def test_a_change_is_told_as_key_old_and_new() -> None:
    changes = {"trainer.default_local_dir": [None, "runs/a"], "algorithm.adv_estimator": ["grpo", "rloo"]}
    event = {"event": "config_changed", "at": "2026-01-02T03:04:05.678+00:00", "lineage": 2, "changes": changes}
    assert _event_in_words(event) == (
        "2026-01-02T03:04:05 config_changed: lineage 2, "
        "trainer.default_local_dir null -> runs/a, algorithm.adv_estimator grpo -> rloo"
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("reward", "rewards"), ("advantage", "advantages"), ("generate", "rollouts"), ("zzz", None)],
)
def test_a_wrong_stage_gets_the_nearest_artifact(name: str, nearest: str | None) -> None:
    assert _nearest_artifact(name, ["prompts", "rollouts", "rewards", "advantages"]) == nearest
