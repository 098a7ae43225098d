"""Stages made again from what is stored: equal on the same machine, and an edited row found with its token."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from planted import copy_of, rewrite
from rich.console import Console
from tiny_runs import run
from typer.testing import CliRunner

from flows.audit.compare import Bound, compare_tables
from flows.audit.replay import Replayed, Replayer, replay_step
from flows.audit.replay.command import exit_code, replay_command
from flows.audit.replay.one_process import on_cpu_for_certain
from flows.cli import app
from flows.run_folder import GoBack
from storage import Ragged, RunWriter, StorageError, build_table, open_run
from storage.durable import sha256_json
from storage.retention import Retention, drop, what_to_drop
from tasks.config import RunConfig
from tasks.engines import transformers_engine

ONE_STEP = "trainer.total_training_steps=1"
TRAINED = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates")


@pytest.fixture(scope="module")
def trained(tiny_run_in, tmp_path_factory):
    """Three steps with a reference and two mini-batches, validated before and after; a checkpoint after the second."""
    make = tiny_run_in(tmp_path_factory.mktemp("replayed"))
    cfg = make(
        "trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.test_freq=3", "trainer.val_before_train=true"
    )
    return run(cfg)[0]


def verdicts(results):
    return {one.stage: one.verdict for one in results}


def all_equal(results):
    assert results
    assert verdicts(results) == dict.fromkeys(verdicts(results), "equal"), [
        (one.stage, one.first, one.why) for one in results
    ]
    return results


def files_of(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(folder).rglob("*")}


# -------------------------------------------------------------------------------------------------- on the same machine


def test_every_stage_of_every_step_is_equal_bit_for_bit(trained):
    with Replayer(trained) as replayer:
        found = {step: all_equal(replayer.step(step)) for step in (0, 1, 2, 3)}
    assert tuple(verdicts(found[1])) == TRAINED
    assert tuple(verdicts(found[3])) == (*TRAINED, "val_prompts", "val_rollouts", "val_rewards")
    assert tuple(verdicts(found[0])) == ("val_prompts", "val_rollouts", "val_rewards")
    assert all(one.measured == 0.0 and one.first is None and one.why == "" for one in found[2])


def test_the_policy_is_rebuilt_from_the_checkpoint_before_the_step_or_from_the_stored_updates(trained):
    said = []
    replay_step(trained, 3, ["update"], say=said.append)
    assert said == ["checkpoint 2"]
    said.clear()
    all_equal(replay_step(trained, 2, ["old_log_prob"], say=said.append))
    assert said[0].startswith("the initial weights, update 1 made again")


def test_steps_can_be_asked_for_backwards(trained):
    with Replayer(trained) as replayer:
        for step in (3, 2, 1):
            all_equal(replayer.step(step, ["rollouts"]))


def test_a_run_that_another_process_writes_is_only_read(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    with RunWriter(copied.root):
        before = files_of(copied.root)
        all_equal(replay_step(copied, 2, ["rollouts", "update", "rewards"]))
        assert files_of(copied.root) == before


def test_rewards_and_advantages_alone_load_no_tensor_library(trained):
    code = (
        "import sys\n"
        "from flows.audit.replay import replay_step\n"
        "from storage import open_run\n"
        "found = replay_step(open_run(sys.argv[1]), 2, ['rewards', 'advantages'])\n"
        "print([one.verdict for one in found], 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, trained.root], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['equal', 'equal'] False False"


# -------------------------------------------------------------------------------------------------------- planted edits


def in_token(column, row, token, change):
    """Change one token of one row; return a function for `rewrite`."""

    def edit(columns):
        columns[column][row][token] = change(columns[column][row][token])
        return columns

    return edit


def in_row(column, row, change):
    def edit(columns):
        columns[column][row] = change(columns[column][row])
        return columns

    return edit


EDITS = {
    "a sampled token": ("rollouts", "response_ids", 5, 2, lambda old: (old + 1) % 50),
    "a sampler's log-prob": ("rollouts", "rollout_log_probs", 7, 1, lambda old: old - 0.01),
    "an old log-prob": ("old_log_probs", "old_log_probs", 9, 3, lambda old: old - 0.01),
    "an entropy": ("old_log_probs", "entropy", 0, 0, lambda old: old + 0.01),
    "a reference's log-prob": ("ref_log_probs", "ref_log_probs", 31, 0, lambda old: old - 0.01),
    "an advantage": ("advantages", "advantages", 12, 1, lambda old: old + 0.5),
    "a loss mask": ("advantages", "loss_mask", 3, 0, lambda old: not old),
    "a prompt's token": ("prompts", "prompt_ids", 4, 2, lambda old: old + 1),
    "a score": ("rewards", "score", 6, None, lambda old: 1.0 - old),
    "a status": ("rewards", "status", 2, None, lambda _: "unparsed"),
    "a response's text": ("rollouts", "response_text", 8, None, lambda old: old + "x"),
    "a loss": ("updates", "loss", 1, None, lambda old: old + 0.5),
    "a gradient norm": ("updates", "grad_norm", 0, None, lambda old: old * 1.5),
    "a learning rate": ("updates", "lr", 1, None, lambda old: old * 1.000001),
    "a digest of weights": ("updates", "weights_digest", 1, None, lambda _: "0" * 64),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_row_whose_digests_all_fit_is_found_with_row_and_token(trained, tmp_path, name):
    stage, column, row, token, change = EDITS[name]
    copied = copy_of(trained, tmp_path)
    rewrite(copied, 1, stage, in_row(column, row, change) if token is None else in_token(column, row, token, change))
    (one,) = replay_step(copied, 1, [stage])
    table = trained.step(1).table(stage)
    key = next(key for key in ("sample_id", "group_id", "update_index") if key in table.column_names)
    assert (one.verdict, one.rows) == ("differs", 1)
    assert (one.first.row, one.first.column, one.first.token) == (str(table[key][row]), column, token)
    was = table[column][row].as_py() if token is None else table[column][row].as_py()[token]
    assert one.first.made == was
    assert one.first.stored == (pytest.approx(change(was)) if isinstance(was, float) else change(was))


def test_a_change_of_a_float32_s_last_digits_is_told_and_allowed(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    rewrite(copied, 1, "old_log_probs", in_token("old_log_probs", 9, 3, lambda old: old - 1e-5))
    (one,) = replay_step(copied, 1, ["old_log_probs"])
    assert (one.verdict, one.rows, one.first.token) == ("within tolerance", 1, 3)
    assert one.measured == pytest.approx(1e-5, rel=0.1) and one.tolerance == "0.001 nats (float32)"


def test_a_metric_that_is_not_that_of_the_rows_is_found(trained, tmp_path):
    copied = copy_of(trained, tmp_path)

    def change(manifest):
        manifest["metrics"]["critic/score/mean"] = 0.99

    rewrite(copied, 1, "advantages", None, manifest=change)
    (one,) = replay_step(copied, 1, ["advantages"])
    assert (one.verdict, one.first.row, one.first.column) == ("differs", "manifest", "metric critic/score/mean")


def test_rows_are_joined_by_their_ids_and_not_by_their_place(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    rewrite(copied, 1, "old_log_probs", lambda columns: {name: rows[::-1] for name, rows in columns.items()})
    all_equal(replay_step(copied, 1, ["old_log_probs"]))
    swapped = ("old_log_probs", "entropy")

    def swap(columns):
        for name in swapped:
            columns[name][0], columns[name][31] = columns[name][31], columns[name][0]
        return columns

    rewrite(copied, 1, "old_log_probs", swap)
    assert replay_step(copied, 1, ["old_log_probs"])[0].verdict == "differs"


def test_an_edit_does_not_spoil_what_comes_after_it_but_is_seen_there_too(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    rewrite(copied, 1, "rewards", in_row("score", 6, lambda old: 1.0 - old), cover=False)
    found = {one.stage: one for one in replay_step(copied, 1)}
    assert found["rewards"].verdict == found["advantages"].verdict == "differs"
    assert "it was made from another rewards (SHA-256" in found["advantages"].why
    assert [found[stage].verdict for stage in ("prompts", "rollouts", "old_log_probs", "updates")] == ["equal"] * 4


def test_rollouts_of_an_older_policy_differ(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    stale = trained.step(1).table("rollouts")

    def older(columns):
        names = ("response_ids", "response_text", "rollout_log_probs", "finish_reason")
        return {**columns, **{name: stale[name].to_pylist() for name in names}}

    rewrite(copied, 3, "rollouts", older)
    assert replay_step(copied, 3, ["generate"])[0].verdict == "differs"


def test_a_swapped_checkpoint_is_found_by_what_is_made_with_it(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    folder, other = (copied.root / "checkpoints" / name for name in ("000002", "000003"))
    values = json.loads((other / "manifest.json").read_text())
    for name in values["files"]:
        shutil.copy(other / name, folder / name)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "policy_version": 2}))
    text = (folder / "state.json").read_bytes()
    values["files"]["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    values = {name: value for name, value in values.items() if name != "checksum"} | {"step": 2, "policy_version": 2}
    (folder / "manifest.json").write_text(json.dumps({**values, "checksum": sha256_json(values)}))
    (one,) = replay_step(copied, 3, ["old_log_probs"])
    assert one.verdict == "differs" and "policy 2 here has other weights" in one.why


def test_without_its_checkpoint_a_policy_is_made_from_the_stored_updates(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    shutil.rmtree(copied.root / "checkpoints" / "000002")
    said = []
    all_equal(replay_step(copied, 3, ["old_log_probs"], say=said.append))
    assert "updates 1 to 2 made again" in said[-1]


def test_other_code_than_the_run_s_is_told_and_not_refused(trained, tmp_path):
    copied = copy_of(trained, tmp_path)

    def other_code(manifest):
        manifest["made_from"]["code"] = manifest["made_from"]["modules"]["tasks.advantage"] = "0" * 64

    rewrite(copied, 1, "advantages", None, manifest=other_code)
    (one,) = replay_step(copied, 1, ["advantages"])
    assert (one.verdict, one.why) == ("equal", "the code of tasks.advantage is another one")


# ------------------------------------------------------------------------------------------------------- what cannot be


def test_without_its_data_files_a_run_replays_all_but_prompts(trained, tmp_path):
    shown = io.StringIO()
    options = {"lineage": None, "device": "cpu", "trusts_code": False, "console": Console(file=shown, width=200)}
    gone = ["data.train_files=/nowhere/train.parquet"]
    assert replay_command(trained.root, 1, None, gone, as_json=False, **options) == 0
    assert "prompts" in shown.getvalue() and "/nowhere/train.parquet" in shown.getvalue()
    assert replay_command(trained.root, 1, ["prompts"], gone, as_json=False, **options) == 2
    results = replay_step(trained, 1, overrides=gone)
    assert verdicts(results) == {stage: "cannot" if stage == "prompts" else "equal" for stage in TRAINED}


def test_a_model_that_lies_elsewhere_now_can_be_named_and_another_one_is_refused(trained, tmp_path, tiny_model):
    place = trained.root.parent / "model"
    shutil.copytree(place, tmp_path / "moved")
    moved = f"actor_rollout_ref.model.path={tmp_path / 'moved'}"
    all_equal(replay_step(trained, 1, ["old_log_prob"], overrides=[moved]))
    from safetensors.numpy import load_file, save_file

    weights = load_file(tmp_path / "moved" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, tmp_path / "moved" / "model.safetensors", metadata={"format": "pt"})
    (one,) = replay_step(trained, 1, ["old_log_prob"], overrides=[moved])
    assert one.verdict == "cannot" and "holds other weights" in one.why


def test_rows_that_retention_has_dropped_are_told(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    with RunWriter(copied.root) as writer:
        drop(writer, what_to_drop(writer, Retention("last", 1), 3))
    found = replay_step(open_run(copied.root), 1)
    assert set(verdicts(found).values()) == {"cannot"}
    assert all("were dropped on" in one.why for one in found)
    assert exit_code(found, by_name=False) == 2
    all_equal(replay_step(open_run(copied.root), 3, ["update", "rewards"]))


def test_a_damaged_file_cannot_be_replayed_and_is_named(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    part = next(copied.step(1).used("old_log_probs").glob("part-*"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    found = {one.stage: one for one in replay_step(copied, 1, ["old_log_probs", "advantages", "rewards"])}
    assert verdicts(found.values()) == {"old_log_probs": "cannot", "rewards": "equal", "advantages": "cannot"}
    assert "has changed since it was committed" in found["advantages"].why


def test_a_step_that_is_still_open_is_replayed_as_far_as_it_is(tiny_run, monkeypatch):
    cfg = tiny_run(ONE_STEP)

    def refuse(*_):
        raise RuntimeError("no update today")

    with monkeypatch.context() as patch:
        patch.setattr("flows.step.update", refuse)
        with pytest.raises(RuntimeError, match="today"):
            run(cfg)
    the_run = open_run(cfg.trainer.default_local_dir)
    assert set(verdicts(all_equal(replay_step(the_run, 1)))) == set(TRAINED) - {"updates"}
    with pytest.raises(StorageError, match="has no updates; it has prompts"):
        replay_step(the_run, 1, ["update"])


def test_unknown_steps_and_stages_are_told_with_those_that_there_are(trained):
    with pytest.raises(StorageError, match=r"no step 9; it has steps \[0, 1, 2, 3\]"):
        replay_step(trained, 9)
    with pytest.raises(ValueError, match="no stage is called 'rewrad'"):
        replay_step(trained, 1, ["rewrad"])
    with pytest.raises(StorageError, match="has no greedy_rollouts"):
        replay_step(trained, 1, ["greedy_rollouts"])


def test_the_exit_code_says_whether_something_differs_and_whether_anything_was_compared():
    def result(verdict):
        return Replayed(1, "rewards", verdict)

    assert exit_code([result("equal"), result("within tolerance")], by_name=True) == 0
    assert exit_code([result("cannot"), result("differs")], by_name=True) == 6
    assert exit_code([result("cannot"), result("equal")], by_name=False) == 0
    assert exit_code([result("cannot"), result("equal")], by_name=True) == 2
    assert exit_code([result("cannot")], by_name=False) == 2


def test_the_command_prints_json_alone_and_exits_with_6_where_a_stage_differs(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    rewrite(copied, 2, "rewards", in_row("score", 6, lambda old: 1.0 - old))
    words = ["replay", str(copied.root), "--step", "2", "--stage", "reward", "--stage", "advantage"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 6, done.output
    rows = json.loads(done.stdout)
    assert [(row["stage"], row["verdict"]) for row in rows] == [("rewards", "differs"), ("advantages", "differs")]
    assert rows[0]["first"]["row"] == trained.step(2).table("rewards")["sample_id"][6].as_py()
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 6 and "1 row differs, first 000002-0001-002, score: stored" in shown.stdout


# ------------------------------------------------------------------------------------------------- runs of other kinds

VARIANTS = {
    "greedy baselines": ("algorithm.adv_estimator=remax",),
    "a LoRA adapter": ("actor_rollout_ref.model.lora_rank=2",),
    "the sampler's log-probs as the denominator": (
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
    ),
    "a token baseline": ("algorithm.adv_estimator=optimal_token_baseline",),
    "adaptive KL in the reward": (
        "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=10",
    ),
    "B87: temperature 0.6 and top-p": (
        "actor_rollout_ref.rollout.temperature=0.6",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
    ),
    "two passes over shuffled mini-batches": (
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    ),
    "bfloat16": ("actor_rollout_ref.model.dtype=bfloat16",),
    "compressed files": ("storage.compression=zstd",),
    "dynamic sampling": (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=6",
        "data.gen_batch_size=4",
    ),
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_second_step_of_other_kinds_of_runs_is_equal_too(tiny_run, kind):
    the_run, _ = run(tiny_run(*VARIANTS[kind]))
    found = all_equal(replay_step(the_run, 2))
    stages = list(verdicts(found))
    assert stages == the_run.step(2).stages()
    if kind == "dynamic sampling":
        assert {"prompts-01", "rollouts-01", "rewards-01"} < set(stages)
        (kept,), several = (replay_step(the_run, 2, [word]) for word in ("rewards", "reward"))
        assert kept.stage == "rewards" and [one.stage for one in several][:2] == ["rewards", "rewards-01"]
    if kind == "greedy baselines":
        assert {"greedy_rollouts", "greedy_rewards"} < set(stages)


def test_an_empty_response_replays(tiny_run, monkeypatch):
    """B28: it has no token for its reward, and shifts nobody else's."""
    original = transformers_engine.TransformersEngine.generate

    def one_empty(self, prompts, group, seeds, sampling):
        responses = original(self, prompts, group, seeds, sampling)
        rows, log_probs = (
            [row if i != 3 else row[:0] for i, row in enumerate(column)]
            for column in (responses.response_ids, responses.log_probs)
        )
        return type(responses)(
            Ragged.from_rows(rows, np.int32),
            Ragged.from_rows(log_probs, np.float32),
            responses.finish_reason,
            responses.notes,
        )

    with monkeypatch.context() as patch:
        patch.setattr(transformers_engine.TransformersEngine, "generate", one_empty)
        the_run, _ = run(tiny_run(ONE_STEP))
    assert the_run.step(1).table("rollouts")["response_ids"].to_pylist()[3] == []
    found = {one.stage: one for one in replay_step(the_run, 1)}
    (sampled,) = [found.pop("rollouts")]
    all_equal(found.values())
    # The engine itself never gives none: made again, the row has tokens.
    assert (sampled.verdict, sampled.rows, sampled.first.token, sampled.first.stored) == ("differs", 1, 0, None)


