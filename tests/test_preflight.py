"""`grpoflow preflight`: estimators by hand, a real preflight of a tiny model, and what is written of it."""

import io
import itertools
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_runs import run
from typer.testing import CliRunner

from flows.cli import app
from flows.config import load_config, to_yaml
from flows.preflight import Batch, cut, preflight_config, run_preflight
from flows.preflight_report import Keep, write_kept
from flows.resume import resume_command
from flows.run_folder import run_folder
from storage import Ragged, StorageError, open_run
from tasks.pass_rates import distribution, likeliest_beta, signal_at, signal_share

# ---------------------------------------------------------------------------------------------------------- estimators


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_the_chance_of_a_signal_is_the_share_of_subsets_that_are_mixed(case):
    n, passed, k = case
    subsets = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    mixed = sum(0 < sum(subset) < k for subset in subsets)
    assert signal_at(n, passed, k) == pytest.approx(mixed / len(subsets))


@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 4), (8, 8), (16, 8)])
@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
def test_the_estimate_is_unbiased_for_every_pass_rate(n, k, p):
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * signal_at(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - p**k - (1 - p) ** k)


def test_shares_by_hand():
    n, passed = np.array([4, 4, 4, 4]), np.array([0, 1, 2, 4])
    four = signal_share(n, passed, 4)
    assert (four.share, four.how, four.prompts) == (0.5, "measured", 4)
    assert four.error == pytest.approx(np.std([0, 1, 1, 0], ddof=1) / 2)
    two = signal_share(n, passed, 2)
    # Of the 6 pairs, 3 are mixed with one pass of four, and 4 with two.
    assert (two.share, two.how) == (pytest.approx((0 + 1 / 2 + 2 / 3 + 0) / 4), "unbiased")
    assert signal_share(n, passed, 8).how == "estimate"
    assert signal_share(n[:1], passed[:1], 4).error is None
    assert signal_share(np.array([0]), np.array([0]), 2) is None


def test_a_prompt_that_lacks_verdicts_counts_where_it_has_enough():
    share = signal_share(np.array([4, 3]), np.array([2, 1]), 4)
    assert (share.share, share.prompts, share.how) == (1.0, 1, "measured")
    assert signal_share(np.array([4, 3]), np.array([2, 1]), 3).prompts == 2


@pytest.mark.parametrize(("a", "b"), [(0.4, 0.8), (3.0, 2.0), (0.1, 0.1)])
def test_beyond_the_samples_the_estimate_is_near_the_truth(a, b):
    rng = np.random.default_rng(7)
    rate = rng.beta(a, b, 4000)
    passed = rng.binomial(8, rate)
    truth = np.mean(1 - rate**32 - (1 - rate) ** 32)
    share = signal_share(np.full(4000, 8), passed, 32)
    assert share.how == "estimate" and share.share == pytest.approx(truth, abs=0.02)
    found = likeliest_beta(np.full(4000, 8), passed)
    assert found[0] / sum(found) == pytest.approx(a / (a + b), abs=0.03)


def test_prompts_that_are_never_solved_stay_nearly_without_signal_at_any_size():
    assert signal_share(np.full(100, 8), np.zeros(100, dtype=int), 32).share < 0.05
    assert signal_share(np.full(100, 8), np.full(100, 8), 32).share < 0.05


def test_pass_rates_are_counted_with_never_and_always_apart():
    rate = np.array([0.0, 0.0, 0.125, 0.2, 0.6, 3 / 5, 0.61, 0.875, 1.0, np.nan])
    assert distribution(rate) == {
        "0": 2, "0..0.2": 2, "0.2..0.4": 0, "0.4..0.6": 2, "0.6..0.8": 1, "0.8..1": 1, "1": 1
    }  # fmt: skip


def test_batches_are_those_of_the_run_and_what_is_left_over():
    assert cut(20, 8) == [Batch(1, 0, 8, True), Batch(2, 8, 8, True), Batch(3, 16, 4, False)]
    assert cut(16, 8) == [Batch(1, 0, 8, True), Batch(2, 8, 8, True)]
    assert cut(5, 8) == [Batch(1, 0, 5, False)]


