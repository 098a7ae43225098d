"""`grpoflow verify`: a sound run passes every check, and planted faults are each found and named rightly."""

import json
import shutil
import sqlite3
from contextlib import closing

import pytest
from planted import (
    copy_of,
    drop_last_batch_from_footer,
    flip_byte,
    folder_of,
    rewrite,
    set_metric,
    tokens_of,
)
from tiny_runs import run as train
from typer.testing import CliRunner

from flows.audit.verify import CHECKS, verify
from flows.audit.verify.base import Row
from flows.audit.verify.step import Look
from flows.cli import app
from flows.run_folder import GoBack
from storage import RunWriter, open_run
from storage.durable import sha256_file, sha256_json

STAGES = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates")
KEEP_ONE = "trainer.max_actor_ckpt_to_keep=1"
STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=2")


@pytest.fixture(scope="module")
def sound(tiny_run_in, tmp_path_factory):
    """A run of three steps with validations, checkpoints, KL in the loss, and a real MLflow store."""
    folder = tmp_path_factory.mktemp("sound")
    cfg = tiny_run_in(folder)(*STEPS, "tracking.enabled=true", "trainer.val_before_train=true")
    return train(cfg)[0]


@pytest.fixture
def run(sound, tmp_path):
    """A copy of it to damage."""
    return copy_of(sound, tmp_path)


def report_of(run, **options):
    fresh = open_run(run.root)
    return verify(fresh, fresh.steps(), **options)


def failures(report):
    return {name: account.rows for name, account in report.accounts.items() if account.failures}


def first(report, check):
    """Step, stage, sample, token and words of the first row that a check names."""
    return report.accounts[check].rows[0]


def sample(run, step, row, stage="rollouts"):
    return run.step(step).table(stage)["sample_id"][row].as_py()


# --------------------------------------------------------------------------------------------------------- sound runs


def test_a_sound_run_passes_every_check_that_needs_no_policy(sound):
    report = report_of(sound, rescore=None)
    assert failures(report) == {}
    assert {check.name for check in CHECKS if report.result(check) != "ok"} == {"replay"}
    assert report.accounts["rewards"].compared == 3 * 32 + 3 * 4
    assert report.notes == []


def test_every_check_says_what_it_checks_and_what_it_tolerates():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.about.endswith(".") and check.tolerance for check in CHECKS)


def test_the_policy_is_rebuilt_and_log_probs_and_updates_are_made_again(sound):
    report = verify(sound, [1, 2], deep=True)
    assert failures(report) == {}
    assert report.accounts["replay"].compared == 6
    assert report.accounts["replay"].cannot == {}


VARIANTS = {
    "dynamic sampling": (
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=5",
        "actor_rollout_ref.rollout.n=2",
    ),
    "remax": ("algorithm.adv_estimator=remax",),
    "LoRA": ("actor_rollout_ref.model.lora_rank=4",),
    "KL in the reward": (
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=50",
        "actor_rollout_ref.actor.use_kl_loss=false",
    ),
    "token weights": ("algorithm.rollout_correction.rollout_is=token",),
    "bypass": ("algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"),
    "token baseline": ("algorithm.adv_estimator=optimal_token_baseline",),
    "another temperature": ("actor_rollout_ref.rollout.temperature=0.6", "actor_rollout_ref.rollout.top_p=0.9"),
    "several epochs": ("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=true"),
    "another loss": (
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ),
    "masks and shaping": (
        "actor_rollout_ref.actor.mask_truncated_responses=true",
        "reward_model.overlong_buffer.enable=true",
        "reward_model.overlong_buffer.len=2",
    ),
    "warm-up": (
        "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    ),
}


OFTEN = ("dynamic sampling", "remax", "LoRA", "KL in the reward")
"""Variants that are tried at every change; the others with the slow tests."""


@pytest.mark.parametrize(
    "variant", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS]
)
def test_sound_runs_of_every_kind_pass(tiny_run, variant):
    run, _ = train(tiny_run(*VARIANTS[variant], "trainer.test_freq=1", "trainer.save_freq=1"))
    report = report_of(run)
    assert failures(report) == {}
    assert report.accounts["advantages"].compared > 0
    assert report.accounts["losses"].compared > 0 or variant == "bypass"


