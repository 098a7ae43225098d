"""Runs that go back to an earlier step: a new lineage, the abandoned future kept and never read."""

import json

import pytest
from tiny_runs import digest, run, tokens

from flows.run_folder import GoBack
from storage import StorageError, open_run
from storage.checkpoints import checkpoints
from tasks.stage import Step

STEPS = ("trainer.total_training_steps=4", "trainer.total_epochs=9", "trainer.save_freq=2")
OTHER_RATE = "actor_rollout_ref.actor.optim.lr=5e-3"


def digests(the_run, step):
    return {stage: the_run.step(step).manifest(stage).digest for stage in the_run.step(step).stages()}


def test_b16_nothing_of_the_abandoned_future_is_read_and_all_of_it_is_kept(tiny_run):
    before, _ = run(tiny_run(*STEPS))
    old = {step: digests(before, step) for step in (1, 2, 3, 4)}
    after, output = run(tiny_run(*STEPS, "trainer.seed=7"), back=GoBack(3))
    assert (
        "lineage 2 begins at step 3; what lineage 1 made from there on is kept and not read (trainer.seed 0 -> 7)"
        in output
    )
    assert after.lineage == 2
    assert after.lineages[2].changes == {"trainer.seed": [0, 7]}
    assert {step: digests(after, step) for step in (1, 2)} == {1: old[1], 2: old[2]}
    assert tokens(after, 3) != tokens(open_run(after.root, lineage=1), 3)
    for step in (3, 4):
        assert {after.step(step).manifest(stage).lineage for stage in after.step(step).stages()} == {2}
        assert digests(open_run(after.root, lineage=1), step) == old[step]
        assert after.step(step).record["lineage"] == 2
        assert open_run(after.root, lineage=1).step(step).record["lineage"] == 1
    parents = after.step(3).manifest("rollouts").parents
    assert parents["prompts"] == after.step(3).manifest("prompts").digest
    assert {(one.step, one.lineage) for one in checkpoints(after.root)} == {(2, 1), (4, 1), (4, 2)}
    with pytest.raises(StorageError, match="has no lineage 3; it has 1, 2"):
        open_run(after.root, lineage=3)


def test_going_back_without_a_change_gives_the_same_weights_again(tiny_run):
    cfg = tiny_run(*STEPS)
    before, _ = run(cfg)
    last = digest(before, 4)
    after, _ = run(cfg, back=GoBack(2))
    assert digest(after, 4) == last
    assert after.step(2).manifest("updates").attempt == 2


def test_from_a_stage_on_what_comes_before_it_is_kept(tiny_run):
    before, _ = run(tiny_run(*STEPS))
    old = digests(before, 3)
    after, _ = run(tiny_run(*STEPS, "algorithm.adv_estimator=rloo"), back=GoBack(3, "advantages"))
    new = digests(after, 3)
    kept = ["prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards"]
    assert {stage: new[stage] for stage in kept} == {stage: old[stage] for stage in kept}
    assert new["advantages"] != old["advantages"]
    assert [len(list((after.root / "steps/000003" / stage).iterdir())) for stage in kept] == [1] * 5
    assert tokens(after, 4) != tokens(open_run(after.root, lineage=1), 4)


def test_each_update_is_replayed_under_the_configuration_it_was_made_under(tiny_run):
    """No checkpoint is left, and the learning rate and Adam's decay change at step 3."""
    other = [OTHER_RATE, "actor_rollout_ref.actor.optim.betas=[0.5,0.9]"]
    run(tiny_run(*STEPS[:2]))
    after, _ = run(tiny_run(*STEPS[:2], *other), back=GoBack(3))
    last = digest(after, 4)
    for checkpoint in checkpoints(after.root):
        (checkpoint.folder / "manifest.json").unlink()
    (after.root / "steps/000004/step-0002.json").unlink()
    again, output = run(tiny_run(*STEPS[:2], *other))
    assert "the initial weights, updates 1 to 3 made again from the stored batches" in output
    assert digest(again, 4) == last
    rates = [again.step(step).table("updates")["lr"].to_pylist()[0] for step in (1, 2, 3, 4)]
    assert rates == [1e-3, 1e-3, 5e-3, 5e-3]


