"""The advantage stage on artifacts made by hand: masks, groups, samples without a verdict."""

from datetime import UTC, datetime

import numpy as np
import pytest

from storage import Ragged, RunWriter, build_table
from tasks.advantage import advantage, group_health
from tasks.config import RunConfig
from tasks.stage import StageError, Step, aligned


def artifacts(run, lengths, scores, groups, order=None):
    """Commit rollouts, rewards and old log-probs; `order` shuffles the rows of the rewards."""
    ids = [f"s{i}" for i in range(len(lengths))]
    order = list(range(len(ids))) if order is None else order

    def commit(stage, columns):
        table = build_table(stage, columns)
        return run.commit(1, stage, table, key=stage, policy_version=0, started_at=datetime.now(UTC))

    tokens = Ragged.from_rows([np.arange(length) for length in lengths], np.int32)
    floats = Ragged(np.full(len(tokens.values), -1.0, dtype=np.float32), tokens.offsets)
    count = len(ids)
    rollouts = commit(
        "rollouts",
        {
            "sample_id": ids,
            "group_id": groups,
            "sample_index": list(range(count)),
            "response_ids": tokens,
            "response_text": ["x"] * count,
            "rollout_log_probs": floats,
            "finish_reason": ["stop"] * count,
            "seed": list(range(count)),
            "policy_version": [0] * count,
        },
    )
    rewards = commit(
        "rewards",
        {
            "sample_id": [ids[i] for i in order],
            "group_id": [groups[i] for i in order],
            "score": [scores[i] for i in order],
            "status": ["ok"] * count,
            "parts": [[]] * count,
            "extracted": [None] * count,
            "extra": ["{}"] * count,
            "message": [None] * count,
            "seconds": [0.0] * count,
        },
    )
    nulls = [None] * count
    numbers = {"old_log_probs": floats, "entropy": floats, "sum_pi_squared": nulls}
    old = commit("old_log_probs", {"sample_id": ids, "group_id": groups, **numbers})
    return rollouts, rewards, old


@pytest.fixture
def run(tmp_path):
    with RunWriter.create(tmp_path / "run", "run") as writer:
        yield writer


def result(run, *made):
    return advantage(Step(1, run, RunConfig()), *made, None)


def test_the_loss_mask_has_the_length_of_each_response_whether_or_not_it_has_an_end_token(run):
    """One response ends after 3 tokens, one is cut at 8, one is stopped by a text after 2."""
    made = artifacts(run, [3, 8, 2], [1.0, 0.0, 0.5], ["g"] * 3)
    result(run, *made)
    table = run.step(1).table("advantages")
    assert [sum(mask) for mask in table["loss_mask"].to_pylist()] == [3, 8, 2]
    assert [row[-1] for row in table["token_rewards"].to_pylist()] == [1.0, 0.0, 0.5]
    assert run.step(1).manifest("advantages").shapes["tokens"] == 13


def test_scores_reach_their_sample_by_id_and_siblings_need_not_be_neighbours(run):
    scores, groups = [1.0, 0.0, 0.0, 1.0], ["a", "b", "a", "b"]
    made = artifacts(run, [2, 2, 2, 2], scores, groups, order=[3, 1, 0, 2])
    result(run, *made)
    first = [row[0] for row in run.step(1).table("advantages")["advantages"].to_pylist()]
    assert first == pytest.approx([2**-0.5, -(2**-0.5), -(2**-0.5), 2**-0.5], rel=1e-5)


def test_a_sample_without_a_verdict_stays_out_of_mean_and_loss(run):
    made = artifacts(run, [1, 1, 1], [1.0, None, 0.0], ["g"] * 3)
    result(run, *made)
    table = run.step(1).table("advantages")
    assert table["group_mean"].to_pylist() == [0.5] * 3
    assert table["loss_mask"].to_pylist() == [[True], [False], [True]]
    assert table["no_signal"].to_pylist() == [None, "no verdict", None]


def test_artifacts_with_other_samples_are_not_joined(run):
    rollouts, rewards, _ = artifacts(run, [1, 1], [1.0, 0.0], ["g", "g"])
    other = build_table(
        "ref_log_probs",
        {
            "sample_id": ["s0", "s9"],
            "group_id": ["g", "g"],
            "ref_log_probs": Ragged.from_rows([[0.0], [0.0]], np.float32),
        },
    )
    stranger = run.commit(1, "ref_log_probs", other, key="k", policy_version=0, started_at=datetime.now(UTC))
    with pytest.raises(StageError, match=r"missing \['s1'\]"):
        aligned(stranger, run.step(1).table("rollouts")["sample_id"], ["ref_log_probs"])
    assert aligned(rewards, run.step(1).table("rollouts")["sample_id"], ["score"]).num_rows == rollouts.rows


def test_groups_are_counted_as_all_pass_all_fail_or_mixed():
    score = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, np.nan, np.nan])
    health = group_health(score, np.repeat(np.arange(4), 2))
    assert health == {"group/all_pass": 1 / 3, "group/all_fail": 1 / 3, "group/mixed": 1 / 3}
