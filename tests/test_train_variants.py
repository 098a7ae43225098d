"""Whole runs of the variants that change a step's stages: baselines, dynamic sampling, rollout correction, shaping."""

import json

import numpy as np
import pytest
from tiny_runs import digest, run, tokens

from storage import Ragged
from tasks.algorithms.advantages import row_of_token
from tasks.log_prob import read_sequences
from tasks.stage import StageError
from tasks.update import read_signals

SMALL = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
ONE_STEP = "trainer.total_training_steps=1"
CORRECTION = "algorithm.rollout_correction"


def column(view, stage, name):
    return Ragged.from_arrow(view.table(stage)[name])


# ---------------------------------------------------------------------------------------------------------- baselines


def test_remax_subtracts_the_score_of_the_greedy_response_to_the_same_prompt(tiny_run):
    the_run, _ = run(tiny_run("algorithm.adv_estimator=remax", ONE_STEP))
    view = the_run.step(1)
    assert view.stages()[-2:] == ["greedy_rollouts", "greedy_rewards"]
    greedy = dict(zip(*(view.table("greedy_rewards")[name].to_pylist() for name in ("group_id", "score")), strict=True))
    rewards = view.table("rewards").to_pylist()
    advantages = column(view, "advantages", "advantages")
    expected = [row["score"] - greedy[row["group_id"]] for row in rewards]
    assert [advantages[i][0] for i in range(32)] == pytest.approx(expected)
    assert len(greedy) == view.table("greedy_rollouts").num_rows == 8
    assert view.record["metrics"]["timing_s/gen_max"] > 0


def test_remax_takes_one_response_per_prompt(tiny_run):
    the_run, _ = run(tiny_run("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1", SMALL, ONE_STEP))
    assert the_run.step(1).table("rollouts").num_rows == 8


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_read_squared_probabilities_of_the_old_log_prob_pass(tiny_run, estimator):
    the_run, _ = run(tiny_run(f"algorithm.adv_estimator={estimator}", ONE_STEP))
    view = the_run.step(1)
    squares, old = column(view, "old_log_probs", "sum_pi_squared"), column(view, "old_log_probs", "old_log_probs")
    assert (squares.values >= np.exp(2 * old.values) - 1e-6).all()
    assert (squares.values <= 1).all()
    metrics = view.record["metrics"]
    assert metrics["variance_proxy/proxy2_total_power"] > 0
    assert metrics["actor/grad_norm"] > 0


def test_other_estimators_do_not_pay_for_squared_probabilities(tiny_run):
    the_run, _ = run(tiny_run(ONE_STEP))
    assert the_run.step(1).table("old_log_probs")["sum_pi_squared"].null_count == 32


# -------------------------------------------------------------------------------------------------- rollout correction


def test_weights_of_rollout_correction_reach_the_loss(tiny_run):
    plain, _ = run(tiny_run(ONE_STEP, "trainer.default_local_dir=null", "trainer.experiment_name=plain"))
    halved, _ = run(
        tiny_run(
            ONE_STEP,
            "trainer.default_local_dir=null",
            "trainer.experiment_name=halved",
            f"{CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_is_threshold=0.5",
        )
    )
    weights = column(halved.step(1), "advantages", "rollout_is_weights").values
    assert weights == pytest.approx(0.5)  # engine and policy agree, so every ratio is 1 and is held at the bound
    assert plain.step(1).table("advantages")["rollout_is_weights"].null_count == 32
    losses = [one.step(1).table("updates")["pg_loss"].to_pylist()[0] for one in (plain, halved)]
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-3)
    metrics = halved.step(1).record["metrics"]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(0.5)
    assert metrics["rollout_corr/kl"] == pytest.approx(0, abs=1e-4)