def test_rewards_without_a_verdict_pass(tiny_run, tmp_path):
    cfg = tiny_run("reward.max_error_share=1.0", "reward.retries=0")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ord((solution_str or 'a')[0]) % 5 == 0:\n"
        "        raise ValueError('odd')\n"
        "    if ord((solution_str or 'a')[0]) % 5 == 1:\n"
        "        return None\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    run, _ = train(cfg)
    statuses = set(run.step(1).table("rewards")["status"].to_pylist())
    assert statuses == {"ok", "error", "not_applicable"}
    assert failures(report_of(run, rescore=None)) == {}


def test_a_run_that_went_back_passes_in_all_its_histories(tiny_run):
    train(tiny_run(*STEPS))
    run, _ = train(tiny_run(*STEPS, "actor_rollout_ref.actor.optim.lr=5e-3"), back=GoBack(2, "advantages"))
    assert run.lineage == 2
    for lineage in (1, 2):
        one = open_run(run.root, lineage=lineage)
        assert failures(verify(one, one.steps())) == {}
        told = CliRunner().invoke(app, ["verify", f"{run.root}#{lineage}", "--steps", "3", "--json"])
        assert json.loads(told.stdout)["lineage"] == lineage
    path = run.root / "lineages/0002.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    report = report_of(run)
    assert first(report, "documents").what == "lineages/0002.json says step 1, the ledger 2"
    path.unlink()
    report = report_of(run)
    assert first(report, "documents").what == "lineages/0002.json is missing: the ledger tells of lineage 2"
    assert "the check could not be made" not in str(failures(report))


def test_rows_that_retention_let_go_are_not_kept_and_no_failure(tiny_run):
    run, _ = train(tiny_run(*STEPS, "storage.retention.keep=last", "storage.retention.steps=1", KEEP_ONE))
    report = report_of(run)
    assert failures(report) == {}
    assert any("not kept" in why for why in report.accounts["files"].cannot)


def test_rows_that_retention_compressed_are_read_and_checked(tiny_run):
    run, _ = train(tiny_run(*STEPS, "storage.retention.compress=true", KEEP_ONE))
    assert list(run.root.rglob("*.zst"))
    assert failures(report_of(run)) == {}
    flip_byte(next((run.root / "steps/000001/rewards").rglob("*.zst")))
    report = report_of(run)
    assert list(failures(report)) == ["files"]
    assert first(report, "files").stage == "rewards"


def test_damage_and_refusals_that_the_run_went_through_are_told_and_no_failure(run):
    with RunWriter(run.root) as writer:
        writer.append("damaged", step=2, stage="rewards", attempt="0001", reason="it was cut")
        writer.quarantine(3, "advantages", run.step(3).table("advantages"), "a NaN")
    report = report_of(run)
    assert failures(report) == {}
    assert [note.split(" at ")[0] for note in report.notes] == [
        "step 2: rewards was found damaged",
        "step 3: advantages was refused",
    ]


# ------------------------------------------------------------------------------------------------------------ the files


def test_a_flipped_byte_in_any_kind_of_artifact_is_found_and_named(run):
    kinds = [*STAGES, "val_prompts", "val_rollouts", "val_rewards"]
    for stage in kinds:
        flip_byte(folder_of(run, 2, stage) / "part-00000.arrow")
    report = report_of(run)
    assert list(failures(report)) == ["files"]
    rows = report.accounts["files"].rows
    assert {(row.step, row.stage) for row in rows} == {(2, stage) for stage in kinds}
    assert all("has changed since it was committed" in row.what for row in rows)


def test_a_flipped_byte_in_a_manifest_is_found(run):
    path = folder_of(run, 2, "rewards") / "manifest.json"
    path.write_text(path.read_text().replace('"rows": 32', '"rows": 31', 1))
    report = report_of(run)
    assert list(failures(report)) == ["files"]
    assert (first(report, "files").stage, "checksum" in first(report, "files").what) == ("rewards", True)


