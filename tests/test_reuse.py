"""`storage.reuse_from`: what another run has made of exactly the same things is taken over, and nothing else."""

import io
import json
import os
import shutil

import pytest
from rich.console import Console
from tiny_runs import digest, run, tokens

from flows import show
from storage import RunWriter, read_table
from storage.artifacts import check_parts, read_manifest
from storage.retention import Retention, compress, drop, what_to_compress, what_to_drop
from tasks.conditions import CONDITIONS, can_be_shared, packages_digest

BASE = ("trainer.val_before_train=true", "trainer.test_freq=2")
SHARED = ["prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages"]
VALIDATED = ["val_prompts", "val_rollouts", "val_rewards"]
CLOCK = ("timing", "perf/throughput", "perf/time_per_step", "memory/", "reused/")


@pytest.fixture
def trial(tiny_run, tmp_path):
    """Train a run by name: `trial("b", *overrides, reuse="a")` takes over what run a has."""

    def train(name, *overrides, reuse=None, **options):
        given = [f"trainer.default_local_dir={tmp_path / name}"]
        if reuse is not None:
            given.append(f"storage.reuse_from=[{tmp_path / reuse}]")
        return run(tiny_run(*BASE, *given, *overrides), **options)[0]

    return train


def taken(the_run, step):
    """Names of a step's artifacts that come from another run."""
    view = the_run.step(step)
    return [stage for stage in view.stages() if "reused_from" in view.manifest(stage).notes]


