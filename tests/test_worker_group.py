"""The ranks as one: which rows each has, what comes back from them, and how one that is lost is noticed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray_tasks

from flows.interrupts import Terminated, polite_end
from flows.ranks import Replacement
from storage import RunWriter, StorageError, build_table
from storage.artifacts import read_parts, wait_until_seen, write_part
from tasks.engines.scratch import own_folder
from tasks.generate import Request, rank_rows
from tasks.stage import NonFiniteError, Step
from tasks.update import rounding, steps_that_differ
from tasks.workers.group import LocalGroup, RanksLost
from tasks.workers.rank import share_of

# ------------------------------------------------------------------------------------------------------ rows of a rank


@pytest.mark.parametrize(("rows", "places"), [(0, 3), (2, 3), (7, 3), (9, 3), (720, 6)])
def test_every_row_has_one_place_and_shares_differ_by_one_at_most(rows, places):
    shares = [share_of(rows, place, places) for place in range(places)]
    assert np.concatenate(shares).tolist() == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def request(replica_ranks, first_samples=False):
    return Request(None, 12, None, 1, 0, 0, replica_ranks, first_samples)


def test_replicas_have_consecutive_rows_and_their_ranks_split_them():
    rows = [rank_rows(720, number, 6, request(2)) for number in range(6)]
    assert [(len(one), int(one[0])) for one in rows] == [(120, 120 * number) for number in range(6)]


def test_the_rank_that_hosts_a_replicas_engine_has_all_of_the_replicas_rows():
    rows = [rank_rows(720, number, 6, request(2, first_samples=True)) for number in range(6)]
    assert [len(one) for one in rows] == [240, 0, 240, 0, 240, 0]
    assert np.concatenate(rows).tolist() == list(range(720))


# ------------------------------------------------------------------------------------------------- parts of an artifact


def table(rows, offset=0):
    names = [f"s{offset + row}" for row in range(rows)]
    log_probs = [[-0.5] * (row % 3) for row in range(rows)]
    return build_table("ref_log_probs", {"sample_id": names, "group_id": names, "ref_log_probs": log_probs})


def test_a_file_that_shows_late_is_waited_for(tmp_path):
    (tmp_path / "there").mkdir()
    part = write_part(tmp_path / "there", 0, table(4))
    late = tmp_path / "late"
    late.mkdir()
    threading.Timer(0.5, lambda: (tmp_path / "there" / part.name).rename(late / part.name)).start()
    wait_until_seen(late, [part])
    assert read_parts(late, "ref_log_probs", [part]).num_rows == 4


def test_a_part_that_is_not_what_its_rank_says_is_refused(tmp_path):
    part = write_part(tmp_path, 0, table(4))
    path = tmp_path / part.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    with pytest.raises(StorageError, match="has changed"):
        read_parts(tmp_path, "ref_log_probs", [part])
    wait_until_seen(tmp_path, [part.model_copy(update={"bytes": 1})], timeout_s=0.2)
    with pytest.raises(StorageError, match="bytes but was committed with 1"):
        read_parts(tmp_path, "ref_log_probs", [part.model_copy(update={"bytes": 1})])


@pytest.fixture
def step(tmp_path, tiny_run):
    with RunWriter.create(tmp_path / "run", "toy") as run:
        yield Step(1, run, tiny_run())


def opened(step):
    return step.open("ref_log_probs", reads=["trainer.seed"], code=["tasks.log_prob"])


def test_parts_of_ranks_become_one_artifact_and_ranks_without_rows_do_no_harm(step):
    stage = opened(step)
    with stage.parts() as folder:
        parts = [write_part(folder.path, rank, table(rows, 10 * rank)) for rank, rows in enumerate((2, 0, 1))]
        assert stage.read_parts(folder, parts)["sample_id"].to_pylist() == ["s0", "s1", "s20"]
        artifact = stage.commit_parts(folder, parts, shapes={"ranks": 3})
    assert artifact.rows == 3 and stage.committed() == artifact
    assert step.run.step(1).manifest("ref_log_probs").shapes["ranks"] == 3


def test_a_nan_in_any_part_is_kept_aside_and_nothing_is_committed(step):
    stage = opened(step)
    columns = {"sample_id": ["x"], "group_id": ["g"], "ref_log_probs": [[0.5, float("nan")]]}
    with pytest.raises(NonFiniteError, match=r"at row 2, token 1 \(sample x, group g\)"), stage.parts() as folder:
        parts = [write_part(folder.path, 0, table(2)), folder.write(1, columns)]
        stage.read_parts(folder, parts)
    assert list(step.run.root.glob("quarantine/*/refused.arrow"))
    assert not step.run.step(1).stages() and not folder.path.exists()


# ------------------------------------------------------------------------------------------- an update that is repeated


def test_an_update_is_repeated_bit_for_bit_in_its_own_places_and_up_to_rounding_in_others():
    here = (2, 1, 2, True)
    assert rounding({"places": list(here)}, {"ranks": 2}, here, "float32") == 0
    for other in ((1, 1, 1, True), (2, 2, 2, True), (2, 1, 1, True), (2, 1, 2, False)):
        assert rounding({"places": list(other)}, {"ranks": 2}, here, "float32") == 1e-2
        assert rounding({"places": list(other)}, {"ranks": 2}, here, "bfloat16") == 0.2
    # Manifests from before `places` was written.
    assert rounding({}, {"ranks": 2}, here, "float64") == 0 and rounding({}, {}, here, "float64") == 1e-6


def test_a_loss_near_zero_may_differ_by_more_than_a_share_of_it_but_a_gradient_norm_may_not():
    then = [{"loss": 1e-5, "grad_norm": 0.5}, {"loss": None, "grad_norm": None}]
    near = [{"loss": -2e-4, "grad_norm": 0.503}, {"loss": None, "grad_norm": None}]
    assert steps_that_differ(then, near, 1e-2) == [] and steps_that_differ(then, near, 0.0) == [0]
    assert steps_that_differ(then, then, 0.0) == []
    assert steps_that_differ(then, [{"loss": 1e-5, "grad_norm": 0.51}, then[1]], 1e-2) == [0]
    assert steps_that_differ(then, [{"loss": 2e-3, "grad_norm": 0.5}, then[0]], 1e-2) == [0, 1]


# ---------------------------------------------------------------------------------------------------- ends of processes


def test_a_signal_that_a_library_turns_into_an_exit_of_its_own_is_told_as_the_signal():
    with pytest.raises(Terminated) as ended, polite_end(0, print) as check:
        check()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Terminated:
            sys.exit(1)
    assert ended.value.code == 128 + signal.SIGTERM and isinstance(ended.value.__cause__, SystemExit)
    with pytest.raises(SystemExit) as exited, polite_end(0, print):
        sys.exit(1)
    assert type(exited.value) is SystemExit and exited.value.code == 1


def test_folders_of_processes_that_are_gone_are_removed_and_those_of_living_ones_and_of_others_stay(tmp_path):
    mine = own_folder(tmp_path, "engine")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{child.pid}-")
    foreign = tmp_path / left.name.replace("engine-", "engine-2-")
    elsewhere = tmp_path / f"engine-{child.pid}-abc-xyz"
    for folder in (left, foreign, elsewhere):
        (folder / "policy").mkdir(parents=True)
    again = own_folder(tmp_path, "engine")
    assert set(tmp_path.iterdir()) == {mine, again, foreign, elsewhere}
    shutil.rmtree(mine)


class NeverBack(LocalGroup):
    """A group whose ranks are lost again as they are started again."""

    def rebuild(self):
        raise RanksLost("gone again", 1, "here", 8)


def test_a_loss_while_ranks_are_started_again_is_the_second_one_and_ends_the_run(step):
    def work():
        raise RanksLost("gone", 0, "here", 7)

    with pytest.raises(RanksLost, match=r"gone again\. .* since step 0; a second loss ends the run"):
        Replacement(step.run, NeverBack(None), lambda: None, lambda _: None, lambda: None).within(work)
    lost = [event for event in step.run.events() if event["event"] == "ranks_lost"]
    assert [(event["rank"], event["step"]) for event in lost] == [(0, 1), (1, 1)]


# ----------------------------------------------------------------------------------------------------- ranks under Ray


@pytest.fixture(scope="module")
def own_ray():
    from tasks.workers.ray_cluster import ray_of

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, before["PYTHONPATH"])))
    os.environ["OMP_NUM_THREADS"] = "1"
    with ray_of(None, 4, gpus=False):
        yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def two_ranks(tiny_run, own_ray, tmp_path, request):
    """Two ranks; a test's parameter is a further override."""
    from tasks.workers.pools import ray_ranks

    more = [getattr(request, "param", "trainer.seed=0")]
    cfg = tiny_run("trainer.n_gpus_per_node=2", "ray.rank_timeout_s=6", f"storage.root={tmp_path}", *more)
    with ray_ranks(cfg, total_steps=1) as group:
        yield group