def test_a_changed_configuration_file_is_found(run):
    path = run.root / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002"))
    report = report_of(run)
    assert list(failures(report)) == ["documents"]
    assert "config.yaml has SHA-256" in first(report, "documents").what


def test_a_number_changed_in_the_step_record_is_found(run):
    path = run.record_path(2)
    record = json.loads(path.read_text())
    record["metrics"]["critic/score/mean"] += 0.25
    path.write_text(json.dumps(record))
    report = report_of(run)
    assert list(failures(report)) == ["step.json", "MLflow"]
    assert "critic/score/mean" in first(report, "step.json").what


@pytest.mark.parametrize("text", ["", "\0\0", "[]", "{}", '{"metrics": 3, "artifacts": {}}'])
def test_a_step_record_that_cannot_be_read_is_a_failure(run, text):
    run.record_path(2).write_text(text)
    report = report_of(run)
    assert list(failures(report)) == ["files"]
    row = first(report, "files")
    assert row.step == 2
    assert "step.json is damaged" in row.what


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("plan.json", None, "plan.json is missing"),
        ("inputs.json", None, "inputs.json is missing"),
        ("ledger.jsonl", None, "ledger.jsonl is missing"),
        ("inputs.json", "{}", "inputs.json is damaged: it has no digests"),
        ("tracking.json", "[]", "tracking.json is damaged: it is no JSON object"),
        ("tracking.json", "", "tracking.json is damaged: Expecting value"),
    ],
)
def test_a_document_that_is_gone_or_cannot_be_read_is_named(run, name, text, told):
    (run.root / name).unlink()
    if text is not None:
        (run.root / name).write_text(text)
    report = report_of(run)
    assert list(failures(report)) == ["documents"]
    assert first(report, "documents").what.startswith(told)


def test_rows_that_a_running_run_lets_go_meanwhile_are_no_failure(run, monkeypatch):
    """Retention drops a step's rows between two checks that read them."""
    folder = folder_of(run, 2, "val_prompts")
    make, checked = Look.table, []

    def table(look, stage):
        found = make(look, stage)
        if (look.step, stage) == (2, "val_prompts") and not checked:
            checked.append(stage)
            (folder / "dropped.json").write_text('{"at": "now", "why": "storage.retention keeps the last step"}')
            for part in folder.glob("part-*"):
                part.unlink()
        return found

    monkeypatch.setattr(Look, "table", table)
    report = report_of(run)
    assert failures(report) == {}
    assert any("was let go by storage.retention meanwhile" in why for why in report.accounts["rewards"].cannot)


def test_a_checkpoint_that_a_running_run_lets_go_meanwhile_is_no_failure(run, monkeypatch):
    from flows.audit.verify import policy

    check = policy.check_checkpoint

    def gone(checkpoint):
        if checkpoint.step == 1:
            shutil.rmtree(checkpoint.folder)
        check(checkpoint)

    monkeypatch.setattr(policy, "check_checkpoint", gone)
    report = report_of(run)
    assert failures(report) == {}
    assert list(report.accounts["checkpoints"].cannot) == ["the run has let this checkpoint go meanwhile"]


def test_b96_a_truncated_footer_is_found(run):
    path = folder_of(run, 2, "rewards") / "part-00000.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    report = report_of(run)
    assert list(failures(report)) == ["files"]
    assert "bytes but was committed with" in first(report, "files").what


def test_b96_a_batch_that_the_footer_does_not_list_is_found_though_all_digests_fit(run):
    drop_last_batch_from_footer(folder_of(run, 2, "rewards"))
    report = report_of(run)
    assert "its footer lists 16 rows, the file holds 32" in first(report, "files").what
    assert first(report, "files").stage == "rewards"
    assert {"files", "parents", "ids"} <= set(failures(report))