@pytest.mark.parametrize("text", ["0.5", "0.9..0.1", "a..b", "0..2", "-0.1..1", "nan..1"])
def test_bounds_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"two pass rates between 0 and 1"):
        Keep.parse(text)
    assert Keep.parse("0..0.5") == Keep(0.0, 0.5)


# ------------------------------------------------------------------------------------------------------ real preflights


def look(cfg, prompts=12, **options):
    """A preflight, and what was said."""
    output = io.StringIO()
    found, data = run_preflight(cfg, prompts, Console(file=output, width=200), **options)
    return found, data, output.getvalue()


NAMED = ("trainer.default_local_dir=null", "trainer.experiment_name=first", "reward.num_workers=1")


def test_the_numbers_are_those_of_the_artifacts(tiny_run):
    found, _, said = look(tiny_run(*NAMED))
    the_run = open_run(found.run)
    assert found.run.name == "first.preflight"
    assert the_run.state == "finished" and the_run.finished_steps() == [1, 2]
    assert [the_run.step(step).stages() for step in (1, 2)] == [["prompts", "rollouts", "rewards"]] * 2
    passes, lengths, scores, cut_off = {}, [], [], 0
    for step in (1, 2):
        rewards, rollouts = the_run.step(step).table("rewards"), the_run.step(step).table("rollouts")
        for row in rewards.to_pylist():
            passes.setdefault(row["group_id"], []).append(row["score"] >= 1)
            scores.append(row["score"])
        lengths += Ragged.from_arrow(rollouts["response_ids"]).lengths.tolist()
        cut_off += rollouts["finish_reason"].to_pylist().count("length")
    numbers = found.as_dict()
    counts = [sum(one) for one in passes.values()]
    assert (numbers["prompts"], numbers["n"], numbers["responses"]) == (12, 4, 48)
    assert (numbers["dead"], numbers["solved"]) == (counts.count(0), counts.count(4))
    assert numbers["pass_rate"]["mean"] == pytest.approx(np.mean(counts) / 4)
    assert numbers["scores_differ"] == pytest.approx(np.mean([0 < one < 4 for one in counts]))
    [at_four] = [share for share in numbers["signal"] if share["k"] == 4]
    assert (at_four["share"], at_four["how"]) == (pytest.approx(numbers["scores_differ"]), "measured")
    assert numbers["score"]["mean"] == pytest.approx(np.mean(scores))
    assert numbers["length"]["mean"] == pytest.approx(np.mean(lengths))
    assert numbers["length"]["truncated"] == pytest.approx(cut_off / 48)
    assert numbers["reward"]["ok"] == 48
    cost = numbers["cost"]
    assert cost["per_step"]["responses"] == 32
    assert cost["per_step"]["response_tokens"] == pytest.approx(np.mean(lengths) * 32)
    seconds = sum(the_run.step(step).manifest("rollouts").seconds for step in (1, 2))
    assert cost["per_step"]["generation_s"] == pytest.approx(seconds * 32 / 48)
    assert cost["whole_run"]["generation_s"] == pytest.approx(2 * seconds * 32 / 48)
    assert json.loads((found.run / "preflight.json").read_text()) == json.loads(json.dumps(numbers))
    assert "prompts 9 to 12 of 12" in said


def test_the_first_batch_is_left_out_of_the_costs_where_others_are_as_large(tiny_run):
    """An engine is slow at first: what it takes later is what a run's steps take."""
    found, _, _ = look(tiny_run(*NAMED, rows=21), 21)
    the_run = open_run(found.run)
    cost = found.numbers["cost"]
    assert (cost["measured"]["batches"], cost["measured"]["batches_scaled_up"]) == (3, 1)
    assert cost["per_step"]["generation_s"] == pytest.approx(the_run.step(2).manifest("rollouts").seconds)
    assert cost["per_step"]["reward_s"] == pytest.approx(the_run.step(2).manifest("rewards").seconds)


def test_it_samples_what_the_run_samples_first_and_the_run_can_take_it_over(tiny_run):
    cfg = tiny_run(*NAMED)
    found, _, _ = look(cfg, 8)
    given = f"storage.reuse_from=[{found.run}]"
    the_run, _ = run(tiny_run(*NAMED, given))
    for stage in ("prompts", "rollouts", "rewards"):
        assert the_run.step(1).manifest(stage).digest == open_run(found.run).step(1).manifest(stage).digest
        assert "reused_from" in the_run.step(1).manifest(stage).notes
    assert "reused_from" not in the_run.step(1).manifest("old_log_probs").notes


