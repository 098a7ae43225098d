"""How a run with ranks under its own Ray ends when it is told to, or killed: what is left, and that it goes on."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from tiny_runs import digest, run, tokens

from storage import open_run

pytestmark = pytest.mark.slow

CLI = "from flows.cli import main; main()"
LONG = ("trainer.n_gpus_per_node=2", "trainer.total_training_steps=500", "trainer.save_freq=-1")
SHARED_MEMORY = Path("/dev/shm")


class Held:
    """A run in processes of its own, all of which carry a mark."""

    def __init__(self, cfg_file: Path, root: Path) -> None:
        self.root, self.mark, self.pids = root, uuid4().hex, set[int]()
        self._file, self._place = cfg_file, f"trainer.default_local_dir={root}"
        self.output = cfg_file.with_name("output.txt")

    def start(self, *overrides: str) -> None:
        """Train as on the command line; in a process group of its own, as a shell's job."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPOFLOW_TEST_MARK": self.mark}
        words = ["train", str(self._file), self._place, *overrides]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CLI, *words],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def await_step(self, step: int) -> None:
        """Until a step has begun."""
        deadline = time.monotonic() + 400
        while not (self.root / "steps" / f"{step:06d}").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        self.pids |= {one.pid for one in self.living()}

    def end(self) -> int:
        """Wait for its exit code."""
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.output.read_text()}") from None

    def living(self) -> list[psutil.Process]:
        """Its processes that are there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get("GRPOFLOW_TEST_MARK") == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left(self) -> list[str]:
        """Processes, and files outside the run's folder, that should be gone."""
        psutil.wait_procs(self.living(), timeout=30)
        places = [SHARED_MEMORY, Path(tempfile.gettempdir()), Path("/tmp"), self._file.parent / "runs" / ".ranks"]
        files = [path for place in places if place.is_dir() for path in place.iterdir()]
        names = tuple(f"{name}-{pid}-" for name in ("gf", "grpoflow-vllm", socket.gethostname()) for pid in self.pids)
        ours = [path for path in files if path.name.startswith(names)]
        return [*map(str, ours), *(f"{one.pid} {one.cmdline()}" for one in self.living())]


@pytest.fixture
def held(tiny_run, tmp_path):
    tiny_run()
    one = Held(tmp_path / "base.yaml", tmp_path / "run")
    yield one
    for process in one.living():
        with contextlib.suppress(psutil.Error):
            process.kill()


def assert_nothing_half_done(held, state):
    there = open_run(held.root)
    assert there.state == state and (state == "crashed" or not list(held.root.rglob("*.aside")))
    for step in held.root.glob("steps/*"):
        for stage in there.step(int(step.name)).stages():
            assert there.step(int(step.name)).artifact(stage) is not None
    return there


def sent_to_all(process, number):
    os.killpg(process.pid, number)


def sent_to_one(process, number):
    process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGTERM, sent_to_one), (signal.SIGINT, sent_to_all), (signal.SIGTERM, sent_to_all)],
)
def test_a_signal_ends_a_run_with_ranks_politely_and_leaves_nothing_but_the_run(held, tmp_path, number, send):
    """A terminal sends Ctrl-C to the whole job; so do batch systems with SIGTERM, and Ray's processes obey it."""
    held.start(*LONG)
    held.await_step(2)
    assert len([one for one in held.living() if one.name().startswith("ray::RankProcess")]) == 2
    send(held.process, number)
    told = f"it said:\n{held.output.read_text()}"
    assert held.end() == 128 + number, held.output.read_text()
    output = held.output.read_text()
    assert "the stage in flight may finish" in output and "go on with: grpoflow resume" in output, told
    assert "Traceback" not in output and "started again" not in output, output
    there = assert_nothing_half_done(held, "killed")
    assert held.left() == [] and there.finished_steps()[:1] == [1]


def test_a_second_signal_ends_a_run_with_ranks_at_once(held):
    held.start(*LONG, "trainer.stop_grace_s=300")
    held.await_step(2)
    for process in held.living():
        if process.name().startswith("ray::RankProcess"):
            process.suspend()
    held.process.send_signal(signal.SIGINT)
    time.sleep(1)
    asked = time.monotonic()
    held.process.send_signal(signal.SIGINT)
    assert held.end() == 130, held.output.read_text()
    assert time.monotonic() - asked < 40
    assert_nothing_half_done(held, "killed")
    assert held.left() == []


def test_a_run_whose_driver_was_killed_with_9_goes_on_with_one_rank_by_repeating_updates(held, tiny_run, tmp_path):
    """Without any checkpoint: the updates that two ranks made are repeated by one, equal up to rounding."""
    held.start(*LONG)
    held.await_step(4)
    held.process.kill()
    held.process.wait()
    psutil.wait_procs(held.living(), timeout=30)
    there = assert_nothing_half_done(held, "crashed")
    last = max(there.finished_steps())
    committed = {stage: there.step(last + 1).manifest(stage).digest for stage in there.step(last + 1).stages()}
    ways = ("trainer.n_gpus_per_node=1", "trainer.save_freq=-1", f"trainer.total_training_steps={last + 1}")
    before = [digest(there, step) for step in range(1, last + 1)]
    gone_on, told = run(tiny_run(*ways, f"trainer.default_local_dir={held.root}"))
    assert f"the initial weights, updates 1 to {last} made again from the stored batches" in told
    assert "in other places: equal up to rounding" in told
    assert gone_on.finished_steps() == list(range(1, last + 2))
    assert [digest(gone_on, step) for step in range(1, last + 1)] == before
    assert {stage: gone_on.step(last + 1).manifest(stage).digest for stage in committed} == committed
    assert len(tokens(gone_on, last + 1)) == 32
    held.start("trainer.n_gpus_per_node=2", "trainer.save_freq=-1", f"trainer.total_training_steps={last + 2}")
    assert held.end() == 0, held.output.read_text()
    assert held.left() == [] and open_run(held.root).finished_steps() == list(range(1, last + 3))