@pytest.mark.parametrize("stage", ["rollouts", "rewards", "updates"])
def test_b42_a_deleted_stage_of_a_finished_step_is_missing(run, stage):
    shutil.rmtree(run.step(2).folder / stage)
    report = report_of(run)
    assert list(failures(report)) == ["stages"]
    assert first(report, "stages") == Row(f"{stage} is missing though the step is finished", 2, stage)


def test_b42_an_open_step_is_shown_with_what_is_missing_and_does_not_fail(run):
    run.record_path(3).unlink()
    for stage in ("advantages", "updates", "val_prompts", "val_rollouts", "val_rewards"):
        shutil.rmtree(run.step(3).folder / stage)
    for checkpoint in (run.root / "checkpoints").glob("000003"):
        shutil.rmtree(checkpoint)
    report = report_of(run)
    assert failures(report) == {}
    open_step = [note for note in report.notes if "step 3 is open" in note]
    assert len(open_step) == 1
    assert open_step[0].endswith("missing: advantages, updates")


def test_a_missing_step_in_the_middle_is_found(run):
    shutil.rmtree(run.step(2).folder)
    report = report_of(run)
    assert "step 2 is missing though step 3 is finished" in [row.what for row in report.accounts["stages"].rows]


# --------------------------------------------------------------------------------------- faults under fitting digests


def edit(column, row, value):
    """Change one value of a column."""

    def change(columns):
        columns[column][row] = value(columns[column][row]) if callable(value) else value
        return columns

    return change


def test_an_artifact_written_anew_without_a_change_passes(run):
    for stage in STAGES:
        rewrite(run, 2, stage, lambda columns: columns)
    assert set(failures(report_of(run))) <= {"MLflow"}  # sizes of files may differ, and MLflow has those of before


def test_an_edited_reward_with_fresh_digests_is_found_by_scoring_again(run):
    edited = sample(run, 2, 5, "rewards")

    def change(columns):
        columns["score"][5] = 1.0 - columns["score"][5]
        columns["parts"][5] = [(name, 1.0 - value) for name, value in columns["parts"][5]]
        return columns

    rewrite(run, 2, "rewards", change)
    report = report_of(run, rescore=None)
    assert {row.sample_id for row in report.accounts["rewards"].rows} == {edited}
    assert "scored again it is" in first(report, "rewards").what
    assert set(failures(report)) - {"MLflow"} == {"rewards", "advantages", "metrics"}


def test_an_edited_score_that_is_not_the_sum_of_its_parts_is_found_without_calling_a_function(run):
    rewrite(run, 2, "rewards", edit("score", 5, lambda score: score + 0.5))
    report = report_of(run, rescore=0)
    assert first(report, "scores").sample_id == sample(run, 2, 5, "rewards")
    assert "rewards" not in failures(report)


def test_an_artifact_that_was_exchanged_is_found_by_what_was_made_from_it(run):
    rewrite(run, 2, "rewards", edit("message", 5, "hello"), cover=False)
    report = report_of(run)
    assert set(failures(report)) == {"parents", "step.json"}
    assert "shape/rewards/bytes" in first(report, "step.json").what
    assert {(row.stage, row.step) for row in report.accounts["parents"].rows} == {("advantages", 2), ("rewards", 2)}


def test_rows_swapped_between_stages_are_named(run):
    """Two samples with as many tokens have each other's log-probs."""
    lengths = [len(row) for row in tokens_of(run, 2)]
    ids = tokens_of(run, 2)
    one = 0
    other = next(i for i in range(1, 32) if lengths[i] == lengths[0] and ids[i] != ids[0])

    def swap(columns):
        names = ("old_log_probs", "entropy")
        for name in names:
            columns[name][one], columns[name][other] = columns[name][other], columns[name][one]
        return columns

    rewrite(run, 2, "old_log_probs", swap)
    report = report_of(run)
    rows = report.accounts["rows"].rows
    assert {(row.stage, row.sample_id) for row in rows} == {
        ("old_log_probs", sample(run, 2, one)),
        ("old_log_probs", sample(run, 2, other)),
    }
    assert "rows have changed places" in rows[0].what


