"""Whole runs of a tiny real model on the CPU: what they leave on disk, what they refuse, how they go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tiny_runs import digest, run, tokens

from storage import Ragged, RunWriter, StorageError, build_table, open_run
from storage.checkpoints import checkpoints
from tasks.data import DataError
from tasks.engines import transformers_engine
from tasks.geometry import PlanError
from tasks.rewards.pool import RewardError
from tasks.stage import NonFiniteError, StageError
from tasks.workers.policy import PolicyWorker

TRAINING_STAGES = ["prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates"]


def test_the_batch_that_was_planned_is_printed_and_is_what_lies_on_disk(tiny_run):
    the_run, output = run(tiny_run("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"))
    assert "8 prompts x 4 = 32 sequences, 2 updates of 16 sequences in 8 micro-batches each; 2 steps" in output
    assert output.index("32 sequences") < output.index("step 1/2")
    plan = json.loads((the_run.root / "plan.json").read_text())
    assert (plan["prompts_per_step"], plan["sequences_per_step"], plan["optimizer_steps_per_step"]) == (8, 32, 2)
    for step in (1, 2):
        view = the_run.step(step)
        assert view.stages() == TRAINING_STAGES
        assert view.table("prompts").num_rows == 8
        for stage in ("rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages"):
            groups = view.table(stage)["group_id"].to_pylist()
            assert len(groups) == 32
            assert [groups.count(group) for group in dict.fromkeys(groups)] == [4] * 8
        updates = view.table("updates").to_pylist()
        assert [(row["sequences"], row["micro_batches"]) for row in updates] == [(16, 8), (16, 8)]
    assert len(list((the_run.root / "steps").glob("*/*/*/manifest.json"))) == 2 * 7


def test_every_artifact_says_what_it_was_made_from(tiny_run):
    the_run, _ = run(tiny_run())
    view = the_run.step(2)
    made = {stage: view.manifest(stage) for stage in TRAINING_STAGES}
    assert made["rollouts"].parents == {"prompts": made["prompts"].digest}
    assert made["advantages"].parents.keys() == {"rollouts", "rewards", "old_log_probs", "ref_log_probs"}
    assert {manifest.policy_version for manifest in made.values()} == {0, 1}
    assert made["rollouts"].notes["policy_digest"] == digest(the_run, 1)
    assert made["rollouts"].notes["temperature"] == 1.0
    assert {manifest.run_id for manifest in made.values()} == {the_run.run_id}
    assert digest(the_run, 1) != digest(the_run, 2)


def test_token_columns_have_the_length_of_their_response_and_ids_decode_to_the_text(tiny_run):
    cfg = tiny_run()
    the_run, _ = run(cfg)
    view = the_run.step(1)
    rollouts = view.table("rollouts")
    lengths = Ragged.from_arrow(rollouts["response_ids"]).lengths.tolist()
    for stage, column in (
        ("rollouts", "rollout_log_probs"),
        ("old_log_probs", "old_log_probs"),
        ("old_log_probs", "entropy"),
        ("ref_log_probs", "ref_log_probs"),
        ("advantages", "advantages"),
        ("advantages", "loss_mask"),
    ):
        assert Ragged.from_arrow(view.table(stage)[column]).lengths.tolist() == lengths, column
    from tasks.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.actor_rollout_ref.model)
    texts = tokenizer.batch_decode(tokens(the_run, 1), skip_special_tokens=True)
    assert texts == rollouts["response_text"].to_pylist()


def test_the_sampler_and_the_worker_agree_on_the_log_probs_at_any_temperature(tiny_run):
    the_run, _ = run(tiny_run("actor_rollout_ref.rollout.temperature=0.6", "actor_rollout_ref.rollout.top_p=0.9"))
    metrics = the_run.step(1).record["metrics"]
    assert metrics["training/rollout_log_probs_gap_max"] < 1e-4
    notes = the_run.step(1).manifest("rollouts").notes
    assert (notes["log_probs"], notes["temperature"], notes["filters"]) == ("processed", 0.6, "none")
    assert notes["sampled_with"] == "top_p=0.9"


@pytest.mark.parametrize("again", [1, 2])
def test_the_same_run_twice_gives_the_same_tokens_and_the_same_weights(tiny_run, again, tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    first, _ = run(tiny_run())
    second, _ = run(tiny_run(f"trainer.default_local_dir={folder / 'run'}"))
    assert tokens(first, 2) == tokens(second, 2)
    assert digest(first, 2) == digest(second, 2)


def test_another_seed_gives_other_prompts_and_other_tokens(tiny_run, tmp_path):
    first, _ = run(tiny_run())
    second, _ = run(tiny_run("trainer.seed=1", f"trainer.default_local_dir={tmp_path / 'other'}"))
    order = [the_run.step(1).table("prompts")["prompt_index"].to_pylist() for the_run in (first, second)]
    assert order[0] != order[1]
    assert tokens(first, 1) != tokens(second, 1)


# ---------------------------------------------------------------------------------------------- the end, and going on


def test_the_last_step_is_saved_once_whether_or_not_it_is_a_multiple_of_save_freq(tiny_run, tmp_path):
    seven = ["trainer.total_training_steps=100", "trainer.total_epochs=1", "data.train_batch_size=2"]
    small = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.save_freq=3"]
    the_run, output = run(tiny_run(*seven, *small, rows=14))
    assert the_run.finished_steps() == list(range(1, 8))
    assert [checkpoint.step for checkpoint in checkpoints(the_run.root)] == [3, 6, 7]
    assert "100" in output
    six = [*seven, *small, f"trainer.default_local_dir={tmp_path / 'six'}"]
    the_run, _ = run(tiny_run(*six, rows=12))
    assert [checkpoint.step for checkpoint in checkpoints(the_run.root)] == [3, 6]
    events = [event["step"] for event in the_run.events() if event["event"] == "checkpoint"]
    assert events == [3, 6]


def test_a_damaged_final_checkpoint_is_saved_again(tiny_run):
    the_run, _ = run(tiny_run())
    weights = the_run.root / "checkpoints" / "000002" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    _, output = run(tiny_run())
    assert "checkpoint 000002 is skipped" in output
    assert weights.read_bytes() == good


def test_only_the_newest_checkpoints_are_kept(tiny_run):
    steps = ["trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    the_run, _ = run(tiny_run(*steps))
    assert [checkpoint.step for checkpoint in checkpoints(the_run.root)] == [3, 4]


@pytest.mark.parametrize("save_freq", [-1, 1])
def test_a_run_that_is_asked_for_more_steps_goes_on_as_if_it_had_never_stopped(tiny_run, tmp_path, save_freq):
    options = [f"trainer.save_freq={save_freq}", "trainer.total_epochs=9"]
    whole, _ = run(tiny_run(*options, "trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path / 'w'}"))
    run(tiny_run(*options, "trainer.total_training_steps=2"))
    the_run, output = run(tiny_run(*options, "trainer.total_training_steps=4"))
    assert "found 2 finished steps" in output
    assert tokens(the_run, 4) == tokens(whole, 4)
    assert digest(the_run, 4) == digest(whole, 4)
    assert len(the_run.step(2).attempts("rollouts")) == 1


def test_a_run_killed_in_a_stage_goes_on_at_that_stage_and_ends_with_the_same_weights(tiny_run, tmp_path, monkeypatch):
    whole, _ = run(tiny_run(f"trainer.default_local_dir={tmp_path / 'w'}"))

    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("flows.step.advantage", die)
        with pytest.raises(Killed):
            run(tiny_run())
    with monkeypatch.context() as patch:
        patch.setattr("tasks.generate.sample_responses", die)
        the_run, _ = None, None
        with pytest.raises(Killed):  # step 2 samples; step 1 must not
            run(tiny_run())
    the_run, _ = run(tiny_run())
    assert [len(the_run.step(1).attempts(stage)) for stage in TRAINING_STAGES] == [1] * 7
    assert digest(the_run, 2) == digest(whole, 2)


def test_an_update_that_cannot_be_repeated_stops_the_run_and_says_where(tiny_run):
    """The record is made to say that the second optimizer step of step 1 once had another loss and another result."""
    the_run, _ = run(tiny_run("trainer.total_epochs=9"))
    shutil.rmtree(the_run.root / "checkpoints")
    view = the_run.step(1)
    table, made = view.table("updates"), view.manifest("updates")
    columns = {name: table[name].to_pylist() for name in table.column_names}
    columns["weights_digest"][1], columns["loss"][1] = "0" * 64, 7.0
    first = next(iter(made.notes["tensors"]))
    notes = {"tensors": {**made.notes["tensors"], first: "0" * 16}}
    with RunWriter(the_run.root) as writer:
        now = datetime.now(UTC)
        other = build_table("updates", columns)
        false = writer.commit(1, "updates", other, key="k", policy_version=0, started_at=now, notes=notes)
        writer.finish_step(1, {**view.record, "artifacts": {**view.record["artifacts"], "updates": false.digest}})
    where = rf"gives other weights from its optimizer step 1 on, first in {first} \(1 of \d+ tensors\)"
    with pytest.raises(StageError, match=where):
        run(tiny_run("trainer.total_training_steps=3", "trainer.total_epochs=9"))


def test_another_configuration_in_the_same_folder_is_refused_with_both_values(tiny_run):
    the_run, _ = run(tiny_run())
    before = (the_run.root / "ledger.jsonl").read_bytes()
    with pytest.raises(StorageError, match=r"rollout\.n: the run has 4, asked for is 2"):
        run(tiny_run("actor_rollout_ref.rollout.n=2"))
    assert (the_run.root / "ledger.jsonl").read_bytes() == before
    again, _ = run(tiny_run("actor_rollout_ref.rollout.n=2", "trainer.resume_mode=disable"))
    assert again.root.name == "run-2"


def test_other_content_behind_the_same_path_is_refused(tiny_run, tmp_path):
    more = ["trainer.total_training_steps=4", "trainer.total_epochs=9"]
    run(tiny_run("trainer.total_epochs=9"))
    cfg = tiny_run(*more)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(reversed(lines)))
    with pytest.raises(StorageError, match=r"data\.train_files: \w{12} then, \w{12} now"):
        run(cfg)
    the_run, _ = run(tiny_run(*more))
    assert the_run.finished_steps() == [1, 2, 3, 4]


def test_a_finished_run_says_so_and_trains_nothing(tiny_run):
    run(tiny_run())
    _, output = run(tiny_run())
    assert "all 2 steps are finished" in output


def test_a_signal_does_not_wait_for_rewards_that_hang(tiny_run, tmp_path):
    cfg = tiny_run("reward.timeout_s=600")
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    pathlib.Path({str(tmp_path / 'began')!r}).touch(); time.sleep(600)\n"
    )
    (tmp_path / "cfg.json").write_text(cfg.model_dump_json())
    process = subprocess.Popen([sys.executable, "-c", TRAIN, tmp_path / "cfg.json"], stdout=subprocess.DEVNULL)
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert open_run(tmp_path / "run").state == "killed"


TRAIN = (
    "import sys; from rich.console import Console; from tasks.config import RunConfig\n"
    "from flows.interrupts import polite_end\nfrom flows.train import run_training\n"
    "with polite_end(0, print): run_training(RunConfig.model_validate_json(open(sys.argv[1]).read()), Console())"
)


def test_a_signal_ends_the_run_cleanly_and_leaves_its_state(tiny_run, tmp_path):
    cfg = tiny_run("trainer.total_training_steps=500", "trainer.total_epochs=500")
    (tmp_path / "cfg.json").write_text(cfg.model_dump_json())
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, tmp_path / "cfg.json"], stdout=subprocess.PIPE, text=True, env=environment
    )
    for line in process.stdout:
        if line.startswith("step   2"):
            process.send_signal(signal.SIGTERM)
            break
    process.communicate(timeout=60)
    the_run = open_run(tmp_path / "run")
    assert process.returncode == 128 + signal.SIGTERM
    assert the_run.state == "killed"
    assert not list(the_run.root.rglob("*.aside"))
    assert all((folder / "manifest.json").exists() for folder in the_run.root.glob("steps/*/*/0*"))


# --------------------------------------------------------------------------------------------------- what is refused


def test_a_bad_plan_is_refused_before_anything_is_written(tiny_run):
    with pytest.raises(PlanError, match="ppo_mini_batch_size"):
        run(tiny_run("actor_rollout_ref.actor.ppo_mini_batch_size=32"))
    with pytest.raises(ValueError, match=r"this machine alone.*set ray.address=auto"):
        run(tiny_run("trainer.nnodes=2"))
    with pytest.raises(ValueError, match=r"no device samples\. Say how many do"):
        run(tiny_run("actor_rollout_ref.hybrid_engine=false"))
    cfg = tiny_run("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    with pytest.raises((PlanError, DataError), match="16"):
        run(cfg)
    assert not Path(cfg.trainer.default_local_dir).exists()


def test_a_nan_in_the_old_log_probs_is_refused_before_the_update_and_kept_aside(tiny_run, monkeypatch):
    original = PolicyWorker.log_probs

    def with_a_nan(self, seqs, micro, *, reference=False, **options):
        result = original(self, seqs, micro, reference=reference, **options)
        if self.policy_version == 1 and not reference:
            result.log_probs[5][2] = np.nan
        return result

    cfg = tiny_run("actor_rollout_ref.rollout.ignore_eos=true")
    monkeypatch.setattr(PolicyWorker, "log_probs", with_a_nan)
    where = (
        r"step 2, stage old_log_probs, column old_log_probs: nan at row 5, token 2 \(sample 000002-0001-001, group 0"
    )
    with pytest.raises(NonFiniteError, match=where):
        run(cfg)
    the_run = open_run(cfg.trainer.default_local_dir)
    assert the_run.step(2).stages() == ["prompts", "rollouts", "rewards"] or "updates" not in the_run.step(2).stages()
    refused = next((the_run.root / "quarantine").iterdir()) / "refused.arrow"
    with pa.ipc.open_file(str(refused)) as reader:
        assert np.isnan(reader.read_all()["old_log_probs"][5][2].as_py())
    assert the_run.state == "failed"
    monkeypatch.undo()
    the_run, _ = run(tiny_run("actor_rollout_ref.rollout.ignore_eos=true"))
    assert the_run.finished_steps() == [1, 2]


def test_a_group_whose_responses_are_all_the_same_stops_the_run(tiny_run, monkeypatch):
    monkeypatch.setattr("tasks.generate.sample_seed", lambda *_: 7)
    with pytest.raises(StageError, match="all 4 responses of every group are the same"):
        run(tiny_run())


def test_samples_of_a_group_have_different_seeds_and_duplicates_are_counted(tiny_run):
    the_run, _ = run(tiny_run())
    seeds = the_run.step(1).table("rollouts")["seed"].to_pylist()
    assert len(set(seeds)) == 32
    assert 0 <= the_run.step(1).record["metrics"]["rollout/duplicate_share"] < 1


def test_an_empty_response_gets_its_verdict_and_touches_no_token_of_others(tiny_run, monkeypatch):
    original = transformers_engine.TransformersEngine.generate

    def one_empty(self, prompts, group, seeds, sampling):
        responses = original(self, prompts, group, seeds, sampling)
        rows = [row if i != 3 else row[:0] for i, row in enumerate(responses.response_ids)]
        log_probs = [row if i != 3 else row[:0] for i, row in enumerate(responses.log_probs)]
        return type(responses)(
            Ragged.from_rows(rows, np.int32),
            Ragged.from_rows(log_probs, np.float32),
            responses.finish_reason,
            responses.notes,
        )

    monkeypatch.setattr(transformers_engine.TransformersEngine, "generate", one_empty)
    the_run, _ = run(tiny_run("trainer.total_training_steps=1"))
    row = the_run.step(1).table("advantages").to_pylist()[3]
    assert row["advantages"] == row["loss_mask"] == row["token_rewards"] == []
    assert row["no_signal"] == "empty response"
    first_group = the_run.step(1).table("rewards")["score"].to_pylist()[:4]
    advantages = the_run.step(1).table("advantages").to_pylist()[:3]
    mean, std = np.mean(first_group), np.std(first_group, ddof=1)
    for score, sample in zip(first_group, advantages, strict=False):
        want = 0.0 if std == 0 else (score - mean) / (std + 1e-6)
        assert sample["advantages"] == pytest.approx([want] * len(sample["advantages"]), abs=1e-5)
    assert the_run.step(1).record["metrics"]["response/empty"] == 1


# ------------------------------------------------------------------------------------------------------------ rewards


class Judge(ThreadingHTTPServer):
    """A judge that can be told to be out of order."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), JudgeHandler)
        self.down = True
        threading.Thread(target=self.serve_forever, daemon=True).start()


class JudgeHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if self.server.down else 200)
        self.end_headers()
        self.wfile.write(b"1.0")

    def log_message(self, *_):
        pass


def test_an_outage_of_the_judge_stops_the_step_and_the_generations_are_scored_later(tiny_run, tmp_path):
    judge = Judge()
    cfg = tiny_run("reward.retries=0", "reward.num_workers=2")
    (tmp_path / "reward.py").write_text(
        "import urllib.request\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    urllib.request.urlopen('http://127.0.0.1:{judge.server_port}/').read()\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    with pytest.raises(RewardError, match="503"):
        run(cfg)
    the_run = open_run(cfg.trainer.default_local_dir)
    assert "rollouts" in the_run.step(1).stages()
    assert "rewards" not in the_run.step(1).stages()
    kept = tokens(the_run, 1)
    judge.down = False
    the_run, _ = run(cfg)
    assert tokens(the_run, 1) == kept
    assert len(the_run.step(1).attempts("rollouts")) == 1
    assert set(the_run.step(1).table("rewards")["status"].to_pylist()) == {"ok"}
    judge.shutdown()


def test_a_reward_function_that_forgets_to_return_stops_the_run(tiny_run, tmp_path):
    cfg = tiny_run()
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): pass")
    with pytest.raises(RewardError, match="none of the 32 samples got a score"):
        run(cfg)


