"""Runs on several ranks that sample with a real vLLM and lose ranks and engines: what is done, and what is left."""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest
from real_vllm import PYTHON, needs_vllm
from tiny_runs import digest, run

from flows.plan_view import plan_of
from flows.run_folder import first_weights_digest
from storage import open_run
from tasks.warm_start.word_problems import build_tokenizer, save_tokenizer
from tasks.workers.ray_cluster import before_import
from tasks.workers.ray_group import RayGroup

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.engine_python={PYTHON}",
    f"{ROLLOUT}.max_num_seqs=32",
    # Long enough to be killed in the middle of.
    f"{ROLLOUT}.ignore_eos=true",
    "data.max_response_length=400",
)
ONE_POOL = (*VLLM, "trainer.n_gpus_per_node=2")
TWO_POOLS = (*VLLM, "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")


# -------------------------------------------------------------------------------------------------- processes and kills


def engine_of(rank_pid):
    """(process, folder) of the engine that a rank hosts; None: it has none."""
    for process in psutil.Process(rank_pid).children():
        words = process.cmdline()
        script = next((Path(word) for word in words if word.endswith("/vllm_process.py")), None)
        if script is not None and "--watch" not in words:
            return process, script.parent.parent
    return None


def as_it_samples(rank_pid, noted):
    """Wait until a rank's engine has been sampling for a moment; returns the engine's process."""

    def samples(folder):
        # The last argument is written when all is ready, the answer when all is done; both go with the next call.
        return (folder / "call" / "limits.npy").exists() and not (folder / "call" / "tokens.npy").exists()

    while noted.calling:
        with contextlib.suppress(psutil.Error):
            process, folder = engine_of(rank_pid) or (None, None)
            if process and samples(folder):
                time.sleep(0.2)
                if samples(folder):
                    return process
        time.sleep(0.01)
    raise AssertionError(f"no engine of process {rank_pid} samples for 0.2 s")


# What stands before `yield` is done before the ranks are called, the rest beside them.


def kill_rank_as_it_samples(group, rank, noted):
    pid = group.about[rank].pid
    yield
    as_it_samples(pid, noted)
    os.kill(pid, signal.SIGKILL)
    noted.killed.append(pid)


def kill_rank_soon(group, rank, noted):
    pid = group.about[rank].pid
    yield
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    noted.killed.append(pid)


def kill_engine_as_it_samples(group, rank, noted):
    pid = group.about[rank].pid
    yield
    engine = as_it_samples(pid, noted)
    engine.kill()
    noted.engines.append(engine.pid)


def kill_engine_as_it_loads(group, rank, noted):
    """It is stopped before the call, so that none is too short to be killed in."""
    engine, _ = engine_of(group.about[rank].pid)
    engine.suspend()
    yield
    time.sleep(2)
    engine.kill()
    noted.engines.append(engine.pid)


@dataclass
class Noted:
    """What happened to a run.

    Attributes:
        killed: ranks' processes, in their order.
        engines: the same of engines' processes.
        committed: manifests of what was committed when something was to be killed, by step and stage.
        pids: of all ranks there were.
        calls: how often each pool began each rank task.
        hosts: engines of the pool that samples, as each call of `sample_responses` ended.
        calling: a rank task that something is to be killed in is under way.
    """

    killed: list = field(default_factory=list)
    engines: list = field(default_factory=list)
    committed: dict = field(default_factory=dict)
    pids: set = field(default_factory=set)
    calls: Counter = field(default_factory=Counter)
    hosts: list = field(default_factory=list)
    calling: bool = False


@contextlib.contextmanager
def harmed(folder, moments):
    """Do harm as rank tasks begin: `{("rank", "take_steps", 2): (kill_rank_soon, 1)}`, rank 1 in the second one."""
    original, noted = RayGroup._call, Noted()

    def call(self, others_may_take_s, task, args, kwargs):
        pool, name = self._pool.name, task.partition(":")[2]
        noted.calls[pool, name] += 1
        noted.pids |= {one.pid for one in self.about}
        harm = moments.get((pool, name, noted.calls[pool, name]))
        if harm is None:
            answers = original(self, others_may_take_s, task, args, kwargs)
        else:
            noted.committed |= committed(folder)
            doing = harm[0](self, harm[1], noted)
            next(doing)
            thread = threading.Thread(target=next, args=(doing, None))
            noted.calling = True
            thread.start()
            try:
                answers = original(self, others_may_take_s, task, args, kwargs)
            finally:
                noted.calling = False
                thread.join()
        if name == "sample_responses":
            noted.hosts.append([engine_of(one.pid)[0].pid for one in self.about])
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayGroup, "_call", call)
        yield noted