def test_when_all_weights_are_zero_the_update_is_skipped_and_counted(tiny_run):
    # Weights are held at a bound that float32 takes for 0.
    band = [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=1e-50"]
    the_run, _ = run(tiny_run(*band, f"{CORRECTION}.rollout_is_batch_normalize=true"))
    rows = the_run.step(1).table("updates").to_pylist()
    assert [row["skipped"] for row in rows] == ["all importance weights are 0"] * 2
    assert digest(the_run, 1) == digest(the_run, 2)
    assert the_run.step(2).record["metrics"]["actor/skipped_updates"] == 2


def test_when_all_tokens_are_rejected_the_update_is_skipped_and_counted(tiny_run):
    # Engine and policy differ by rounding in at least one token of every sequence.
    rules = [f"{CORRECTION}.rollout_rs=seq_veto_k1", f"{CORRECTION}.rollout_rs_threshold={1 - 1e-12}_{1 + 1e-12}"]
    the_run, _ = run(tiny_run(*rules))
    view = the_run.step(1)
    assert not column(view, "advantages", "loss_mask").values.any()
    assert [row["skipped"] for row in view.table("updates").to_pylist()] == ["no token is in the loss"] * 2
    assert set(view.table("advantages")["no_signal"].to_pylist()) >= {"rejected by rollout correction"}
    assert view.record["metrics"]["rollout_corr/rollout_rs_masked_fraction"] == 1


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_in_bypass_mode_the_samplers_log_probs_are_the_denominator_and_no_pass_is_made(tiny_run, loss):
    cfg = tiny_run(f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type={loss}", f"{CORRECTION}.rollout_is=token")
    the_run, _ = run(cfg)
    view = the_run.step(1)
    sampled, old = column(view, "rollouts", "rollout_log_probs"), column(view, "old_log_probs", "old_log_probs")
    np.testing.assert_array_equal(sampled.values, old.values)
    manifest = view.manifest("old_log_probs")
    assert (manifest.shapes["micro_batches"], manifest.notes["of"]) == (0, "engine")
    assert view.table("old_log_probs")["entropy"].null_count == 32
    assert view.record["metrics"]["actor/grad_norm"] > 0
    assert view.record["metrics"]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "option",
    ["policy_loss.off_policy_mask_threshold=0", "policy_loss.top_entropy_quantile=0.2", "use_unbiased_kl=true"],
)
def test_options_of_any_loss_train_a_step(tiny_run, option):
    the_run, _ = run(tiny_run(f"actor_rollout_ref.actor.{option}"))
    assert the_run.step(2).record["metrics"]["actor/grad_norm"] > 0


# --------------------------------------------------------------------------------------------------- dynamic sampling


def mixed(view):
    """Whether each group of the batch that is trained on holds different scores."""
    table = view.table("rewards").to_pylist()
    groups = {}
    for row in table:
        groups.setdefault(row["group_id"], set()).add(row["score"])
    return [len(scores) > 1 for scores in groups.values()]


ALWAYS_RIGHT = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"

FILTER = ("algorithm.filter_groups.enable=true", "data.gen_batch_size=5", "data.train_batch_size=8")


def test_groups_without_a_signal_are_dropped_and_the_batch_is_filled_up(tiny_run):
    the_run, _ = run(tiny_run(*FILTER, "actor_rollout_ref.rollout.n=2"))
    seen = 0
    for step in (1, 2):
        view = the_run.step(step)
        assert mixed(view) == [True] * 8
        calls = [stage for stage in view.stages() if stage.startswith("rollouts-")]
        assert len(calls) >= 2
        seen += len(calls)
        assert view.manifest("prompts").notes["generate_calls"] == seen
        assert view.record["metrics"]["train/num_gen_batches"] == len(calls)
        names = view.table("rollouts")["group_id"].to_pylist()
        drawn = [name for stage in calls for name in dict.fromkeys(view.table(stage)["group_id"].to_pylist())]
        assert len(set(drawn)) == 5 * len(calls)
        assert [name for name in drawn if name in set(names)] == list(dict.fromkeys(names))
        sampled = {row["sample_id"]: row for stage in calls for row in view.table(stage).to_pylist()}
        assert all(sampled[row["sample_id"]] == row for row in view.table("rollouts").to_pylist())
        assert view.table("old_log_probs").num_rows == view.table("advantages").num_rows == 16


def test_a_step_that_cannot_be_filled_stops_and_says_what_it_found(tiny_run, tmp_path):
    cfg = tiny_run(*FILTER, "algorithm.filter_groups.max_num_gen_batches=2")
    (tmp_path / "reward.py").write_text(ALWAYS_RIGHT)
    with pytest.raises(StageError, match=r"2 generate calls .* gave 0 groups with a signal out of 10"):
        run(cfg)
    cfg = tiny_run(*FILTER)
    (tmp_path / "reward.py").write_text(ALWAYS_RIGHT)
    with pytest.raises(StageError, match=r"=0, which is one pass over the 16 training prompts\).* above 4, raise"):
        run(cfg)


def test_a_run_that_filters_goes_on_with_the_calls_it_has_made(tiny_run):
    cfg = tiny_run(*FILTER, "actor_rollout_ref.rollout.n=2", ONE_STEP)
    whole, _ = run(cfg)
    before = {stage: whole.step(1).manifest(stage).digest for stage in whole.step(1).stages() if "rollouts" in stage}
    (whole.root / "steps/000001/step.json").unlink()
    again, _ = run(cfg)
    after = {stage: again.step(1).manifest(stage).digest for stage in again.step(1).stages() if "rollouts" in stage}
    assert after == before
    assert all(len(again.step(1).attempts(stage)) == 1 for stage in after)


def test_groups_are_filtered_by_a_value_that_the_function_returned(tiny_run, tmp_path):
    cfg = tiny_run(*FILTER, "algorithm.filter_groups.metric=acc", ONE_STEP)
    accuracy = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) / 10, 'acc': float(ord((solution_str or 'a')[0]) % 2)}\n"
    )
    (tmp_path / "reward.py").write_text(accuracy)
    the_run, _ = run(cfg)
    assert the_run.step(1).table("rollouts").num_rows == 32
    cfg = tiny_run(*FILTER, "algorithm.filter_groups.metric=nope", ONE_STEP, "trainer.default_local_dir=null")
    (tmp_path / "reward.py").write_text(accuracy)
    with pytest.raises(
        StageError, match=r"of that name for any of 40 samples\. There are score, reward, acc, compute_score"
    ):
        run(cfg)


