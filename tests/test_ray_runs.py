"""Runs on several ranks, each a process of its own under a real local Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

import numpy as np
import psutil
import pytest
from tiny_runs import digest, run, tokens

from storage import open_run
from tasks.workers.group import RanksLost
from tasks.workers.ray_cluster import ray_of
from tasks.workers.ray_group import RayGroup

pytestmark = pytest.mark.slow

TWO = ("trainer.n_gpus_per_node=2",)


@pytest.fixture(scope="module")
def own_ray():
    """One Ray for the module: starting one takes ten seconds. Its processes find the tests' rank tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        here = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))))
        with ray_of(None, 4, gpus=False):
            yield


def test_two_ranks_sample_the_same_tokens_as_one_process_and_come_to_the_same_numbers(tiny_run, own_ray, tmp_path):
    alone, _ = run(tiny_run())
    two, _ = run(tiny_run(*TWO, f"trainer.default_local_dir={tmp_path}/two"))
    for step in (1, 2):
        assert tokens(two, step) == tokens(alone, step)
        here, there = (one.step(step).record["metrics"] for one in (two, alone))
        for name in ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy"):
            np.testing.assert_allclose(here[name], there[name], rtol=1e-3, atol=1e-6, err_msg=name)
    manifest = two.step(1).manifest("old_log_probs")
    assert manifest.shapes["ranks"] == 2 and manifest.shapes["rows_per_rank"] == 16
    assert [part.rows for part in manifest.parts] == [16, 16]
    assert_balance_is_told(two.step(1))


def assert_balance_is_told(step):
    told = {name: value for name, value in step.record["metrics"].items() if name.startswith("global_seqlen/")}
    prompts, rollouts = step.table("prompts"), step.table("rollouts")
    prompt = dict(zip(prompts["group_id"].to_pylist(), map(len, prompts["prompt_ids"].to_pylist()), strict=True))
    whole = {
        sample: prompt[group] + len(response)
        for sample, group, response in zip(
            *(rollouts[name].to_pylist() for name in ("sample_id", "group_id", "response_ids")), strict=True
        )
    }
    before = list(whole.values())
    after = [whole[sample] for sample in step.table("old_log_probs")["sample_id"].to_pylist()]
    chunks, ranks = ([sum(one[:16]), sum(one[16:])] for one in (before, after))
    assert (told["global_seqlen/min"], told["global_seqlen/max"]) == (min(chunks), max(chunks))
    assert (told["global_seqlen/balanced_min"], told["global_seqlen/balanced_max"]) == (min(ranks), max(ranks))
    assert told["global_seqlen/mean"] == sum(before) / 2 and max(ranks) - min(ranks) <= max(chunks) - min(chunks)


@pytest.fixture
def ended_in(monkeypatch):
    """Send a signal to a rank as it begins rank tasks: `ended_in({("take_steps", 2): 1})`, rank 1 at the second one."""

    def arrange(moments, how=signal.SIGKILL, after_s=0.02):
        original, begun, pids = RayGroup._call, Counter(), []

        def call(self, others_may_take_s, task, args, kwargs):
            name = task.partition(":")[2]
            begun[name] += 1
            rank = moments.get((name, begun[name]))
            if rank is not None:
                pids.append((rank, self.about[rank].pid))
                threading.Timer(after_s, os.kill, (self.about[rank].pid, how)).start()
            return original(self, others_may_take_s, task, args, kwargs)

        monkeypatch.setattr(RayGroup, "_call", call)
        return pids

    return arrange


def run_in(cfg_of, folder, *overrides):
    return run(cfg_of(*TWO, "trainer.save_freq=1", f"trainer.default_local_dir={folder}", *overrides))