@pytest.mark.parametrize(("by", "where"), [(1, "behind"), (-1, "before")])
def test_log_probs_that_stand_one_token_off_are_named_as_that(run, by, where):
    def shift(columns):
        columns["old_log_probs"] = [row[by:] + row[:by] for row in columns["old_log_probs"]]
        return columns

    rewrite(run, 2, "old_log_probs", shift)
    report = report_of(run)
    told = {row.what for row in report.accounts["rows"].rows}
    assert told == {f"its log-probs are those of the token {where}"}


def test_ids_swapped_between_groups_are_named(run):
    def swap(columns):
        columns["sample_id"][0], columns["sample_id"][4] = columns["sample_id"][4], columns["sample_id"][0]
        return columns

    rewrite(run, 2, "rewards", swap)
    report = report_of(run, rescore=None)
    rows = report.accounts["ids"].rows
    assert {(row.stage, row.sample_id) for row in rows} == {("rewards", sample(run, 2, i)) for i in (0, 4)}
    assert "it is in group" in rows[0].what


def test_responses_swapped_between_samples_are_named_by_their_random_streams(run):
    def swap(columns):
        for name in set(columns) - {"sample_id", "group_id", "sample_index"}:
            columns[name][0], columns[name][1] = columns[name][1], columns[name][0]
        return columns

    rewrite(run, 2, "rollouts", swap)
    report = report_of(run)
    assert {row.sample_id for row in report.accounts["seeds"].rows} == {sample(run, 2, 0), sample(run, 2, 1)}


def test_a_sample_that_is_there_twice_and_one_that_is_gone_are_named(run):
    rewrite(run, 2, "rewards", edit("sample_id", 3, sample(run, 2, 2)))
    report = report_of(run)
    words = {row.what: row.sample_id for row in report.accounts["ids"].rows}
    assert words["sample_id is there 2 times"] == sample(run, 2, 2)
    assert words["it is in rollouts and not here"] == sample(run, 2, 3)


def test_an_off_by_one_mask_is_named_to_the_token(run):
    masks = tokens_of(run, 2, "advantages", "loss_mask")
    row = next(i for i, mask in enumerate(masks) if len(mask) > 2 and all(mask))
    rewrite(run, 2, "advantages", edit("loss_mask", row, lambda mask: [*mask[:-1], False]))
    report = report_of(run)
    found = report.accounts["loss masks"].rows
    assert [(one.step, one.stage, one.sample_id, one.token) for one in found] == [
        (2, "advantages", sample(run, 2, row), len(masks[row]) - 1)
    ]
    assert "advantages" not in failures(report)
    assert "tokens is" in first(report, "mini-batches").what


def test_an_edited_advantage_is_named_to_the_token(run):
    rewrite(run, 2, "advantages", edit("advantages", 7, lambda row: [row[0], row[1] + 0.01, *row[2:]]))
    report = report_of(run)
    found = first(report, "advantages")
    assert (found.sample_id, found.token) == (sample(run, 2, 7), 1)


def test_values_of_the_wrong_length_and_values_that_are_no_numbers_are_named(run):
    rewrite(run, 2, "ref_log_probs", edit("ref_log_probs", 1, lambda row: row[:-1]))
    rewrite(run, 3, "old_log_probs", edit("entropy", 2, lambda row: [float("nan"), *row[1:]]))
    report = report_of(run)
    assert (first(report, "lengths").stage, first(report, "lengths").sample_id) == ("ref_log_probs", sample(run, 2, 1))
    found = first(report, "finite")
    assert (found.step, found.stage, found.sample_id, found.token) == (3, "old_log_probs", sample(run, 3, 2), 0)


def test_rollouts_from_an_older_policy_are_named(run):
    older = json.loads((folder_of(run, 2, "rollouts") / "manifest.json").read_text())["notes"]["policy_digest"]
    rewrite(run, 3, "rollouts", None, manifest=lambda values: values["notes"].update(policy_digest=older))
    report = report_of(run)
    assert list(failures(report)) == ["policy"]
    row = first(report, "policy")
    assert (row.step, row.stage) == (3, "rollouts")
    assert row.what.startswith(f"sampled from weights {older[:12]}, those of policy 2 are")