@pytest.mark.slow
def test_ranks_know_their_places_and_what_they_raise_comes_back_as_itself(two_ranks, tmp_path):
    answers = two_ranks.run(ray_tasks.whoami)
    assert [answer[:2] for answer in answers] == [(0, 2), (1, 2)]
    assert [answer[2] for answer in answers] == [one.pid for one in two_ranks.about]
    assert all(answer[3] == 1 for answer in answers)
    with pytest.raises(ValueError, match="seven") as raised:
        two_ranks.run(ray_tasks.raise_on, None, "value")
    assert str(raised.value) == "seven" and "in raise_on" in raised.value.__notes__[0]
    with pytest.raises(StorageError, match="gone"):
        two_ranks.run(ray_tasks.raise_on, None, "storage")
    two_ranks.log_to(tmp_path / "logs")
    two_ranks.run(ray_tasks.nap, 7.0)  # longer than ray.rank_timeout_s: at work is not hanging
    with pytest.raises(ValueError, match="seven"):
        two_ranks.run(ray_tasks.raise_on, None, "value")
    for rank in (0, 1):
        assert "ValueError: seven" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


def gone(pids):
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    return not alive


@pytest.mark.slow
def test_a_rank_that_raises_while_others_wait_for_it_is_told_at_once_and_the_group_is_made_anew(two_ranks):
    pids = [one.pid for one in two_ranks.about]
    started = time.monotonic()
    with pytest.raises(ValueError, match="seven"):
        two_ranks.run(ray_tasks.raise_on, 1, "value")
    assert time.monotonic() - started < 40 and gone(pids)
    with pytest.raises(RanksLost, match=r"rank 1 .* it raised ValueError: seven"):
        two_ranks.run(ray_tasks.whoami)
    two_ranks.rebuild()
    assert [answer[0] for answer in two_ranks.run(ray_tasks.whoami)] == [0, 1]


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_by_its_silence_and_all_are_ended(two_ranks):
    pids = [one.pid for one in two_ranks.about]
    started = time.monotonic()
    with pytest.raises(
        RanksLost, match=r"no sign of life for \d+ s \(ray.rank_timeout_s\): its process is stopped"
    ) as lost:
        two_ranks.run(ray_tasks.hang, 1)
    assert (lost.value.rank, lost.value.pid) == (1, pids[1])
    assert time.monotonic() - started < 40 and gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("two_ranks", ["ray.collective_timeout_s=24"], indirect=True)
def test_a_rank_whose_process_answers_but_whose_computation_is_stuck_is_noticed_and_told_with_its_place(
    two_ranks, tmp_path
):
    os.mkfifo(tmp_path / "pipe")
    pids, started = [one.pid for one in two_ranks.about], time.monotonic()
    with pytest.raises(
        RanksLost, match=r"answers, but has got no further for 3\d s \(ray.collective_timeout_s"
    ) as lost:
        two_ranks.run(ray_tasks.stuck, 1, str(tmp_path / "pipe"), 100)
    assert (lost.value.rank, lost.value.pid) == (1, pids[1])
    assert "in read_for_ever" in lost.value.last_lines
    assert 30 <= time.monotonic() - started < 60 and gone(pids)


@pytest.mark.slow
def test_a_rank_that_crashes_is_told_with_its_signal_and_its_last_lines(two_ranks):
    with pytest.raises(RanksLost, match=r"SIGSEGV|Segmentation fault") as lost:
        two_ranks.run(ray_tasks.crash, 0)
    assert lost.value.rank == 0 and "about to read address 0" in lost.value.last_lines