def test_the_order_is_that_of_the_first_epoch_and_no_prompt_comes_twice(tiny_run):
    found, data, _ = look(tiny_run(*NAMED, rows=21), 100)
    assert sorted(found.prompt_index.tolist()) == list(range(21))
    again, _, _ = look(tiny_run(*NAMED, rows=21), 5)
    assert again.prompt_index.tolist() == found.prompt_index[:5].tolist()
    assert data.table.num_rows == 21


def test_a_preflight_that_was_stopped_goes_on_where_it_stopped(tiny_run):
    calls = []

    def stop_in_the_second_batch():
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look(tiny_run(*NAMED), before_stage=stop_in_the_second_batch)
    folder = run_folder(preflight_config(tiny_run(*NAMED)))
    before = open_run(folder)
    assert (before.state, before.finished_steps()) == ("killed", [1])
    made = before.step(1).manifest("rollouts").committed_at
    found, _, said = look(tiny_run(*NAMED))
    assert "going on with" in said
    assert open_run(folder).step(1).manifest("rollouts").committed_at == made
    assert len(found.prompt_index) == 12
    # More prompts: those that are there are not sampled again.
    look(tiny_run(*NAMED), 16)
    assert open_run(folder).step(1).manifest("rollouts").committed_at == made


def test_another_configuration_gets_its_own_folder_and_takes_over_what_is_the_same(tiny_run):
    first, _, _ = look(tiny_run(*NAMED), 8)
    second, _, _ = look(tiny_run(*NAMED, "actor_rollout_ref.actor.optim.lr=0.5"), 8)
    assert second.run.name == "first.preflight-2"
    assert "reused_from" in open_run(second.run).step(1).manifest("rollouts").notes
    assert first.passed.tolist() == second.passed.tolist()
    # What is reused has not cost nothing.
    [one, two] = [found.numbers["cost"]["measured"]["generation_s"] for found in (first, second)]
    assert one == two > 0
    third, _, _ = look(tiny_run(*NAMED, "actor_rollout_ref.rollout.temperature=0.5"), 8)
    assert third.run.name == "first.preflight-3"
    assert "reused_from" not in open_run(third.run).step(1).manifest("rollouts").notes


def test_rewards_that_fail_are_counted_by_kind_and_do_not_end_it(tiny_run, tmp_path):
    (tmp_path / "broken.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if int(ground_truth) % 2:\n        raise ValueError('odd ones are not for me')\n    return 1.0\n"
    )
    broken = (f"custom_reward_function.path={tmp_path / 'broken.py'}", "reward.retries=0")
    found, _, _ = look(tiny_run(*NAMED, *broken, rows=16), 16)
    numbers = found.as_dict()
    assert (numbers["reward"]["ok"], numbers["reward"]["error"]) == (32, 32)
    [line] = numbers["reward"]["messages"]
    assert "odd ones are not for me" in line["message"] and line["responses"] == 32
    assert numbers["pass_rate"]["without_verdict"] == 8
    assert (numbers["solved"], numbers["dead"]) == (8, 0)


def test_kept_rows_are_the_rows_of_the_files_with_their_pass_rate(tiny_run, tmp_path):
    """Rows that are too long are not prompts: the kept ones are found behind them all the same."""
    cfg = tiny_run(*NAMED, "data.filter_overlong_prompts=true")
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    lines[3]["prompt"] = "Tom has 1 2 apples " * 40
    for i, line in enumerate(lines):
        line["topic"] = None if i % 3 else f"topic {i}"
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(line) for line in lines[:9]))
    table = [{**line, "pass_rate": 9.0} for line in lines[9:]]
    (tmp_path / "more.jsonl").write_text("\n".join(json.dumps(line) for line in table))
    cfg = load_config([tmp_path / "base.yaml"], [
        *NAMED, "data.filter_overlong_prompts=true",
        f"data.train_files=[{tmp_path / 'train.jsonl'},{tmp_path / 'more.jsonl'}]",
    ])  # fmt: skip
    found, data, _ = look(cfg, 100)
    assert len(found.prompt_index) == 15
    rate = dict(zip(data.rows[found.prompt_index].tolist(), found.rate.tolist(), strict=True))
    wanted = [{**lines[row], "pass_rate": rate[row]} for row in sorted(rate) if 0.2 <= rate[row] <= 0.8]
    path = tmp_path / "kept.parquet"
    said = write_kept(path, found, data, Keep(0.2, 0.8))
    assert pq.read_table(path).to_pylist() == wanted
    assert (said["rows"], said["of"]) == (len(wanted), 15) and 0 < len(wanted) < 15
    with pytest.raises(StorageError, match="nothing is overwritten"):
        write_kept(path, found, data, Keep(0.0, 1.0))
    assert pq.read_table(path).to_pylist() == wanted
    assert not list(tmp_path.glob(".*.aside"))
    trained = load_config([tmp_path / "base.yaml"], [f"data.train_files={path}", "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1"])  # fmt: skip
    assert run(trained)[0].finished_steps() == [1]