def test_a_value_that_one_call_lacks_is_no_verdict_there(tiny_run, tmp_path):
    cfg = tiny_run(
        *FILTER,
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=40",
        "data.gen_batch_size=1",
        "data.train_batch_size=2",
        "data.shuffle=false",
        ONE_STEP,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    score = float(ord((solution_str or 'a')[0]) % 2)\n"
        "    return {'score': score, 'acc': score} if int(ground_truth) % 2 else score\n"
    )
    the_run, _ = run(cfg)
    view = the_run.step(1)
    prompts = view.table("prompts").to_pylist()
    assert all(int(json.loads(row["ground_truth"])) % 2 for row in prompts)
    assert "acc" not in view.table("rewards-01")["extra"].to_pylist()[0]


def test_a_call_without_rows_of_a_configured_function_is_no_mistake(tiny_run, tmp_path):
    functions = f"reward.functions=[{{name: '{tmp_path}/two.py:maths'}}, {{name: '{tmp_path}/two.py:prose'}}]"
    cfg = tiny_run(
        *FILTER,
        "custom_reward_function.path=null",
        functions,
        "algorithm.filter_groups.metric=maths",
        "data.gen_batch_size=4",
        "data.train_batch_size=4",
        "data.shuffle=false",
        ONE_STEP,
    )
    even = "float(ord((solution_str or 'a')[0]) % 2)"
    (tmp_path / "two.py").write_text(
        f"def maths(solution_str, ground_truth):\n    return {even} if int(ground_truth) >= 4 else None\n"
        f"def prose(solution_str, ground_truth):\n    return {even} if int(ground_truth) < 4 else None\n"
    )
    the_run, _ = run(cfg)
    prompts = the_run.step(1).table("prompts").to_pylist()
    assert len(prompts) == 4
    assert all(int(json.loads(row["ground_truth"])) >= 4 for row in prompts)


def test_without_a_limit_a_step_draws_as_many_prompts_as_there_are(tiny_run, tmp_path):
    cfg = tiny_run(*FILTER, "data.gen_batch_size=11")
    (tmp_path / "reward.py").write_text(ALWAYS_RIGHT)
    with pytest.raises(StageError, match=r"2 generate calls .* out of 22"):
        run(cfg)


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_reward_that_float32_cannot_hold_stops_the_step_by_its_name(tiny_run, tmp_path):
    cfg = tiny_run("reward.scale=1e20", ONE_STEP)
    (tmp_path / "reward.py").write_text(ALWAYS_RIGHT.replace("1.0", "1e15"))
    with pytest.raises(
        StageError, match=r"the reward of sample 000001-0000-000 is 1e\+35 \(its score 1e\+15\).*32 of 32"
    ):
        run(cfg)


def test_maxrl_stops_at_rewards_below_zero(tiny_run, tmp_path):
    cfg = tiny_run("algorithm.adv_estimator=maxrl", ONE_STEP)
    (tmp_path / "reward.py").write_text(ALWAYS_RIGHT.replace("1.0", "-1.0"))
    with pytest.raises(StageError, match=r"step 1: algorithm\.adv_estimator=maxrl .*reward\.clip_low=0"):
        run(cfg)