def lasting(the_run, step):
    metrics = the_run.step(step).record["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCK)}


def assert_same_run(first, second):
    for step in (0, 1, 2):
        assert lasting(first, step) == lasting(second, step), step
        for stage in first.step(step).stages():
            if stage not in ("rewards", "val_rewards", "updates"):
                made = {one.step(step).manifest(stage).digest for one in (first, second)}
                assert len(made) == 1, (step, stage)
    assert tokens(first, 2) == tokens(second, 2)
    assert digest(first, 2) == digest(second, 2)


def test_runs_of_two_learning_rates_share_the_first_validation_and_all_of_step_1_but_its_update(trial):
    donor = trial("a")
    other = "actor_rollout_ref.actor.optim.lr=5e-3"
    alone, sharing = trial("b", other), trial("c", other, reuse="a")
    assert (taken(sharing, 0), taken(sharing, 1)) == (VALIDATED, SHARED)
    # At step 2 the policies differ, though the prompts are the same ones and their number of the policy is.
    assert taken(sharing, 2) == ["prompts", "val_prompts"]
    assert_same_run(alone, sharing)
    assert digest(donor, 1) != digest(sharing, 1)
    assert taken(alone, 1) == []


def test_an_equal_run_takes_over_every_step_and_still_makes_its_own_updates(trial):
    donor, sharing = trial("a"), trial("b", reuse="a")
    assert (taken(sharing, 1), taken(sharing, 2)) == (SHARED, [*SHARED, *VALIDATED])
    for step in (1, 2):
        assert sharing.step(step).manifest("updates").run_id == sharing.run_id
    assert_same_run(donor, sharing)


def test_what_is_taken_over_is_the_runs_own_and_says_where_it_comes_from(trial):
    donor, sharing = trial("a"), trial("b", "actor_rollout_ref.actor.optim.lr=5e-3", reuse="a")
    theirs, ours = (one.step(1).manifest("rollouts") for one in (donor, sharing))
    assert (ours.run_id, ours.attempt, ours.lineage) == (sharing.run_id, 1, 1)
    about = ours.notes["reused_from"]
    assert (about["run_id"], about["digest"], about["seconds"]) == (donor.run_id, theirs.digest, theirs.seconds)
    assert ours.config_digest != theirs.config_digest
    mine, its = (one.step(1).used("rollouts") / "part-00000.arrow" for one in (sharing, donor))
    assert mine.samefile(its)
    events = [event for event in sharing.events() if event["event"] == "reused"]
    # Scoring goes on beside the log-prob pass.
    assert sorted(event["stage"] for event in events if event["step"] == 1) == sorted(SHARED)
    assert {event["run_id"] for event in events} == {donor.run_id}


def test_a_reused_stage_has_no_time_and_is_said_to_be_reused(trial):
    trial("a")
    sharing = trial("b", "actor_rollout_ref.actor.optim.lr=5e-3", reuse="a")
    metrics = sharing.step(1).record["metrics"]
    assert not {"timing_s/gen", "timing_per_token_ms/gen", "timing_s/reward", "perf/throughput"} & metrics.keys()
    assert metrics["reused/rollouts"] == 1.0
    assert metrics["timing_s/update_actor"] > 0 and metrics["timing_s/step"] > 0
    assert "timing_s/testing" not in sharing.step(0).record["metrics"]
    later = sharing.step(2).record["metrics"]
    assert later["timing_s/gen"] > 0 and later["reused/prompts"] == 1.0
    output = io.StringIO()
    console = Console(file=output, width=200)
    show.show(sharing.root, 1, None, None, False, 20, console)
    show.status(sharing.root, False, console)
    said = output.getvalue()
    assert "rollouts: reused from default-" in said and "where it took" in said
    assert "step 1: prompts, rollouts, old_log_probs, ref_log_probs, rewards, advantages reused from default-" in said
    output = io.StringIO()
    show.status(sharing.root, True, Console(file=output))
    assert set(json.loads(output.getvalue())["reused"]) == {"0", "1", "2"}


def test_another_seed_shares_nothing(trial):
    trial("a")
    sharing = trial("b", "trainer.seed=1", reuse="a")
    assert [taken(sharing, step) for step in (0, 1, 2)] == [[], [], []]


def test_another_temperature_shares_the_validation_and_the_prompts_alone(trial):
    trial("a")
    hot = "actor_rollout_ref.rollout.temperature=0.7"
    alone, sharing = trial("b", hot), trial("c", hot, reuse="a")
    assert (taken(sharing, 0), taken(sharing, 1)) == (VALIDATED, ["prompts"])
    assert_same_run(alone, sharing)


def test_other_weights_behind_the_same_path_share_no_tokens(trial, tmp_path):
    from safetensors.torch import load_file, save_file

    trial("a")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    first = sorted(weights)[0]
    weights[first] = weights[first] + 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    sharing = trial("b", reuse="a")
    assert [taken(sharing, step) for step in (0, 1)] == [[], []]


@pytest.mark.parametrize(
    "other",
    [
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "storage.compression=zstd",
    ],
)
def test_what_decides_the_last_digits_or_bytes_without_being_in_the_key_keeps_runs_apart(trial, other):
    trial("a")
    assert taken(trial("b", other, reuse="a"), 1) == []


def test_a_donor_that_is_damaged_is_not_used_and_what_is_whole_in_it_is(trial):
    donor = trial("a")
    part = donor.step(1).used("rollouts") / "part-00000.arrow"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    other = "actor_rollout_ref.actor.optim.lr=5e-3"
    alone, sharing = trial("b", other), trial("c", other, reuse="a")
    assert "rollouts" not in taken(sharing, 1) and "prompts" in taken(sharing, 1)
    [refused] = [event for event in sharing.events() if event["event"] == "not_reused"]
    assert (refused["step"], refused["stage"]) == (1, "rollouts") and "SHA-256" in refused["reason"]
    assert [path.name for path in (sharing.root / "steps/000001/rollouts").iterdir()] == ["0001"]
    assert_same_run(alone, sharing)


def test_a_donor_may_have_compressed_its_rows_or_be_gone_in_part(trial):
    donor = trial("a")
    with RunWriter(donor.root) as writer:
        compress(writer, what_to_compress(writer, Retention(keep="all", steps=1, compress=True), needed=3))
        items = [one for one in what_to_drop(writer, Retention("last", 1), needed=2) if one.stage == "rewards"]
        assert drop(writer, items) > 0
    sharing = trial("b", "actor_rollout_ref.actor.optim.lr=5e-3", reuse="a")
    assert "rollouts" in taken(sharing, 1) and "rewards" not in taken(sharing, 1)
    assert (sharing.step(1).used("rollouts") / "part-00000.arrow.zst").exists()
    assert read_table(sharing.step(1).artifact("rollouts")).num_rows == 32


def test_a_donor_that_is_still_written_to_is_read_and_not_locked(trial):
    donor = trial("a", until=1)
    with RunWriter(donor.root):
        half = donor.root / "steps/000002/prompts/0001"
        half.mkdir(parents=True)
        (half / "part-00000.arrow").write_bytes(b"half a file")
        sharing = trial("b", reuse="a")
        assert (half / "part-00000.arrow").read_bytes() == b"half a file"
    assert (taken(sharing, 1), taken(sharing, 2)) == (SHARED, [])


def test_without_hard_links_the_rows_are_copied_and_checked(trial, monkeypatch):
    donor = trial("a")

    def other_file_system(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    sharing = trial("b", reuse="a")
    assert taken(sharing, 1) == SHARED
    folder = sharing.step(1).used("rollouts")
    assert not (folder / "part-00000.arrow").samefile(donor.step(1).used("rollouts") / "part-00000.arrow")
    check_parts(folder, read_manifest(folder))


def test_the_run_outlives_its_donor_and_goes_on(trial, tmp_path):
    trial("a")
    sharing = trial("b", reuse="*", until=1)
    assert taken(sharing, 1) == SHARED
    shutil.rmtree(tmp_path / "a")
    again = trial("b", reuse="*")
    assert again.finished_steps() == [1, 2] and again.state == "finished"
    # What was taken over may be changed on resume, and no key depends on it.
    third = trial("b", "trainer.total_training_steps=3", "trainer.total_epochs=9")
    assert third.finished_steps() == [1, 2, 3]


def test_a_chain_of_runs_names_the_one_that_computed(trial):
    donor = trial("a")
    trial("b", "actor_rollout_ref.actor.optim.lr=5e-3", reuse="a")
    last = trial("c", "actor_rollout_ref.actor.optim.lr=7e-3", reuse="b")
    assert last.step(1).manifest("rollouts").notes["reused_from"]["run_id"] == donor.run_id


def test_a_batch_in_which_a_reward_function_failed_is_scored_again(trial, tmp_path):
    broken = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    broken += "    if extra_info.get('index') or ground_truth == '3':\n        raise ValueError('no')\n"
    broken += "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    (tmp_path / "broken.py").write_text(broken)
    flaky = [f"custom_reward_function.path={tmp_path / 'broken.py'}", "reward.max_error_share=1", "reward.retries=0"]
    donor = trial("a", *flaky)
    failing = [step for step in (1, 2) if donor.step(step).record["metrics"]["reward/error_share"] > 0]
    assert failing
    sharing = trial("b", *flaky, reuse="a")
    for step in failing:
        assert "rollouts" in taken(sharing, step) and "rewards" not in taken(sharing, step)


def test_an_artifact_says_under_which_conditions_it_was_made(trial):
    the_run = trial("a")
    manifest = the_run.step(2).manifest("old_log_probs")
    conditions = manifest.notes[CONDITIONS]
    assert conditions["policy"] == digest(the_run, 1)
    assert conditions["packages"] == packages_digest(None)
    [[count, rank]] = conditions["ranks"]
    assert count == 1 and rank["threads"] >= 1 and rank["device"]
    assert "policy" not in the_run.step(2).manifest("ref_log_probs").notes[CONDITIONS]
    assert can_be_shared(manifest, conditions)
    for name in conditions:
        assert not can_be_shared(manifest, {**conditions, name: "another"})
    assert not can_be_shared(the_run.step(2).manifest("updates"), the_run.step(2).manifest("updates").notes[CONDITIONS])
    assert not can_be_shared(manifest.model_copy(update={"notes": {}}), conditions)


def test_dynamic_sampling_shares_its_generate_calls(trial):
    wide = ("algorithm.filter_groups.enable=true", "data.train_batch_size=4", "data.gen_batch_size=8")
    options = (*wide, "algorithm.filter_groups.max_num_gen_batches=4", "trainer.total_training_steps=1")
    donor = trial("a", *options)
    sharing = trial("b", *options, "actor_rollout_ref.actor.optim.lr=5e-3", reuse="a")
    names = taken(sharing, 1)
    assert {"prompts-01", "rollouts-01", "rewards-01", "rollouts", "rewards", "old_log_probs"} <= set(names)
    assert lasting(donor, 1)["train/num_gen_batches"] == lasting(sharing, 1)["train/num_gen_batches"]


def test_a_pattern_that_matches_no_run_is_said_and_no_error(tiny_run, tmp_path):
    the_run, output = run(tiny_run(f"storage.reuse_from=[{tmp_path / 'nothing-*'}]"))
    assert (the_run.state, taken(the_run, 1)) == ("finished", [])
    assert "no run is there yet to take anything over from: storage.reuse_from=" in output


def test_another_tokenizer_or_model_configuration_beside_the_same_weights_shares_no_tokens(trial, tmp_path):
    trial("a")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    sharing = trial("b", reuse="a")
    assert [taken(sharing, step) for step in (0, 1)] == [[], []]


def test_a_step_that_was_taken_over_says_so_in_its_line(tiny_run, tmp_path):
    run(tiny_run(f"trainer.default_local_dir={tmp_path / 'a'}"))
    _, output = run(tiny_run(f"storage.reuse_from=[{tmp_path / 'a'}]", "actor_rollout_ref.actor.optim.lr=5e-3"))
    [first] = [line for line in output.splitlines() if line.startswith("step 1/2")]
    assert "| gen+old+ref+reward+adv reused update " in first