def test_a_preflight_is_not_taken_for_a_run_that_trains(tiny_run):
    found, _, _ = look(tiny_run(*NAMED), 8)
    with pytest.raises(StorageError, match="is a preflight"):
        resume_command(found.run, [], None, None)


def test_the_command_line_says_it_in_words_and_in_json_alone(tiny_run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_run(*NAMED)))
    kept = tmp_path / "kept.parquet"
    result = CliRunner().invoke(app, ["preflight", str(file), "--prompts", "8", "-o", str(kept), "--keep", "0..1"])
    assert result.exit_code == 0, result.output
    for text in ("8 prompts x 4 responses", "0, dead", "as sampled (rollout.n)", "estimate for one training step",
                 "it leaves out: log-probs", "8 of 8 rows are in"):  # fmt: skip
        assert text in result.stdout, text
    result = CliRunner().invoke(app, ["preflight", str(file), "--prompts", "8", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["prompts"], told["kept"]) == (8, None)
    refused = CliRunner().invoke(app, ["preflight", str(file), "-o", str(kept)])
    assert isinstance(refused.exception, StorageError) and "nothing is overwritten" in str(refused.exception)


def test_with_group_filtering_the_costs_count_the_calls_that_fill_a_batch(tiny_run):
    found, _, _ = look(tiny_run(*NAMED, "algorithm.filter_groups.enable=true"), 16)
    cost, signal = found.numbers["cost"], found.numbers["scores_differ"]
    assert 0 < signal < 1
    assert cost["generate_calls_per_step"] == pytest.approx(1 / signal)
    assert cost["per_step"]["responses"] == round(8 / signal) * 4


@pytest.mark.slow
def test_two_ranks_sample_a_preflight(tiny_run):
    """As many responses as one rank, in two parts, with the numbers of one rank up to rounding."""
    one, _, _ = look(tiny_run(*NAMED), 12)
    two_ranks = (
        "trainer.n_gpus_per_node=2",
        "trainer.experiment_name=two",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    )
    two, _, _ = look(tiny_run(*NAMED, *two_ranks), 12)
    view = open_run(two.run).step(1)
    assert len(view.manifest("rollouts").parts) == 2
    assert two.prompt_index.tolist() == one.prompt_index.tolist()
    assert two.verdicts.tolist() == [4] * 12


@pytest.mark.slow
def test_the_quickstart_has_prompts_worth_training_on(tmp_path):
    """The real recipe: its warm start is made first."""
    words = ["preflight", "quickstart", f"storage.root={tmp_path / 'runs'}", "orchestration.enabled=false"]
    result = CliRunner().invoke(app, [*words, "--prompts", "64", "--json", "-o", str(tmp_path / "kept.parquet")])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["prompts"], told["n"], told["responses"]) == (64, 8, 512)
    assert 0.1 < told["pass_rate"]["mean"] < 0.9
    shares = {share["k"]: share for share in told["signal"]}
    assert shares[2]["share"] < shares[4]["share"] < shares[8]["share"] < shares[32]["share"]
    assert (shares[8]["how"], shares[32]["how"]) == ("measured", "estimate")
    rate = pq.read_table(tmp_path / "kept.parquet")["pass_rate"].to_numpy()
    assert len(rate) == told["kept"]["rows"] and ((rate >= 0.05) & (rate <= 0.95)).all()