def test_a_lineage_goes_on_under_its_own_configuration(tiny_run):
    run(tiny_run(*STEPS))
    run(tiny_run(*STEPS, OTHER_RATE), back=GoBack(3))
    with pytest.raises(StorageError, match=r"the run has 0\.005, asked for is 0\.001"):
        run(tiny_run(*STEPS))
    again, output = run(tiny_run(*STEPS, OTHER_RATE))
    assert "all 4 steps are finished" in output
    assert again.lineage == 2


def test_a_lineage_can_branch_off_a_lineage(tiny_run):
    run(tiny_run(*STEPS))
    run(tiny_run(*STEPS, "trainer.seed=1"), back=GoBack(3))
    third, _ = run(tiny_run(*STEPS, "trainer.seed=2"), back=GoBack(4))
    assert [third.lineage_of(step) for step in (1, 2, 3, 4)] == [1, 1, 2, 3]
    fourth, _ = run(tiny_run(*STEPS, "trainer.seed=3"), back=GoBack(2))
    assert [fourth.lineage_of(step) for step in (1, 2, 3, 4)] == [1, 4, 4, 4]
    assert fourth.lineages[4].parent == 3


def test_where_there_is_nothing_to_go_back_to_is_refused_and_nothing_is_written(tiny_run):
    cfg = tiny_run(*STEPS)
    the_run, _ = run(cfg)
    with pytest.raises(StorageError, match="can be taken up at step 1 to 5"):
        run(cfg, back=GoBack(6))
    with pytest.raises(StorageError, match=r"--from-stage advantage: step 3 of .* has prompts, rollouts"):
        run(cfg, back=GoBack(3, "advantage"))
    with pytest.raises(StorageError, match=r"actor_rollout_ref\.model\.lora_rank"):
        run(tiny_run(*STEPS, "actor_rollout_ref.model.lora_rank=4"), back=GoBack(3))
    assert not (the_run.root / "lineages").exists()


def test_a_damaged_lineage_is_said(tiny_run):
    cfg = tiny_run(*STEPS)
    the_run, _ = run(cfg)
    run(cfg, back=GoBack(3))
    (the_run.root / "lineages/0002.json").write_text("{")
    with pytest.raises(StorageError, match=r"0002.json is damaged"):
        open_run(the_run.root).step(3).stages()
    assert json.loads((the_run.root / "run.json").read_text())["name"]


def test_a_finished_step_shows_and_replays_what_it_was_trained_on_not_what_was_made_last(
    tiny_run, tmp_path, monkeypatch
):
    """The reward function is changed and put back while step 2 is open: the older attempt is used again."""
    import flows.step

    cfg = tiny_run(*STEPS[:2])
    text = (tmp_path / "reward.py").read_text()
    update = flows.step.update

    def killed(step, *args, **options):
        if step.index == 2 and type(step) is Step:  # not one that is only opened to see what is stale
            raise KeyboardInterrupt
        return update(step, *args, **options)

    monkeypatch.setattr(flows.step, "update", killed)
    for source in (text, text.replace("return ", "return 0.5 * ")):
        (tmp_path / "reward.py").write_text(source)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
    monkeypatch.undo()
    (tmp_path / "reward.py").write_text(text)
    the_run, _ = run(cfg)
    view = the_run.step(2)
    assert len(view.attempts("rewards")) == 2
    assert view.manifest("rewards").attempt == 1
    assert {stage: view.manifest(stage).digest for stage in view.stages()} == view.record["artifacts"]
    last = digest(the_run, 4)
    for checkpoint in checkpoints(the_run.root):
        (checkpoint.folder / "manifest.json").unlink()
    again, output = run(cfg)
    assert "updates 1 to 4 made again" in output
    assert digest(again, 4) == last


