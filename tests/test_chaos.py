"""Runs killed at moments spread over all that there are; `python tests/chaos.py` takes every one of them."""

import subprocess
import sys

import pytest
from chaos import CRASHED, Chaos, Kill, Trial, differences, leftovers, moments, one_thread, several, table, unkilled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    with Chaos(tmp_path_factory.mktemp("chaos") / "runs") as server:
        yield server


@pytest.fixture(scope="module")
def left_alone(chaos):
    """Facts of the run that was left alone, the moments that it passed, and its folder of runs."""
    return unkilled(chaos)


def spread(kills, count):
    """So many of the kills, from first to last."""
    return [kills[(2 * i + 1) * len(kills) // (2 * count)] for i in range(count)]


def all_equal(chaos, expected, plans):
    trials = [chaos.trial(plan, expected) for plan in plans]
    wrong = [f"{'; '.join(map(str, trial.kills))} {trial.codes}: {line}" for trial in trials for line in trial.wrong]
    assert not wrong, "\n".join(wrong)


def test_the_moments_are_many_and_cover_stages_checkpoints_and_manifests(left_alone):
    kills = moments(left_alone[1])
    assert len(set(map(str, kills))) >= 60
    in_stage = {kill.where.partition("/")[2] for kill in kills if kill.how == "SIGKILL"}
    training = {"prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates"}
    assert in_stage == {*training, "val_prompts", "val_rollouts", "val_rewards"}
    sides = {(kill.where.split("/")[4], kill.moment) for kill in kills if kill.where.endswith("/0001/manifest.json")}
    assert sides >= {(stage, side) for stage in training for side in ("before", "after")}
    places = {kill.where for kill in kills if kill.how == "crash"}
    for name in (
        "model.safetensors",
        "optimizer.safetensors",
        "step.json",
        "ledger.jsonl",
        "tracking.jsonl",
        ".removed",
    ):
        assert any(name in place for place in places), name
    steps = {kill.where.partition("/")[0] for kill in kills if kill.call == "stage"}
    assert {f"{step:06d}" for step in range(1, 9)} <= steps


def test_a_run_left_alone_has_all_that_is_compared(left_alone):
    facts, _, root = left_alone
    assert facts["state"] == "finished"
    assert facts["finished"] == list(range(1, 9))
    rates = [facts[f"step {step} updates: lr"][0] for step in range(1, 9)]
    assert len(set(rates)) >= 7, "a warm-up and a decay"
    weights = [facts[f"step {step} advantages: notes"]["kl_coef"] for step in range(1, 9)]
    assert len(set(weights)) == 8, "the weight of the KL moves"
    assert {name.partition(":")[0] for name in facts if "optimizer.safetensors" in name} == {
        "checkpoint 6",
        "checkpoint 8",
    }
    assert len(facts["step 1 updates: lr"]) == 2
    assert facts["MLflow actor/grad_norm: steps"] == list(range(1, 9))
    assert facts["MLflow wrong"] == []
    assert leftovers(root) == []


def test_a_forked_run_gives_what_a_process_of_its_own_gives(chaos, left_alone):
    root = chaos.new_root()
    script = "from flows.cli import main; main()"
    words = [sys.executable, "-c", script, "train", *chaos.command(root)]
    done = subprocess.run(words, capture_output=True, text=True, env=one_thread())
    assert done.returncode == 0, done.stderr
    assert differences(left_alone[0], chaos.facts(root)) == []


def test_a_run_that_crashed_at_a_commit_point_ends_as_the_one_that_did_not(chaos, left_alone):
    facts, watched, _ = left_alone
    crashes = [kill for kill in moments(watched) if kill.how == "crash"]
    all_equal(chaos, facts, [[kill] for kill in spread(crashes, 5)])


def test_a_run_that_was_killed_in_a_stage_ends_as_the_one_that_was_not(chaos, left_alone):
    facts, watched, _ = left_alone
    kills = [kill for kill in moments(watched) if kill.how == "SIGKILL"]
    all_equal(chaos, facts, [[kill] for kill in spread(kills, 2)])


def test_a_run_that_was_told_to_end_ends_as_the_one_that_was_not(chaos, left_alone):
    facts, watched, _ = left_alone
    for abandons in (False, True):
        told = [kill for kill in moments(watched) if kill.how == "SIGTERM" and kill.abandons is abandons]
        all_equal(chaos, facts, [[kill] for kill in spread(told, 1)])


def test_a_run_that_was_killed_several_times_ends_as_the_one_that_was_not(chaos, left_alone):
    facts, watched, _ = left_alone
    all_equal(chaos, facts, several(watched))


def test_a_run_that_is_not_the_same_is_found_out(chaos, left_alone):
    root = chaos.new_root()
    assert chaos.attempt(root, None, None, "trainer.seed=1") == 0
    wrong = differences(left_alone[0], chaos.facts(root))
    assert wrong
    never = Kill("crash", "rename", "chaos/run/steps/000099/step.json", moment="before")
    [line, *_] = chaos.trial([never], left_alone[0]).wrong
    assert line == f"exit code 0 where {never} was to end it"
    assert CRASHED not in (0, 1, 2, 130, 143)
    assert "| all | 1 | 0 |" in table([Trial([never], wrong=[line])])