def test_a_mistake_that_is_found_before_the_first_step_leaves_no_run(tiny_run):
    cfg = tiny_run("custom_reward_function.name=nope")
    with pytest.raises(RewardError, match="nope"):
        run(cfg)
    assert not Path(cfg.trainer.default_local_dir).exists()


def test_a_change_that_does_not_concern_a_stage_leaves_its_artifact(tiny_run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("flows.step.advantage", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tiny_run())
    the_run, _ = run(tiny_run("actor_rollout_ref.rollout.val_kwargs.n=2", "data.val_files=null"))
    assert [len(the_run.step(1).attempts(stage)) for stage in TRAINING_STAGES] == [1] * 7


def test_a_sample_without_a_verdict_has_no_score_and_stays_out_of_the_loss(tiny_run, tmp_path):
    cfg = tiny_run("reward.max_error_share=0.5", "reward.retries=0", "trainer.total_training_steps=1")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if int(ground_truth) == 0: raise RuntimeError('no idea')\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    the_run, _ = run(cfg)
    rewards = the_run.step(1).table("rewards").to_pylist()
    advantages = the_run.step(1).table("advantages").to_pylist()
    silent = [i for i, row in enumerate(rewards) if row["status"] == "error"]
    if 0 in the_run.step(1).table("prompts")["prompt_index"].to_pylist():
        assert len(silent) == 4
    for i in silent:
        assert rewards[i]["score"] is None
        assert "no idea" in rewards[i]["message"]
        assert not any(advantages[i]["loss_mask"])
    means = the_run.step(1).record["metrics"]
    assert means["critic/score/mean"] == pytest.approx(np.mean([r["score"] for r in rewards if r["score"] is not None]))


# ------------------------------------------------------------------------------------------------------- variants run


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.model.dtype=bfloat16",
        "storage.compression=zstd",
    ],
)
def test_a_variant_trains_a_step(tiny_run, override):
    the_run, _ = run(tiny_run(override, "trainer.total_training_steps=1"))
    metrics = the_run.step(1).record["metrics"]
    assert np.isfinite(metrics["actor/grad_norm"])
    assert metrics["actor/grad_norm"] > 0