def test_ranks_killed_in_every_stage_are_replaced_and_the_run_ends_with_the_same_weights(
    tiny_run, own_ray, tmp_path, ended_in
):
    five = ("trainer.total_training_steps=5",)
    unharmed, _ = run_in(tiny_run, tmp_path / "unharmed", *five)
    # In step 1 as it generates, then in the next steps' old and reference log-probs, update and checkpoint; what is
    # made again counts too: an update after each loss behind its commit.
    moments = {
        ("sample_responses", 1): 1,
        ("compute_log_probs", 3): 0,
        ("compute_log_probs", 7): 1,
        ("take_steps", 4): 0,
        ("_save", 5): 1,
    }
    pids = ended_in(moments)
    ended, told = run_in(tiny_run, tmp_path / "ended", *five)
    assert [digest(ended, step) for step in range(1, 6)] == [digest(unharmed, step) for step in range(1, 6)]
    assert [tokens(ended, step) for step in range(1, 6)] == [tokens(unharmed, step) for step in range(1, 6)]
    lost = [event for event in ended.events() if event["event"] == "ranks_lost"]
    assert [(event["rank"], event["pid"]) for event in lost] == pids and len(pids) == len(moments)
    assert all("SIGKILL" in event["reason"] for event in lost)
    assert told.count("all ranks are started again") == len(moments)


def test_a_stopped_rank_is_replaced_too(tiny_run, own_ray, tmp_path, ended_in):
    ended_in({("take_steps", 1): 0}, how=signal.SIGSTOP, after_s=0)
    ended, told = run_in(tiny_run, tmp_path / "stopped", "ray.rank_timeout_s=4")
    assert "its process is stopped (SIGSTOP)" in told and "all ranks are started again" in told
    assert ended.finished_steps() == [1, 2]


def test_a_rank_that_is_stuck_as_it_samples_is_replaced_too(tiny_run, own_ray, tmp_path, monkeypatch):
    """Its process answers, and no other rank waits for it."""
    os.mkfifo(tmp_path / "pipe")
    original, calls = RayGroup._call, []

    def call(self, others_may_take_s, task, args, kwargs):
        if task.endswith(":sample_responses"):
            calls.append(task)
            if len(calls) > 1:
                return original(self, others_may_take_s, task, args, kwargs)
            task, kwargs = "ray_tasks:stuck_as_it_samples", {"number": 1, "pipe": str(tmp_path / "pipe")}
        return original(self, others_may_take_s, task, args, kwargs)

    alone, _ = run(tiny_run(f"trainer.default_local_dir={tmp_path}/alone"))
    monkeypatch.setattr(RayGroup, "_call", call)
    limits = ("ray.rank_timeout_s=4", "ray.collective_timeout_s=24")
    ended, told = run_in(tiny_run, tmp_path / "stuck", *limits)
    assert "rank 1" in told and "has got no further for" in told and "in read_for_ever" in told
    assert [tokens(ended, step) for step in (1, 2)] == [tokens(alone, step) for step in (1, 2)]
    (lost,) = [event for event in ended.events() if event["event"] == "ranks_lost"]
    assert lost["rank"] == 1 and len(calls) == 3