def committed(folder):
    there = open_run(folder)
    steps = [int(path.name) for path in (folder / "steps").iterdir()]
    return {(step, stage): there.step(step).manifest(stage) for step in steps for stage in there.step(step).stages()}


def left(mark, pids):
    """Processes, and files outside the run's folder, that should be gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            # Python's own helpers for processes stay as long as this one.
            if process.environ().get("GRPOFLOW_TEST_MARK") == mark and "multiprocessing" not in words:
                found.append(process)
    _, living = psutil.wait_procs(found, timeout=20)
    names = tuple(f"grpoflow-vllm-{pid}-" for pid in pids)
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    files = [path for place in places if place.is_dir() for path in place.iterdir() if path.name.startswith(names)]
    return [*(f"{one.pid} {one.name()}" for one in living), *map(str, files)]


@pytest.fixture(scope="module")
def ended(tiny_model, tiny_run_in, tmp_path_factory):
    """Train on ranks of its own Ray, harmed on the way: `ended(moments, "key=value")`."""
    before_import(300)
    import ray

    tokenizer = build_tokenizer()
    # vLLM's CPU build has no attention for smaller heads.
    sizes = {"head_dim": 32, "max_position_embeddings": 512, "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model("llama", vocab_size=len(tokenizer), **sizes)

    def train(moments, *overrides):
        folder, mark = tmp_path_factory.mktemp("run"), uuid4().hex
        shutil.copytree(model, folder / "model")
        save_tokenizer(tokenizer, folder / "model")
        cfg = tiny_run_in(folder)(*overrides)
        with pytest.MonkeyPatch.context() as patch, harmed(folder / "run", moments) as noted:
            # Ray kills the children of what it kills a few milliseconds later: it has the time.
            patch.setattr(ray, "kill", lambda actor, kill=ray.kill: (kill(actor), time.sleep(0.2)))
            patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
            patch.setenv("GRPOFLOW_TEST_MARK", mark)
            the_run, told = run(cfg)
        lost = [event for event in the_run.events() if event["event"] == "ranks_lost"]
        return SimpleNamespace(
            run=the_run, cfg=cfg, told=told, noted=noted, lost=lost, left=left(mark, noted.pids), folder=folder / "run"
        )

    return train


def assert_sampled_from_the_policy_before(the_run, step):
    view = the_run.step(step)
    manifest = view.manifest("rollouts")
    before = first_weights_digest(the_run) if step == 1 else digest(the_run, step - 1)
    assert manifest.notes["policy_digest"] == before and manifest.notes["engine"].startswith("vllm ")
    assert set(view.table("rollouts")["policy_version"].to_pylist()) == {step - 1}
    assert view.manifest("old_log_probs").metrics["training/rollout_log_probs_gap_mean"] < 1e-3


def assert_untouched(one):
    """What was committed when something was killed is there as it was, made once."""
    now = committed(one.folder)
    assert {place: now.get(place) for place in one.noted.committed} == one.noted.committed


# ------------------------------------------------------------------------------------------ ranks that train and sample


@pytest.fixture(scope="module")
def one_pool(ended):
    """Two ranks with an engine each: one lost in an update, one as it samples, and then an engine as it samples."""
    moments = {
        ("rank", "take_steps", 1): (kill_rank_soon, 1),
        # The first rank writes the policy for both engines.
        ("rank", "sample_responses", 2): (kill_rank_as_it_samples, 0),
        ("rank", "sample_responses", 4): (kill_engine_as_it_samples, 1),
    }
    return ended(moments, *ONE_POOL, "trainer.total_training_steps=3")


def test_ranks_killed_in_update_and_as_they_sample_are_replaced_once_each_and_the_run_ends(one_pool):
    killed = one_pool.noted.killed
    assert [(one["step"], one["rank"], one["pid"]) for one in one_pool.lost] == [(1, 1, killed[0]), (2, 0, killed[1])]
    assert all("SIGKILL" in one["reason"] for one in one_pool.lost)
    assert one_pool.told.count("all ranks are started again") == 2
    assert one_pool.run.finished_steps() == [1, 2, 3] and one_pool.run.state == "finished"
    for step in range(1, 4):
        assert one_pool.run.step(step).manifest("rollouts").shapes["rows_per_rank"] == 16


def test_what_was_committed_before_a_kill_is_not_made_again(one_pool):
    stages = {(step, stage) for step, stage in one_pool.noted.committed if stage == "rollouts"}
    assert stages == {(1, "rollouts"), (2, "rollouts")}
    assert_untouched(one_pool)


def test_after_kills_each_step_samples_from_the_policy_before_it(one_pool):
    for step in range(1, 4):
        assert_sampled_from_the_policy_before(one_pool.run, step)


def test_an_engine_killed_as_it_samples_is_replaced_alone(one_pool):
    """Both ranks stay, and the other one's engine."""
    (lost,) = one_pool.noted.engines
    assert not psutil.pid_exists(lost)
    assert "in generate: it was killed by SIGKILL" in (one_pool.folder / "logs" / "rank-1.log").read_text()
    # In steps 1, 2 (with new ranks) and 3 (with a new engine); calls that were cut short are not among them.
    assert one_pool.noted.calls["rank", "sample_responses"] == 5 and len(one_pool.noted.hosts) == 3
    first, second, third = one_pool.noted.hosts
    assert lost == second[1] and third[0] == second[0] and third[1] != lost
    assert not set(first) & set(second)