def test_a_kept_stage_that_is_made_again_all_the_same_is_seen(tiny_run):
    """Another temperature changes what the kept rollouts were made from."""
    run(tiny_run(*STEPS[:2]))
    cfg = tiny_run(*STEPS[:2], "actor_rollout_ref.rollout.temperature=0.7")
    after, _ = run(cfg, back=GoBack(3, "advantages"))
    assert after.step(3).manifest("rollouts").lineage == 2
    assert digests(after, 3) == after.step(3).record["artifacts"]
    last = digest(after, 4)
    for checkpoint in checkpoints(after.root):
        (checkpoint.folder / "manifest.json").unlink()
    again, _ = run(cfg)
    assert digest(again, 4) == last


def test_a_later_lineage_writes_beside_the_records_of_an_earlier_one(tiny_run):
    val = ("trainer.val_before_train=true", "trainer.test_freq=2")
    before, _ = run(tiny_run(*STEPS, *val))
    files = {path: path.read_bytes() for path in before.root.glob("steps/*/step.json")}
    other = ("actor_rollout_ref.rollout.val_kwargs.n=2", "actor_rollout_ref.rollout.val_kwargs.do_sample=true")
    more = ("actor_rollout_ref.rollout.val_kwargs.temperature=1.0",)
    after, _ = run(tiny_run(*STEPS, *val, *other, *more), back=GoBack(1))
    assert {path: path.read_bytes() for path in files} == files
    assert after.step(0).table("val_rollouts").num_rows == 8
    assert open_run(after.root, lineage=1).step(0).table("val_rollouts").num_rows == 4
    assert after.step(0).record["lineage"] == 2


def test_going_back_to_data_of_other_content_says_so_and_a_kill_does_not_hide_it(tiny_run, tmp_path):
    cfg = tiny_run(*STEPS[:2])
    run(cfg)
    file = tmp_path / "train.jsonl"
    old, other = file.read_text(), file.read_text().replace("apples", "2 apples")
    file.write_text(other)
    after, output = run(cfg, back=GoBack(3))
    digests_then_and_now = after.lineages[2].changes["data.train_files, content (SHA-256)"]
    first, second = (json.loads((after.root / name).read_text()) for name in ("inputs.json", "inputs-0002.json"))
    assert digests_then_and_now == [inputs["digests"]["data.train_files"] for inputs in (first, second)]
    then, now = (digest[:12] for digest in digests_then_and_now)
    assert f"data.train_files, content (SHA-256) {then} -> {now}" in output.replace("\n", " ")
    (after.root / "inputs-0002.json").unlink()
    file.write_text(old)
    with pytest.raises(StorageError, match=f"data.train_files: {now} then, {then} now"):
        run(cfg)
    file.write_text(other)
    run(cfg)
    assert json.loads((after.root / "inputs-0002.json").read_text()) == second
    (after.root / "inputs-0002.json").write_text("{")
    with pytest.raises(StorageError, match=r"inputs-0002\.json is damaged"):
        run(cfg)


def test_going_back_beyond_the_plan_is_refused_before_a_model_is_loaded(tiny_run, monkeypatch):
    the_run, _ = run(tiny_run(*STEPS))

    def never(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr("flows.train.open_workers", never)
    with pytest.raises(StorageError, match="--from-step 3: the plan has 2 steps, so that nothing would be made"):
        run(tiny_run(*STEPS, "trainer.total_training_steps=2"), back=GoBack(3))
    with pytest.raises(StorageError, match="can be taken up at step 1 to 5"):
        run(tiny_run(*STEPS), back=GoBack(9))
    assert not (the_run.root / "lineages").exists()


def test_how_a_model_computes_may_change_at_a_step_and_which_model_may_not(tiny_run):
    run(tiny_run(*STEPS))
    model = "actor_rollout_ref.model"
    after, _ = run(tiny_run(*STEPS, f"{model}.enable_gradient_checkpointing=true"), back=GoBack(3))
    assert after.lineages[2].changes == {f"{model}.enable_gradient_checkpointing": [False, True]}
    with pytest.raises(StorageError, match="enable_gradient_checkpointing"):
        run(tiny_run(*STEPS))
    with pytest.raises(StorageError, match=r"model\.dtype"):
        run(tiny_run(*STEPS, f"{model}.dtype=bfloat16"), back=GoBack(3))