def test_a_single_sample_of_an_older_policy_is_named(run):
    rewrite(run, 3, "rollouts", edit("policy_version", 9, 1))
    report = report_of(run)
    assert (first(report, "policy").sample_id, first(report, "policy").what) == (
        sample(run, 3, 9),
        "it was sampled from policy 1, this step samples from 2",
    )


def test_a_retokenised_response_is_named(run):
    """A response becomes the ids of its text: the end token is gone, and with it the fit to the log-probs."""
    from flows.run_folder import config_of
    from tasks.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config_of(run, 1).actor_rollout_ref.model)
    table = run.step(2).table("rollouts")
    texts, reasons = table["response_text"].to_pylist(), table["finish_reason"].to_pylist()
    again = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids = tokens_of(run, 2)
    row = next((i for i in range(32) if again[i] != ids[i] and again[i] and reasons[i] == "length"), None)
    row = next(i for i in range(32) if again[i] != ids[i] and again[i]) if row is None else row
    rewrite(run, 2, "rollouts", edit("response_ids", row, again[row]))
    report = report_of(run)
    assert [found.sample_id for found in report.accounts["retokenised"].rows] == [sample(run, 2, row)]
    assert "its text encoded again" in first(report, "retokenised").what


def test_a_text_that_its_ids_do_not_decode_to_is_named(run):
    rewrite(run, 2, "rollouts", edit("response_text", 3, "another answer"))
    report = report_of(run)
    assert first(report, "text").sample_id == sample(run, 2, 3)


def test_a_token_id_that_is_none_is_named_to_the_token(run):
    row = next(i for i, ids in enumerate(tokens_of(run, 2)) if len(ids) > 2)
    rewrite(run, 2, "rollouts", edit("response_ids", row, lambda ids: [ids[0], -5, *ids[2:]]))
    found = first(report_of(run), "text")
    assert (found.stage, found.sample_id, found.token) == ("rollouts", sample(run, 2, row), 1)
    assert found.what == "token id -5 is none"


def test_a_response_that_is_said_to_have_stopped_without_an_end_token_is_named(run):
    reasons = run.step(2).table("rollouts")["finish_reason"].to_pylist()
    row = reasons.index("length")
    rewrite(run, 2, "rollouts", edit("finish_reason", row, "stop"))
    report = report_of(run)
    assert first(report, "endings").sample_id == sample(run, 2, row)
    assert "no end token" in first(report, "endings").what


def test_prompts_that_are_not_the_files_rows_and_files_that_have_changed_are_told_apart(run, sound):
    rewrite(run, 2, "prompts", edit("ground_truth", 1, '"99"'))
    report = report_of(run)
    assert "ground_truth is" in first(report, "prompts").what
    data = sound.root.parent / "train.jsonl"
    text = data.read_text()
    try:
        data.write_text(text.replace("apples", "pears"))
        report = report_of(run)
        assert "prompts" not in failures(report)
        assert any("have changed" in why for why in report.accounts["prompts"].cannot)
    finally:
        data.write_text(text)


def test_prompts_out_of_their_turn_are_named(run):
    other = run.step(1).table("prompts").to_pydict()
    rewrite(run, 2, "prompts", lambda columns: {**other, "group_id": columns["group_id"]})
    report = report_of(run)
    assert "its turn was row" in first(report, "prompts").what


def test_a_loss_that_does_not_follow_from_the_batch_is_named(run):
    rewrite(run, 2, "updates", edit("pg_loss", 0, lambda loss: loss + 0.01))
    report = report_of(run)
    assert "update 0: pg_loss is" in first(report, "losses").what
    rewrite(run, 3, "updates", edit("lr", 1, 0.5))
    report = report_of(run)
    assert first(report, "learning rate").what.startswith("update 1: lr is 0.5, the schedule has 0.001")