def test_no_process_and_no_file_of_ranks_or_engines_is_left(one_pool):
    assert one_pool.left == []


# --------------------------------------------------------------------------------- ranks that train, others that sample


def test_two_pools_sample_with_vllm_from_the_policy_of_each_step_in_the_planned_shapes(ended):
    two = ended({}, *TWO_POOLS)
    plan = plan_of(two.cfg, train_prompts=16)
    assert (plan.rollout_replicas, plan.sequences_per_rollout_replica, plan.sequences_per_rank) == (2, 16, 32)
    assert two.run.finished_steps() == [1, 2] and two.lost == []
    for step in (1, 2):
        view = two.run.step(step)
        assert_sampled_from_the_policy_before(two.run, step)
        shapes = {stage: view.manifest(stage).shapes for stage in view.stages()}
        parts = {stage: [part.rows for part in view.manifest(stage).parts] for stage in view.stages()}
        assert parts["rollouts"] == [plan.sequences_per_rollout_replica] * plan.rollout_replicas
        assert (shapes["rollouts"]["rows"], shapes["rollouts"]["ranks"]) == (plan.sequences_per_step, 2)
        for stage, forwards in (
            ("old_log_probs", plan.old_log_prob_forwards_per_rank),
            ("ref_log_probs", plan.ref_log_prob_forwards_per_rank),
        ):
            assert parts[stage] == [plan.sequences_per_rank]
            assert shapes[stage]["micro_batches"] == forwards
        updates = shapes["updates"]
        assert updates["ranks"] == 1 and updates["optimizer_steps"] == plan.optimizer_steps_per_step == 2
        assert updates["sequences"] == plan.sequences_per_mini_batch * plan.optimizer_steps_per_step
        assert updates["micro_batches"] == plan.grad_accumulation_steps * plan.optimizer_steps_per_step
    names = {path.name for path in (two.folder / "logs").iterdir()}
    assert names == {"rank-0.log", "sampler-0.log", "sampler-1.log", "engine-0.log", "engine-1.log"}
    assert two.left == []


@pytest.fixture(scope="module")
def two_pools(ended):
    """A rank that samples is lost; then an engine as it loads, the other one as it samples, and a rank that trains."""
    moments = {
        ("sampler", "sample_responses", 1): (kill_rank_as_it_samples, 1),
        ("sampler", "load_policy_files", 3): (kill_engine_as_it_loads, 1),
        ("sampler", "sample_responses", 3): (kill_engine_as_it_samples, 0),
        ("rank", "take_steps", 2): (kill_rank_soon, 0),
    }
    return ended(moments, *TWO_POOLS)


def test_a_rank_of_either_pool_that_is_killed_is_replaced_once_and_the_run_ends(two_pools):
    killed = two_pools.noted.killed
    assert [(one["step"], one["rank"], one["pid"]) for one in two_pools.lost] == [(1, 1, killed[0]), (2, 0, killed[1])]
    assert two_pools.told.count("all ranks are started again") == 2
    assert two_pools.run.finished_steps() == [1, 2]
    assert (2, "rollouts") in two_pools.noted.committed
    assert_untouched(two_pools)
    for step in (1, 2):
        assert_sampled_from_the_policy_before(two_pools.run, step)


def test_engines_killed_as_they_load_and_as_they_sample_come_back_with_the_policy(two_pools):
    loading, sampling = two_pools.noted.engines
    logs = [(two_pools.folder / "logs" / f"sampler-{rank}.log").read_text() for rank in (0, 1)]
    assert f"process {loading}), in load: it was killed by SIGKILL" in logs[1]
    assert f"process {sampling}), in generate: it was killed by SIGKILL" in logs[0]
    first, second = two_pools.noted.hosts
    assert first == [sampling, loading] and not set(first) & set(second)


def test_no_process_and_no_file_of_two_pools_is_left(two_pools):
    assert two_pools.left == []
