"""Runs that earlier versions wrote: each opens, verifies, is shown and goes on in this one, at another place.

`tests/make_fixture_run.py` makes one; none is ever changed.
"""

import json
import shutil
from pathlib import Path

import pytest
from make_fixture_run import make
from tiny_runs import digest
from typer.testing import CliRunner

from flows.cli import app
from storage import StorageError, open_run

KEPT = sorted(Path(__file__).parent.joinpath("data", "fixture_runs").iterdir())


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def kept(request, tmp_path):
    """A copy of a kept run with its model and data, in a place of its own."""
    return shutil.copytree(request.param, tmp_path / "lab")


def grpoflow(*words):
    """What a command prints; it must do what it is told."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def inputs_at(lab):
    """Where the files lie now that the run was begun with."""
    return [
        f"data.train_files=[{lab / 'train.jsonl'}]",
        f"actor_rollout_ref.model.path={lab / 'model'}",
        f"custom_reward_function.path={lab / 'reward.py'}",
    ]


def test_a_kept_run_opens_with_all_its_histories_and_rows(kept):
    for lineage, steps in ((1, [1, 2]), (2, [1, 2, 3])):
        run = open_run(kept / "run", lineage)
        assert run.finished_steps() == steps
        assert all(run.samples([step]).num_rows == 8 for step in steps)
    status = json.loads(grpoflow("status", kept / "run", "--json"))
    assert status["state"] == "finished"


def test_a_kept_run_verifies(kept):
    report = json.loads(grpoflow("verify", kept / "run", "--json"))
    assert report["failed"] == [], report


def test_a_kept_run_is_shown(kept):
    for stage in ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates"):
        assert "000003" in grpoflow("show", kept / "run", "--step", 3, "--stage", stage, "--json") or stage == "updates"


def test_a_kept_run_goes_on_with_one_more_step_where_it_lies_now(kept):
    before = open_run(kept / "run")
    known = [digest(before, step) for step in (1, 2, 3)]
    told = grpoflow(
        "resume", kept / "run", *inputs_at(kept), "trainer.total_training_steps=4", "trainer.total_epochs=2"
    )
    after = open_run(kept / "run")
    assert "step 4/4" in told and "step 3/4" not in told
    assert after.finished_steps() == [1, 2, 3, 4]
    assert [digest(after, step) for step in (1, 2, 3)] == known
    # Now that the run knows the places, it goes on without being told.
    grpoflow("resume", kept / "run", "trainer.total_training_steps=5", "trainer.total_epochs=3")
    assert open_run(kept / "run").finished_steps() == [1, 2, 3, 4, 5]


def test_a_run_whose_files_have_moved_is_not_gone_on_with_on_other_files(kept):
    ledger = (kept / "run" / "ledger.jsonl").read_bytes()
    lines = (kept / "train.jsonl").read_text().replace("Tom has 1", "Tom has 9")
    (kept / "train.jsonl").write_text(lines)
    done = CliRunner().invoke(app, ["resume", str(kept / "run"), *inputs_at(kept), "trainer.total_training_steps=4"])
    assert isinstance(done.exception, StorageError) and "data.train_files:" in str(done.exception)
    assert (kept / "run" / "ledger.jsonl").read_bytes() == ledger


def test_a_fixture_run_can_be_made_by_this_version_and_is_small(tmp_path):
    make(tmp_path)
    (tmp_path / "run" / "lock").unlink()
    assert open_run(tmp_path / "run").finished_steps() == [1, 2, 3]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 400_000


def test_no_kept_run_names_the_machine_it_was_made_on():
    import getpass
    import socket

    for folder in KEPT:
        for path in folder.rglob("*.json*"):
            text = path.read_text()
            assert socket.gethostname() not in text
            assert getpass.getuser() == "root" or f"/home/{getpass.getuser()}" not in text