def test_log_probs_of_another_policy_are_found_by_making_them_again(run):
    """The sampler's are changed along with them, so that the two still agree."""
    nudge = lambda row: [value - 0.05 for value in row]  # noqa: E731
    rewrite(run, 2, "rollouts", edit("rollout_log_probs", 4, nudge))
    rewrite(run, 2, "old_log_probs", edit("old_log_probs", 4, nudge))
    fresh = open_run(run.root)
    report = verify(fresh, [2], deep=True)
    row = report.accounts["replay"].rows[0]
    assert (row.stage, row.sample_id, row.token) == ("old_log_probs", sample(run, 2, 4), 0)


# --------------------------------------------------------------------------------------------- checkpoints and MLflow


def remake(folder, **values):
    """Give a checkpoint's folder a manifest whose digests fit its files."""
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **values}
    manifest.pop("checksum", None)
    for name in manifest["files"]:
        file = folder / name
        manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    path.write_text(json.dumps({**manifest, "checksum": sha256_json(manifest)}))


def test_checkpoints_that_have_changed_places_are_found(run):
    two, three = (run.root / "checkpoints" / name for name in ("000002", "000003"))
    two.rename(two.with_name("x"))
    three.rename(two)
    two.with_name("x").rename(three)
    report = report_of(run)
    assert list(failures(report)) == ["checkpoints"]
    assert "which its folder's name does not say" in first(report, "checkpoints").what


def test_a_checkpoint_with_the_weights_of_another_step_is_found_though_its_digests_fit(run):
    two, three = (run.root / "checkpoints" / name for name in ("000002", "000003"))
    shutil.copy(two / "model.safetensors", three / "model.safetensors")
    state = json.loads((three / "state.json").read_text())
    state["weights_digest"] = json.loads((two / "state.json").read_text())["weights_digest"]
    (three / "state.json").write_text(json.dumps(state))
    remake(three, weights_digest=state["weights_digest"])
    report = report_of(run)
    assert list(failures(report)) == ["checkpoints"]
    row = first(report, "checkpoints")
    assert row.step == 3
    assert "it does not hold the weights that update 3 has made" in row.what


