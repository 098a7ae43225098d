"""`train --until K`: a run that is paused at a step and gone on with is the run that never stopped."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from servers import flow_runs
from tiny_runs import digest, run
from typer.testing import CliRunner

from flows import show
from flows.cli import app
from flows.config import to_yaml
from flows.prefect_server import prefect_api
from flows.resume import resume_command
from flows.run_folder import GoBack
from flows.train import run_training
from storage import open_run
from storage.checkpoints import checkpoints

SCHEDULE = (
    "trainer.total_training_steps=4",
    "trainer.total_epochs=2",
    "trainer.val_before_train=true",
    "trainer.test_freq=3",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=1000",
)
MEASURED = ("timing", "perf/throughput", "perf/time_per_step", "memory/")


@pytest.fixture
def whole(tiny_run, tmp_path):
    """The run that never stops, in a folder of its own."""
    return run(tiny_run(*SCHEDULE, f"trainer.default_local_dir={tmp_path / 'whole'}"))[0]


def lasting(the_run, step):
    """A step's metrics without what is measured by the clock."""
    metrics = the_run.step(step).record["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def assert_same(first, second, steps):
    for step in steps:
        assert lasting(first, step) == lasting(second, step), step
        for stage in first.step(step).stages():
            if stage not in ("rewards", "val_rewards", "updates"):  # these hold measured seconds
                made = [one.step(step).manifest(stage).digest for one in (first, second)]
                assert made[0] == made[1], (step, stage)
    last = max(steps)
    assert digest(first, last) == digest(second, last)
    weights = [the_run.root / f"checkpoints/{last:06d}/model.safetensors" for the_run in (first, second)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_that_is_paused_twice_and_gone_on_with_is_the_run_that_never_stopped(tiny_run, whole):
    cfg = tiny_run(*SCHEDULE)
    paused, output = run(cfg, until=1)
    assert (paused.state, paused.finished_steps()) == ("paused", [1])
    assert "paused after step 1 of 4; go on with: grpoflow resume " in output
    assert [checkpoint.step for checkpoint in checkpoints(paused.root)] == [1]
    assert paused.events()[-1]["reason"] == "paused after step 1 of 4"
    assert json.loads((paused.root / "plan.json").read_text())["total_steps"] == 4
    assert run(cfg, until=2)[0].state == "paused"
    ended, output = run(cfg)
    assert "found 2 finished steps: checkpoint 2" in output
    assert ended.state == "finished"
    assert_same(whole, ended, [0, 1, 2, 3, 4])
    rates = [ended.step(step).record["metrics"]["actor/lr"] for step in (1, 2, 3, 4)]
    assert len(set(rates)) == len(rates) or rates[0] < rates[1]
    assert rates == [whole.step(step).record["metrics"]["actor/lr"] for step in (1, 2, 3, 4)]


def test_a_pause_adds_a_checkpoint_and_no_validation(tiny_run):
    paused, output = run(tiny_run(*SCHEDULE), until=2)
    assert "val_rewards" not in paused.step(2).stages()
    assert "validation after step 2" not in output
    assert [checkpoint.step for checkpoint in checkpoints(paused.root)] == [2]
    ended, _ = run(tiny_run(*SCHEDULE))
    assert [step for step in ended.steps() if "val_rewards" in ended.step(step).stages()] == [0, 3, 4]
    assert [checkpoint.step for checkpoint in checkpoints(ended.root)] == [2, 4]


def test_a_pause_that_was_killed_before_its_checkpoint_saves_it_when_asked_again(tiny_run):
    cfg = tiny_run(*SCHEDULE)
    paused, _ = run(cfg, until=2)
    first = (paused.root / "checkpoints/000002/model.safetensors").read_bytes()
    shutil.rmtree(paused.root / "checkpoints")
    again, output = run(cfg, until=2)
    assert "updates 1 to 2 made again from the stored batches" in output
    assert (again.state, (again.root / "checkpoints/000002/model.safetensors").read_bytes()) == ("paused", first)


def test_until_0_validates_the_first_policy_and_pauses(tiny_run):
    paused, output = run(tiny_run(*SCHEDULE), until=0)
    assert (paused.state, paused.steps()) == ("paused", [0])
    assert "validation after step 0" in output


def test_until_a_step_that_is_finished_does_nothing_and_keeps_the_run_paused(tiny_run):
    cfg = tiny_run(*SCHEDULE)
    run(cfg, until=2)
    again, output = run(cfg, until=1)
    assert (again.state, again.finished_steps()) == ("paused", [1, 2])
    assert "step 2 is finished: nothing is left to do until step 1" in output


@pytest.mark.parametrize("until", [4, 99])
def test_until_the_end_of_the_plan_or_beyond_is_as_without(tiny_run, until):
    the_run, output = run(tiny_run(*SCHEDULE), until=until)
    assert (the_run.state, the_run.finished_steps()) == ("finished", [1, 2, 3, 4])
    assert "paused" not in output


def test_status_and_ls_say_paused(tiny_run, tmp_path):
    paused, _ = run(tiny_run("trainer.default_local_dir=null"), until=1)
    output = io.StringIO()
    show.status(paused.root, False, Console(file=output, width=200))
    show.ls(tmp_path / "runs", False, Console(file=output, width=200))
    said = output.getvalue()
    assert ": paused\nfinished steps: 1; checkpoints: 1" in said
    assert "closed: reason paused after step 1 of 2, state paused" in said
    assert said.splitlines()[-1].split()[1:3] == ["paused", "1"]


def test_the_command_line_pauses_with_exit_code_0_and_resume_takes_until_too(tiny_run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_run(*SCHEDULE)))
    result = CliRunner().invoke(app, ["train", str(file), "--until", "1"])
    assert result.exit_code == 0, result.output
    assert "paused after step 1 of 4" in result.output
    assert resume_command(tmp_path / "run", [], None, None, 3) == 0
    assert (open_run(tmp_path / "run").state, open_run(tmp_path / "run").finished_steps()) == ("paused", [1, 2, 3])


def test_a_pause_where_nothing_would_be_trained_is_refused(tiny_run):
    with pytest.raises(ValueError, match="val_only"):
        run(tiny_run("trainer.val_only=true"), until=1)
    run(tiny_run())
    with pytest.raises(ValueError, match="--until 1 lies before --from-step 2"):
        run(tiny_run(), until=1, back=GoBack(2))


def test_a_run_that_goes_back_may_be_paused(tiny_run):
    run(tiny_run(*SCHEDULE), until=3)
    again, output = run(tiny_run(*SCHEDULE, "actor_rollout_ref.actor.optim.lr=0.01"), back=GoBack(2), until=2)
    assert (again.state, again.lineage, again.finished_steps()) == ("paused", 2, [1, 2])
    assert "paused after step 2 of 4" in output


@pytest.mark.slow
def test_mlflow_and_prefect_show_a_paused_run_as_one_that_is_to_go_on(tiny_run):
    from mlflow import MlflowClient

    cfg = tiny_run("orchestration.enabled=true", "tracking.enabled=true")
    root = Path(cfg.storage.root)
    with prefect_api(cfg.orchestration, root, print) as api:
        outcome = run_training(cfg, Console(file=io.StringIO()), api, until=1)
        run_id = open_run(outcome.folder).run_id
        [flow_run] = [one for name, one in flow_runs(api, run_id).items() if name == run_id]
        assert (flow_run.state.type.value, flow_run.state.name) == ("COMPLETED", "Paused")
        assert flow_run.state.message == "paused after step 1 of 2; to go on, run it again"
        client = MlflowClient(f"sqlite:///{root.absolute() / 'mlflow.db'}")
        experiment = client.get_experiment_by_name(cfg.trainer.project_name).experiment_id
        [tracked] = client.search_runs([experiment])
        assert (tracked.info.status, tracked.data.tags["grpoflow.state"]) == ("SCHEDULED", "paused")
        run_training(cfg, Console(file=io.StringIO()), api)
    [tracked] = client.search_runs([experiment])
    assert (tracked.info.status, tracked.data.tags["grpoflow.state"]) == ("FINISHED", "finished")
    points = client.get_metric_history(tracked.info.run_id, "critic/score/mean")
    assert [point.step for point in points] == [1, 2]
    assert np.isfinite([point.value for point in points]).all()