# ------------------------------------------------------------------------------------------------- shaping and masking


def test_the_update_knows_which_responses_are_out_of_the_loss_whatever_was_rejected(tiny_run, tmp_path):
    cfg = tiny_run(
        "actor_rollout_ref.actor.mask_truncated_responses=true",
        "data.max_response_length=40",
        ONE_STEP,
        f"{CORRECTION}.rollout_rs=seq_veto_k1",
        f"{CORRECTION}.rollout_rs_threshold={1 - 1e-12}_{1 + 1e-12}",
    )
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    first = ord((solution_str or 'a')[0])\n"
        "    return None if first % 5 == 0 else float(first % 2)\n"
    )
    the_run, _ = run(cfg)
    view = the_run.step(1)
    names = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "advantages")
    prompts, rollouts, old, ref, advantages = (view.artifact(name) for name in names)
    sequences, table = read_sequences(prompts, rollouts)
    in_loss = read_signals(table, sequences.group, old, ref, advantages, True).in_loss
    cut = np.asarray([reason == "length" for reason in view.table("rollouts")["finish_reason"].to_pylist()])
    silent = np.asarray([score is None for score in view.table("rewards")["score"].to_pylist()])
    assert in_loss.tolist() == (~cut & ~silent).tolist()
    assert 0 < in_loss.sum() < 32
    assert not column(view, "advantages", "loss_mask").values.any()


def test_responses_cut_by_length_stay_out_of_the_loss_on_request(tiny_run):
    the_run, _ = run(
        tiny_run("actor_rollout_ref.actor.mask_truncated_responses=true", "data.max_response_length=40", ONE_STEP)
    )
    view = the_run.step(1)
    cut = np.asarray([reason == "length" for reason in view.table("rollouts")["finish_reason"].to_pylist()])
    mask = column(view, "advantages", "loss_mask")
    assert 0 < cut.sum() < 32
    assert not mask.values[cut[row_of_token(mask)]].any()
    assert mask.values[~cut[row_of_token(mask)]].all()
    why = view.table("advantages")["no_signal"].to_pylist()
    assert all(reason for reason, out in zip(why, cut, strict=True) if out)
    assert sum(row["tokens"] for row in view.table("updates").to_pylist()) == mask.values.sum()


def test_shaping_turns_scores_into_rewards_and_leaves_the_scores(tiny_run):
    buffer = "reward_model.overlong_buffer"
    shaping = [f"{buffer}.enable=true", f"{buffer}.len=4", f"{buffer}.penalty_factor=2", "reward.clip_low=-0.5"]
    the_run, _ = run(tiny_run(*shaping, "reward.scale=10", ONE_STEP))
    view = the_run.step(1)
    lengths = column(view, "rollouts", "response_ids").lengths
    scores = view.table("rewards")["score"].to_numpy()
    expected = 10 * np.maximum(scores - 2 * np.clip((lengths - 2) / 4, 0, 1), -0.5)
    rewards = column(view, "advantages", "token_rewards")
    got = np.asarray([rewards[i].sum() for i in range(32)])
    np.testing.assert_allclose(got[lengths > 0], expected[lengths > 0], rtol=1e-6)
    metrics = view.record["metrics"]
    assert metrics["critic/score/mean"] != metrics["critic/rewards/mean"]
    assert metrics["reward/overlong_penalty/mean"] < 0


# ------------------------------------------------------------------------------------------------------------- alarms


def test_a_measurement_beyond_its_bound_is_said_and_kept(tiny_run):
    quiet, _ = run(tiny_run(ONE_STEP))
    assert not [event for event in quiet.events() if event["event"] == "alarm"]
    loud, output = run(
        tiny_run(
            ONE_STEP,
            "trainer.default_local_dir=null",
            "trainer.alarms.rollout_probs_diff_mean=1e-12",
            "trainer.alarms.rollout_actor_probs_pearson_corr=1",
        )
    )
    messages = [event["message"] for event in loud.events() if event["event"] == "alarm"]
    assert len(messages) == 2
    assert "training/rollout_probs_diff_mean is" in messages[0]
    assert all(f"alarm: {message}" in output for message in messages)


def test_the_ratio_of_the_first_update_is_one_up_to_rounding(tiny_run):
    the_run, _ = run(tiny_run())
    for step in (1, 2):
        assert the_run.step(step).record["metrics"]["actor/first_update_log_ratio_max"] < 1e-4
    assert tokens(the_run, 1) != tokens(the_run, 2)