def test_a_checkpoint_of_another_run_is_found(run):
    remake(run.root / "checkpoints/000002", run_id="another-run")
    report = report_of(run)
    assert [row.what for row in report.accounts["checkpoints"].rows] == ["checkpoint 000002: it is of run another-run"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_in_the_shards_of_several_ranks_have_the_digests_of_whole_ones(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from flows.audit.verify.policy import tensor_digests

    tensors = {
        "b.weight": torch.randn(3, 2),
        "a.weight": torch.ones(4, dtype=torch.bfloat16),
        "a.weight:step": torch.ones(1),
    }
    for name in ("whole", "shards"):
        (tmp_path / name).mkdir()
    save_file({name: tensors[name] for name in ("a.weight", "b.weight")}, tmp_path / "whole/model.safetensors")
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "shards"), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    whole, shards = (tensor_digests(tmp_path / name) for name in ("whole", "shards"))
    assert whole == shards
    assert list(whole) == ["a.weight", "b.weight"]


def test_a_flipped_byte_in_a_checkpoint_is_found(run):
    flip_byte(run.root / "checkpoints/000002/model.safetensors")
    report = report_of(run)
    assert list(failures(report)) == ["checkpoints"]
    assert "model.safetensors has changed since it was committed" in first(report, "checkpoints").what


def test_a_metric_changed_in_mlflow_is_named(run):
    set_metric(run, "critic/score/mean", 2, 0.875)
    report = report_of(run)
    assert list(failures(report)) == ["MLflow"]
    row = first(report, "MLflow")
    assert row.step == 2
    assert row.what.startswith("critic/score/mean is 0.875 in MLflow, ")


def test_a_metric_logged_a_second_time_is_named(run):
    from mlflow import MlflowClient

    uri = json.loads((run.root / "tracking.json").read_text())["uri"]
    lines = [json.loads(line) for line in (run.root / "tracking.jsonl").read_text().splitlines()]
    mlflow_run = next(line["mlflow_run"] for line in lines if "mlflow_run" in line)
    MlflowClient(tracking_uri=uri).log_metric(mlflow_run, "actor/grad_norm", 99.0, step=3)
    report = report_of(run)
    assert [(row.step, row.what.split(" in MLflow")[0]) for row in report.accounts["MLflow"].rows] == [
        (3, "actor/grad_norm is 99.0")
    ]


def test_a_value_of_a_step_that_the_run_has_not_made_is_named(run):
    from mlflow import MlflowClient

    uri = json.loads((run.root / "tracking.json").read_text())["uri"]
    lines = [json.loads(line) for line in (run.root / "tracking.jsonl").read_text().splitlines()]
    mlflow_run = next(line["mlflow_run"] for line in lines if "mlflow_run" in line)
    MlflowClient(tracking_uri=uri).log_metric(mlflow_run, "critic/score/mean", 1.0, step=9)
    rows = report_of(run).accounts["MLflow"].rows
    assert [(row.step, row.what) for row in rows] == [
        (9, "critic/score/mean is 1.0 in MLflow, and the run has no such step")
    ]


def test_a_store_that_others_hold_is_no_failure_and_a_damaged_one_is_named(run, tmp_path):
    store = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("begin exclusive")
        report = report_of(run)
    assert failures(report) == {}
    assert list(report.accounts["MLflow"].cannot) == ["MLflow's store does not answer: database is locked"]
    store.write_bytes(b"no database" * 1000)
    report = report_of(run)
    assert first(report, "MLflow").what == "MLflow's store is damaged: file is not a database"


def test_an_empty_store_is_not_written(run, tmp_path):
    (tmp_path / "mlflow.db").write_bytes(b"")
    report = report_of(run)
    assert list(report.accounts["MLflow"].cannot) == ["MLflow's store is empty"]
    assert (tmp_path / "mlflow.db").read_bytes() == b""


def test_a_store_that_is_away_is_no_failure(run, tmp_path):
    (tmp_path / "mlflow.db").unlink()
    report = report_of(run)
    assert failures(report) == {}
    assert any("there is no" in why for why in report.accounts["MLflow"].cannot)
    assert not (tmp_path / "mlflow.db").exists()


# --------------------------------------------------------------------------------------------------------- the command


def test_the_command_exits_with_6_when_a_check_fails_and_prints_plain_json(run):
    fine = CliRunner().invoke(app, ["verify", str(run.root), "--steps", "..2"])
    assert fine.exit_code == 0
    assert "nothing failed" in fine.stdout
    flip_byte(folder_of(run, 2, "rewards") / "part-00000.arrow")
    told = CliRunner().invoke(app, ["verify", str(run.root), "--steps", "2", "--json"])
    assert told.exit_code == 6
    values = json.loads(told.stdout)
    assert (values["failed"], values["steps"]) == (["files"], [2])
    files = next(check for check in values["checks"] if check["name"] == "files")
    assert files["rows"][0]["stage"] == "rewards"
    assert files["result"] == "failed"
    shown = CliRunner().invoke(app, ["verify", str(run.root), "--steps", "1..2"])
    assert shown.exit_code == 6
    assert "step 2, rewards: " in shown.stdout
    assert "failed: files" in shown.stdout


def test_steps_that_are_not_there_are_refused(run):
    from flows.audit.steps import parse_steps
    from storage import StorageError

    assert parse_steps(None, run) == [0, 1, 2, 3]
    assert parse_steps("2..9", run) == [2, 3]
    assert parse_steps("..1", run) == [0, 1]
    with pytest.raises(StorageError, match=r"has no step in --steps 7; it has 0..3"):
        parse_steps("7", run)
    with pytest.raises(ValueError, match=r"it ends before it begins. Write 1..3"):
        parse_steps("3..1", run)
    with pytest.raises(ValueError, match="no range of steps"):
        parse_steps("two", run)


def test_nothing_in_the_run_is_written(run):
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    report_of(run)
    assert {path: path.stat().st_mtime_ns for path in run.root.rglob("*")} == before