def test_samples_without_a_verdict_are_equal_and_those_that_timed_out_are_not_compared(tiny_run, tmp_path):
    cfg = tiny_run(ONE_STEP, "reward.timeout_s=0.5", "reward.retries=0", "reward.max_error_share=0.9")
    mark = tmp_path / "slow"
    (tmp_path / "reward.py").write_text(
        "import time, pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ground_truth in ('3', '5'):\n"
        "        raise ValueError('no rule')\n"
        f"    if ground_truth == '0' and pathlib.Path({str(mark)!r}).exists():\n"
        "        time.sleep(5)\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"shuffle": False})})
    mark.touch()
    the_run, _ = run(cfg)
    statuses = the_run.step(1).table("rewards")["status"].to_pylist()
    assert statuses.count("timeout") == 4 and statuses.count("error") == 8
    mark.unlink()
    found = {one.stage: one for one in replay_step(the_run, 1, ["rewards", "advantages", "updates"])}
    all_equal(found.values())
    assert found["rewards"].why == "4 samples that timed out are not compared"


def test_each_history_of_a_run_that_went_back_replays_under_its_own_configuration(tiny_run):
    run(tiny_run())
    cfg = tiny_run("actor_rollout_ref.actor.optim.lr=0.01", "trainer.test_freq=2")
    run(cfg, back=GoBack(1, "updates"))
    root = cfg.trainer.default_local_dir
    new, old = open_run(root), open_run(root, 1)
    assert new.step(1).table("updates")["lr"][0].as_py() == 10 * old.step(1).table("updates")["lr"][0].as_py()
    for step in (1, 2):
        all_equal(replay_step(old, step))
        all_equal(replay_step(new, step))


def test_the_device_of_a_run_on_any_device_is_the_one_that_its_artifacts_name(trained):
    manifest = trained.step(1).manifest("old_log_probs")
    anywhere = RunConfig.model_validate({"trainer": {"device": "auto"}})
    elsewhere = manifest.model_copy(update={"host": "another-host"})
    assert on_cpu_for_certain(anywhere, [elsewhere])
    conditions = json.loads(json.dumps(manifest.notes["conditions"]))
    conditions["ranks"][0][1]["device"] = "NVIDIA H200"
    on_gpu = elsewhere.model_copy(update={"notes": {"conditions": conditions}})
    assert not on_cpu_for_certain(anywhere, [elsewhere, on_gpu])
    assert not on_cpu_for_certain(anywhere, [elsewhere.model_copy(update={"notes": {}})])


def test_tokens_of_an_engine_that_is_not_here_are_judged_by_the_policy_s_log_probs(trained, tmp_path):
    other = ["actor_rollout_ref.rollout.name=vllm"]
    (one,) = replay_step(trained, 2, ["generate"], overrides=other)
    assert one.verdict == "within tolerance" and one.measured < 1e-4
    assert "cannot be sampled again; judged by the policy's log-probs" in one.why
    copied = copy_of(trained, tmp_path)
    rewrite(copied, 2, "rollouts", in_token("response_ids", 5, 2, lambda old: (old + 7) % 50))
    (one,) = replay_step(copied, 2, ["generate"], overrides=other)
    assert (one.verdict, one.first.row, one.first.token) == ("differs", "000002-0001-001", 2)


@pytest.mark.slow
def test_a_run_of_two_ranks_is_sampled_again_share_by_share_and_the_rest_is_equal_up_to_rounding(tiny_run):
    from tasks.workers.ray_cluster import ray_of

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with ray_of(None, 2, gpus=False):
            the_run, _ = run(tiny_run("trainer.n_gpus_per_node=2", "trainer.save_freq=1"))
    assert the_run.step(2).manifest("rollouts").shapes["ranks"] == 2
    found = {one.stage: one for one in replay_step(the_run, 2)}
    assert {one.verdict for one in found.values()} <= {"equal", "within tolerance"}
    assert [found[stage].verdict for stage in ("prompts", "rollouts", "rewards", "advantages")] == ["equal"] * 4


# ------------------------------------------------------------------------------------------------------------ comparing


def ref_table(rows, ids=None):
    ids = ids or [f"s{i}" for i in range(len(rows))]
    return build_table("ref_log_probs", {"sample_id": ids, "group_id": ["g"] * len(ids), "ref_log_probs": rows})


def test_the_first_row_beyond_the_bound_is_named_even_where_an_earlier_one_differs_within_it():
    stored, made = ref_table([[0.0, 1.0], [], [2.0, 3.0]]), ref_table([[0.0, 1.001], [], [2.0, 4.0]])
    found = compare_tables(stored, made, {"ref_log_probs": Bound(absolute=0.01)})
    assert (found.equal, found.allowed, found.rows) == (False, False, 1)
    assert (found.first.row, found.first.token, found.first.stored, found.first.made) == ("s2", 1, 3.0, 4.0)
    assert found.measured == 1.0
    wide = compare_tables(stored, made, {"ref_log_probs": Bound(absolute=1.0)})
    assert (wide.equal, wide.allowed, wide.rows, wide.first.row, wide.first.token) == (False, True, 2, "s0", 1)


def test_a_row_of_another_length_differs_at_the_first_token_that_one_side_lacks():
    found = compare_tables(ref_table([[0.5, 1.0, 2.0]]), ref_table([[0.5, 1.0]]), {"ref_log_probs": Bound(absolute=9)})
    assert (found.allowed, found.first.token, found.first.stored, found.first.made) == (False, 2, 2.0, None)
    found = compare_tables(ref_table([[]]), ref_table([[0.5]]), {})
    assert (found.first.token, found.first.stored, found.first.made) == (0, None, 0.5)


def test_a_missing_or_a_doubled_row_is_named():
    three, two = ref_table([[], [], []]), ref_table([[], []])
    found = compare_tables(three, two, {})
    assert (found.allowed, found.first.row, found.first.stored, found.first.made) == (False, "s2", "1 row", None)
    found = compare_tables(two, ref_table([[], [], []], ["s0", "s1", "s1"]), {})
    assert (found.first.row, found.first.stored, found.first.made) == ("s1", "1 row", "2 rows")


def test_no_bound_allows_what_is_not_finite_and_equal_bits_are_equal():
    wide = {"ref_log_probs": Bound(absolute=1e9)}
    nan, inf = float("nan"), float("inf")
    assert compare_tables(ref_table([[nan, inf]]), ref_table([[nan, inf]]), {}).equal
    assert not compare_tables(ref_table([[nan]]), ref_table([[1.0]]), wide).allowed
    assert not compare_tables(ref_table([[inf]]), ref_table([[1.0]]), wide).allowed
    zeros = compare_tables(ref_table([[0.0]]), ref_table([[-0.0]]), {})
    assert (zeros.equal, zeros.allowed, zeros.first.token) == (False, True, 0)


def test_nulls_differ_from_values_and_not_from_nulls():
    columns = [pa.field("sample_id", pa.large_string()), pa.field("score", pa.float64())]

    def table(scores):
        return pa.table({"sample_id": ["a", "b", "c"], "score": scores}, schema=pa.schema(columns))

    assert compare_tables(table([None, 1.0, None]), table([None, 1.0, None]), {}).equal
    found = compare_tables(table([None, 1.0, 2.0]), table([None, None, 2.0]), {"score": Bound(absolute=9)})
    assert (found.allowed, found.first.row, found.first.stored, found.first.made) == (False, "b", 1.0, None)