def test_a_second_loss_in_the_same_step_ends_the_run_and_resume_goes_on(tiny_run, own_ray, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        original = RayGroup.run

        def lose_every_time(self, task, *args, **kwargs):
            if task.__name__ == "take_steps":
                os.kill(self.about[1].pid, signal.SIGKILL)
            return original(self, task, *args, **kwargs)

        patch.setattr(RayGroup, "run", lose_every_time)
        with pytest.raises(RanksLost, match="second loss ends the run"):
            run_in(tiny_run, tmp_path / "twice")
    there = open_run(tmp_path / "twice")
    assert there.state == "failed" and there.finished_steps() == []
    assert len([event for event in there.events() if event["event"] == "ranks_lost"]) == 2
    before = tokens(there, 1)
    ended, _ = run_in(tiny_run, tmp_path / "twice")
    assert ended.finished_steps() == [1, 2] and tokens(ended, 1) == before


def test_more_ranks_than_rows_change_nothing(tiny_run, own_ray, tmp_path):
    """The planner refuses training batches that ranks cannot share evenly; validation has what prompts there are."""
    one_prompt = ("data.val_max_samples=1", "trainer.val_before_train=true", "trainer.val_only=true")
    alone, _ = run(tiny_run(*one_prompt, f"trainer.default_local_dir={tmp_path}/alone"))
    two, _ = run(tiny_run(*TWO, *one_prompt, f"trainer.default_local_dir={tmp_path}/two"))
    parts = [part.rows for part in two.step(0).manifest("val_rollouts").parts]
    assert parts == [1, 0] and two.step(0).table("val_rollouts").equals(alone.step(0).table("val_rollouts"))
    here, there = (
        {name: value for name, value in one.step(0).record["metrics"].items() if name.startswith("val-")}
        for one in (two, alone)
    )
    assert here == there


def test_a_run_goes_on_with_another_number_of_ranks(tiny_run, own_ray, tmp_path):
    place = f"trainer.default_local_dir={tmp_path}/moved"
    saved = ("trainer.save_freq=1", "trainer.total_training_steps=1", place)
    run(tiny_run(*TWO, *saved))
    moved, told = run(tiny_run(place, "trainer.save_freq=1", "trainer.total_training_steps=2"))
    assert "checkpoint 1" in told and moved.finished_steps() == [1, 2]
    again, told = run(tiny_run(*TWO, place, "trainer.save_freq=1", "trainer.total_training_steps=3"))
    assert again.finished_steps() == [1, 2, 3]


def test_ranks_that_only_sample_are_handed_the_policy_of_those_that_train(tiny_run, own_ray, tmp_path):
    alone, _ = run(tiny_run(f"trainer.default_local_dir={tmp_path}/alone"))
    apart = ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1")
    devices = ("actor_rollout_ref.rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=1")
    two, _ = run(tiny_run(*apart, *devices, f"trainer.default_local_dir={tmp_path}/apart"))
    assert [tokens(two, step) for step in (1, 2)] == [tokens(alone, step) for step in (1, 2)]
    assert [digest(two, step) for step in (1, 2)] == [digest(alone, step) for step in (1, 2)]
    sampled, trained = (two.step(2).manifest(stage) for stage in ("rollouts", "updates"))
    assert (sampled.shapes["ranks"], trained.shapes["ranks"]) == (2, 1)
    assert sampled.notes["policy_digest"] == digest(two, 1)
    names = {path.name for path in (tmp_path / "apart" / "logs").iterdir()}
    assert names == {"rank-0.log", "sampler-0.log", "sampler-1.log"}


# -------------------------------------------------------------------------------------------- processes of their own


RUN = """
import os, sys
from pathlib import Path
from rich.console import Console
from flows.config import load_config
from flows.train import run_training

run_training(load_config([Path(sys.argv[1])], sys.argv[2:]), Console(width=200))
"""


def start(cfg_file, mark, *overrides):
    """A run in a process of its own, with a Ray of its own; all its processes carry a mark."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPOFLOW_TEST_MARK": mark}
    command = [sys.executable, "-c", RUN, str(cfg_file), "trainer.n_gpus_per_node=2", *overrides]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def marked(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("GRPOFLOW_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def mark():
    name = uuid4().hex
    yield name
    for process in marked(name):
        with contextlib.suppress(psutil.Error):
            process.kill()


def test_two_runs_at_once_on_one_machine_do_not_meet(tiny_run, tmp_path, mark):
    tiny_run()
    runs = [
        start(tmp_path / "base.yaml", mark, f"trainer.default_local_dir={tmp_path}/{name}") for name in ("one", "two")
    ]
    told = [process.communicate(timeout=400)[0] for process in runs]
    assert [process.returncode for process in runs] == [0, 0], told
    one, two = (open_run(tmp_path / name) for name in ("one", "two"))
    assert [digest(one, step) for step in (1, 2)] == [digest(two, step) for step in (1, 2)]
    assert one.run_id != two.run_id and marked(mark) == []
    assert {path.name for path in (tmp_path / "one" / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert not list((tmp_path / "runs").glob(".ranks/*"))


def test_a_driver_killed_with_9_leaves_no_process_behind(tiny_run, tmp_path, mark):
    tiny_run()
    folder = tmp_path / "orphan"
    process = start(
        tmp_path / "base.yaml", mark, f"trainer.default_local_dir={folder}", "trainer.total_training_steps=500"
    )
    deadline = time.monotonic() + 300
    while not (folder / "steps" / "000002").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    assert len([one for one in marked(mark) if one.name().startswith("ray::RankProcess")]) == 2
    process.kill()
    process.wait()
    psutil.wait_procs(marked(mark), timeout=30)
    assert [one.name() for one in marked(mark)] == []