def test_kl_in_the_reward_is_subtracted_and_its_adaptive_weight_follows_from_the_step_before(tiny_run):
    kl = [
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.kl_ctrl.kl_coef=0.5",
    ]
    adaptive = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", "algorithm.kl_ctrl.target_kl=0.1"]
    the_run, _ = run(tiny_run(*kl, *adaptive, "actor_rollout_ref.actor.optim.lr=0.01"))
    first, second = (the_run.step(step).manifest("advantages").notes for step in (1, 2))
    assert first["kl_coef"] == 0.5
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    assert second["kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 32 / 100))
    assert second["kl"] != 0


def test_validation_is_part_of_the_step_and_before_training_it_is_step_0(tiny_run):
    the_run, output = run(tiny_run("trainer.val_before_train=true", "trainer.test_freq=2"))
    name = "val-core/toy/reward/mean@1"
    assert name in the_run.step(0).record["metrics"]
    assert name not in the_run.step(1).record["metrics"]
    assert name in the_run.step(2).record["metrics"]
    assert the_run.step(2).table("val_rollouts").num_rows == 4
    assert the_run.step(2).manifest("val_rollouts").policy_version == 2
    assert output.count("validation after step") == 2


def test_validation_of_a_finished_run_adds_to_its_last_step_and_takes_nothing_away(tiny_run):
    the_run, _ = run(tiny_run())
    before = the_run.step(2).record
    the_run, _ = run(tiny_run("trainer.val_only=true"))
    after = the_run.step(2).record
    assert before["artifacts"].items() <= after["artifacts"].items()
    assert before["metrics"].items() <= after["metrics"].items()
    assert "val_rewards" in after["artifacts"]


def test_validation_alone_trains_nothing(tiny_run):
    the_run, _ = run(tiny_run("trainer.val_only=true"))
    assert the_run.steps() == [0]


def test_metric_names_are_verls(tiny_run):
    the_run, _ = run(tiny_run())
    names = set(the_run.step(1).record["metrics"])
    assert {
        "critic/score/mean",
        "critic/rewards/mean",
        "critic/advantages/max",
        "response_length/clip_ratio",
        "prompt_length/mean",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/kl_loss",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_per_token_ms/gen",
        "perf/throughput",
        "training/global_step",
        "training/epoch",
        "group/mixed",
        "training/rollout_probs_diff_mean",
        "shape/rollouts/rows",
        "shape/updates/bytes",
    } <= names


def test_epochs_count_from_zero_and_each_takes_every_prompt_once(tiny_run):
    the_run, _ = run(tiny_run("trainer.total_training_steps=4"))
    taken = [the_run.step(step).table("prompts")["prompt_index"].to_pylist() for step in (1, 2, 3, 4)]
    assert sorted(taken[0] + taken[1]) == sorted(taken[2] + taken[3]) == list(range(16))
    assert [the_run.step(step).record["metrics"]["training/epoch"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("estimator", ["rloo", "gdpo", "maxrl", "opo", "reinforce_plus_plus_baseline"])
def test_an_estimator_trains_a_step(tiny_run, estimator):
    the_run, _ = run(tiny_run(f"algorithm.adv_estimator={estimator}", "trainer.total_training_steps=1"))
    assert the_run.step(1).record["metrics"]["actor/grad_norm"] > 0


@pytest.mark.parametrize("mode", ["gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "reinforce"])
def test_a_loss_trains_a_step(tiny_run, mode):
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"
    the_run, _ = run(tiny_run(loss, "trainer.total_training_steps=1"))
    assert the_run.step(1).record["metrics"]["actor/grad_norm"] > 0


def test_a_longer_run_is_refused_where_it_would_change_the_learning_rates_of_its_past(tiny_run):
    cosine = ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "trainer.total_epochs=9"]
    run(tiny_run(*cosine))
    with pytest.raises(StorageError, match=r"trainer\.total_training_steps: the run has 2, asked for is 4"):
        run(tiny_run(*cosine, "trainer.total_training_steps=4"))


def test_another_reward_function_on_the_way_is_allowed_and_said(tiny_run, tmp_path):
    run(tiny_run("trainer.total_epochs=9"))
    cfg = tiny_run("trainer.total_training_steps=3", "trainer.total_epochs=9")
    reward = tmp_path / "reward.py"
    reward.write_text(reward.read_text() + "# another version\n")
    the_run, output = run(cfg)
    assert "the source of the reward functions is another one since step 2" in output
    assert [event["event"] for event in the_run.events()].count("reward_functions") == 2
