"""Schedules on a real Prefect server: served, skipped, queued, cancelled, killed, paused, run now; a real worker."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import yaml
from servers import client_of, wait_until

from flows.prefect_server import prefect_api
from flows.schedules.manage import list_command, pause_command, run_command
from flows.schedules.places import Places
from flows.schedules.pools import deploy_command
from flows.schedules.server import deployment_named, remember_server
from flows.schedules.spec import load_schedules
from flows.slots import holders
from storage import open_run
from tasks.config import OrchestrationConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENCE_S = 600
"""How long anything may take on a machine that is busy with other things."""

LEASE_S = 15.0
"""A time after which a holder that gives no sign of life would have lost a lease. There is none."""

WAITS_FOR_A_FILE = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    while not pathlib.Path({gate!r}).exists():
        time.sleep(0.05)
    return float(ord((solution_str or 'a')[0]) % 2)
"""

GRPOFLOW = [sys.executable, "-c", "from flows.cli import main; main()"]
FAR_AWAY = {"cron": "0 0 1 1 *", "timezone": "UTC"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("schedules") / "runs"


@pytest.fixture(scope="module")
def api(root):
    """A managed server that all tests of this file share, as a folder of runs would have it."""
    with prefect_api(OrchestrationConfig(), root, print) as api:
        assert api.wait_ready(print) is None
        yield api


@pytest.fixture
def gate(tmp_path):
    """Runs stay in their reward stage until this file is there."""
    return tmp_path / "gate"


@pytest.fixture
def write(tiny_run, tmp_path, root, gate, monkeypatch):
    tiny_run()
    (tmp_path / "reward.py").write_text(WAITS_FOR_A_FILE.format(gate=str(gate)))
    monkeypatch.chdir(tmp_path)
    # Processes that are started elsewhere are to import what is tested here.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    def make(*schedules):
        own = ["~trainer.default_local_dir", "reward.timeout_s=1000", "reward.num_workers=1"]
        usual = {"train": ["base.yaml"], "overrides": own}
        path = tmp_path / "schedules.yaml"
        tree = {"storage": {"root": str(root)}, "schedules": [{**usual, **one} for one in schedules]}
        path.write_text(yaml.safe_dump(tree))
        return path

    return make


def without_prefect():
    """The environment of a user's terminal."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}


class Served:
    """A `grpoflow serve` in a process of its own."""

    def __init__(self, path, log):
        self.log = log
        command = [*GRPOFLOW, "serve", str(path)]
        with log.open("a") as output:
            self.process = subprocess.Popen(
                command, cwd=path.parent, env=without_prefect(), stdout=output, stderr=output
            )
        self.mark = len(self.text)

    @property
    def text(self):
        return self.log.read_text()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        assert self.process.wait(PATIENCE_S) == (0 if number == signal.SIGTERM else -number), self.text


@contextlib.contextmanager
def serving(path, log):
    served = Served(path, log)
    try:
        wait_until(lambda: "Serving;" in served.text[served.mark :] or served.process.poll() is not None, PATIENCE_S)
        assert served.process.poll() is None, served.text
        yield served
        if served.process.poll() is None:
            served.stop()
    finally:
        served.process.kill()
        served.process.wait()


def flow_runs(api, name):
    """A schedule's flow runs that are due by now, oldest first."""
    from prefect.client.schemas.filters import DeploymentFilter
    from prefect.client.schemas.sorting import FlowRunSort

    of = DeploymentFilter.model_validate({"name": {"any_": [name]}})
    with client_of(api) as client:
        found = client.read_flow_runs(deployment_filter=of, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=200)
    return [one for one in found if one.expected_start_time <= datetime.now(UTC)]


def states(api, name):
    return [one.state.name for one in flow_runs(api, name)]


def run_now(api, name, **parameters):
    with client_of(api) as client:
        return client.create_flow_run_from_deployment(deployment_named(client, name).id, parameters=parameters)


def state_of(api, flow_run):
    with client_of(api) as client:
        return client.read_flow_run(flow_run.id).state


def wait_for_state(api, flow_run, *names):
    wait_until(lambda: state_of(api, flow_run).name in names, PATIENCE_S)
    return state_of(api, flow_run)


def begun_by(root, name, flow_run):
    """What is known of the start by a flow run; None: there was none."""
    places = Places(root, name)
    records = [places.begun(path.stem) for path in (places.folder / "runs").glob("*.json")]
    return next((one for one in records if one.flow_run_id == str(flow_run.id)), None)


def run_of(root, name, flow_run):
    return open_run(root / "grpoflow" / begun_by(root, name, flow_run).name)


def in_reward(root, name, flow_run):
    """Whether the run of a flow run has sampled and is scoring."""
    begun = begun_by(root, name, flow_run)
    folder = root / "grpoflow" / begun.name if begun else None
    if folder is None or not (folder / "run.json").exists():
        return False
    stages = open_run(folder).step(1).stages()
    return {"old_log_probs", "ref_log_probs"} <= set(stages) and "rewards" not in stages


def holder(root, name):
    [one] = holders(Places(root, name).busy(None), 1)
    return one


def flow_process_of(pid):
    """The flow run's process above a run's process."""
    return psutil.Process(pid).parent()


# ------------------------------------------------------------------------------------------------------ its own times


def test_served_times_begin_runs_skip_while_one_runs_and_go_on_after_servers_and_serve_are_gone(
    api, root, write, gate, tmp_path
):
    every_s, stale_s = 20.0, 90.0
    path = write({"name": "often", "interval_s": every_s, "stale_after_s": stale_s})
    log = tmp_path / "serve.log"
    with serving(path, log) as served:
        # One runs, and the next two times are skipped.
        def skipped():
            return [one for one in flow_runs(api, "often") if "still runs: process" in (one.state.message or "")]

        wait_until(lambda: len(skipped()) >= 2, PATIENCE_S)
        assert {one.state.name for one in skipped()} == {"Skipped"}
        first = next(one for one in flow_runs(api, "often") if one.state.name == "Running")
        gate.touch()
        wait_for_state(api, first, "Completed")
        wait_until(lambda: states(api, "often").count("Completed") >= 2, PATIENCE_S)

        # The server is killed; serve starts it again, and times go on.
        done = states(api, "often").count("Completed")
        killed = psutil.Process(yaml.safe_load((root / ".prefect" / "server.json").read_text())["pid"])
        killed.kill()
        wait_until(lambda: not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE, 20)
        wait_until(api.answers, PATIENCE_S)
        moment = datetime.now(UTC)

        def completed_later():
            later = [one for one in flow_runs(api, "often") if one.expected_start_time > moment]
            return any(one.state.name == "Completed" for one in later)

        wait_until(completed_later, PATIENCE_S)
        assert states(api, "often").count("Completed") > done
        served.stop()
    ended = datetime.now(UTC)
    runs = [one for one in flow_runs(api, "often") if one.expected_start_time < ended]
    assert {one.state.name for one in runs} <= {"Completed", "Skipped", "Cancelled", "Scheduled", "Late", "Crashed"}
    begun = {one.name: one for one in map(Places(root, "often").begun, names_begun(root, "often"))}
    assert len(begun) == len({one.due for one in begun.values()}), "each time has a run of its own"
    late = [(moment_of(one.began) - moment_of(one.due)).total_seconds() for one in begun.values()]
    print("seconds from a time to the start of its process:", [round(one, 1) for one in sorted(late)])
    assert min(late) >= 0
    with client_of(api) as client:
        deployment = deployment_named(client, "often")
    assert not deployment.paused, "whether it is paused is for its users to say"

    # Nobody serves it for a while: what is too late by then is skipped, and told; the next time begins a run.
    wait_until(lambda: (datetime.now(UTC) - ended).total_seconds() > stale_s + 2 * every_s, PATIENCE_S)
    with serving(path, log) as served:
        assert "times since" in served.text and "were missed and are skipped" in served.text
        missed = [one for one in flow_runs(api, "often") if (one.state.message or "").startswith("missed:")]
        assert len(missed) >= 2
        again = datetime.now(UTC)
        wait_until(
            lambda: any(
                one.state.name == "Completed" and one.start_time and one.start_time > again
                for one in flow_runs(api, "often")
            ),
            PATIENCE_S,
        )
        # Retried by hand in Prefect, a run is never too late.
        wait_until(lambda: retried(api, missed[0]), PATIENCE_S)


def retried(api, flow_run):
    """Have a flow run tried again, until it finds that no other one runs; whether it is done."""
    from prefect.states import AwaitingRetry

    state = state_of(api, flow_run)
    if state.name == "Skipped":
        with client_of(api) as client:
            client.set_flow_run_state(flow_run.id, AwaitingRetry(scheduled_time=datetime.now(UTC)), force=True)
    time.sleep(1.0)
    return state.name == "Completed"


def names_begun(root, name):
    return [path.stem for path in (Places(root, name).folder / "runs").glob("*.json")]


def moment_of(text):
    return datetime.fromisoformat(text)


# ----------------------------------------------------------------------------- queues, kills, cancelling (B48, B60)


def test_a_queue_survives_every_way_in_which_its_holder_ends_and_keeps_one_that_is_merely_busy(
    api, root, write, gate, tmp_path
):
    path = write({"name": "queued", "when_busy": "queue", **FAR_AWAY})
    with serving(path, tmp_path / "serve.log") as served:
        first = run_now(api, "queued")
        wait_until(lambda: in_reward(root, "queued", first), PATIENCE_S)
        second = run_now(api, "queued")
        wait_for_state(api, second, "Waiting")
        third, fourth = run_now(api, "queued"), None
        wait_for_state(api, third, "Waiting")
        assert "still runs: process" in state_of(api, second).message

        # B60 a, B48: the training is killed in its reward stage. The next one begins at once.
        killed = holder(root, "queued").pid
        os.kill(killed, signal.SIGKILL)
        at = time.monotonic()
        wait_until(lambda: begun_by(root, "queued", second), PATIENCE_S)
        print(f"the next run began {time.monotonic() - at:.1f} s after its predecessor was killed")
        assert time.monotonic() - at < 20, "the lock is free when its holder is dead"
        crashed = wait_for_state(api, first, "Crashed")
        assert "killed by SIGKILL" in crashed.message
        assert "in step 1 after" in crashed.message and "rollouts" in crashed.message
        assert "go on with: grpoflow resume" in crashed.message
        run = run_of(root, "queued", first)
        status = subprocess.run(
            [*GRPOFLOW, "status", str(run.root)],
            env=without_prefect(),
            capture_output=True,
            text=True,
        )
        assert "crashed" in status.stdout and "rollouts" in status.stdout, status.stdout

        # B48: now the flow run's own process is killed. Its training is told to end, and the next one begins.
        wait_until(lambda: in_reward(root, "queued", second), PATIENCE_S)
        training = holder(root, "queued").pid
        flow_process_of(training).kill()
        wait_until(lambda: begun_by(root, "queued", third), PATIENCE_S)
        assert wait_for_state(api, second, "Crashed").message
        assert run_of(root, "queued", second).step(1).stages() >= ["prompts"]

        # B60 b: a holder that gives no sign of life for three leases keeps its slot, and is not killed.
        wait_until(lambda: in_reward(root, "queued", third), PATIENCE_S)
        fourth = run_now(api, "queued")
        wait_for_state(api, fourth, "Waiting")
        busy = psutil.Process(holder(root, "queued").pid)
        busy.suspend()
        time.sleep(3 * LEASE_S)
        assert holder(root, "queued").pid == busy.pid and busy.is_running()
        assert state_of(api, third).name == "Running" and state_of(api, fourth).name == "Waiting"
        assert begun_by(root, "queued", fourth) is None
        busy.resume()

        # Cancelled in Prefect while it runs: it ends politely, and can go on.
        cancel(api, third)
        cancelled = wait_for_state(api, third, "Cancelled")
        print("cancelled:", cancelled.message)
        begun = begun_by(root, "queued", third)
        assert (begun.state, "go on with: grpoflow resume" in begun.message) == ("Cancelled", True)
        events = run_of(root, "queued", third).events()
        assert [event["state"] for event in events if event["event"] == "closed"] == ["killed"]

        # Cancelled while it waits.
        wait_until(lambda: in_reward(root, "queued", fourth), PATIENCE_S)
        fifth = run_now(api, "queued")
        wait_for_state(api, fifth, "Waiting")
        cancel(api, fifth)
        wait_for_state(api, fifth, "Cancelled")
        assert begun_by(root, "queued", fifth) is None
        gate.touch()
        assert wait_for_state(api, fourth, "Completed").message.startswith(begun_by(root, "queued", fourth).name)
        served.stop()

    # B48: the first one goes on at its reward stage.
    rollouts = run.step(1).manifest("rollouts")
    resumed = subprocess.run(
        [*GRPOFLOW, "resume", str(run.root)],
        env=without_prefect(),
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert run.step(1).manifest("rollouts") == rollouts, "no token was sampled twice"
    assert run.finished_steps() == [1, 2]


def cancel(api, flow_run):
    """As the button in Prefect's UI does."""
    from prefect.states import Cancelling

    with client_of(api) as client:
        client.set_flow_run_state(flow_run.id, Cancelling())


# ------------------------------------------------------------------------------------------- pause, list, run now


def test_pause_belongs_to_the_user_and_a_run_now_is_a_form_that_refuses_what_is_wrong(
    api, root, write, gate, tmp_path, capsys
):
    gate.touch()
    path = write({"name": "rarely", **FAR_AWAY, "timezone": "Europe/Berlin"})
    log = tmp_path / "serve.log"
    said = []
    with serving(path, log) as served:
        second = subprocess.run(
            [*GRPOFLOW, "serve", str(path)],
            env=without_prefect(),
            capture_output=True,
            text=True,
        )
        assert second.returncode == 2
        assert "schedule rarely is served already, by process" in second.stderr
        assert pause_command(root, "rarely", True, said.append) == 0
        served.stop()
    with serving(path, log) as served:
        assert "cron 0 0 1 1 * (Europe/Berlin), paused" in served.text[served.mark :]
        with client_of(api) as client:
            assert deployment_named(client, "rarely").paused, "to serve it again does not end the user's pause"
            schema = deployment_named(client, "rarely").parameter_openapi_schema["properties"]
        assert set(schema) == {"steps", "seed", "experiment_name", "overrides"}
        assert "trainer.total_training_steps" in str(schema["steps"])

        count = len(flow_runs(api, "rarely"))
        for word in ("steps=0", "steps=few", "seed=1.5", "experiment_name=a/b"):
            field = word.partition("=")[0]
            with pytest.raises(ValueError, match=f"rarely cannot be run with {word}: .*field '{field}'"):
                run_command(root, "rarely", [word], said.append)
        with pytest.raises(ValueError, match="rarely cannot be run with not an override"):
            run_command(root, "rarely", ["not an override"], said.append)
        with pytest.raises(ValueError, match=r"there is no schedule 'rare'; there are: .*rarely"):
            run_command(root, "rare", [], said.append)
        assert len(flow_runs(api, "rarely")) == count, "what is refused makes no run"

        # A paused schedule runs when it is told to.
        assert run_command(root, "rarely", ["steps=1", "experiment_name=by-hand", "trainer.seed=9"], said.append) == 0
        flow_run = flow_runs(api, "rarely")[-1]
        wait_for_state(api, flow_run, "Completed")
        run = open_run(root / "grpoflow" / "by-hand")
        assert run.finished_steps() == [1]
        # Words that the form cannot judge are refused by the run, before it exists.
        run_command(root, "rarely", ["trainer.seeed=1"], said.append)
        failed = wait_for_state(api, flow_runs(api, "rarely")[-1], "Failed")
        assert "refused: " in failed.message and "trainer.seed" in failed.message
        # A name is one run's.
        run_command(root, "rarely", ["experiment_name=by-hand"], said.append)
        failed = wait_for_state(api, flow_runs(api, "rarely")[-1], "Failed")
        assert "by-hand was begun by another flow run" in failed.message

        said.clear()
        assert list_command(root, False, said.append) == 0
        text = "\n".join(said)
        assert "rarely: paused, served by process" in text and "last by-hand" in text and "Completed" in text
        pause_command(root, "rarely", False, said.append)
        said.clear()
        wait_until(lambda: next_times(root, said), PATIENCE_S)
        assert "01-01 00:00:00 +0100 Europe/Berlin" in "\n".join(said)


def next_times(root, said):
    said.clear()
    list_command(root, False, said.append)
    block = "\n".join(said).split("rarely:")[1]
    return "next " in block.split(": served")[0]


# ------------------------------------------------------------------------------------------------------- work pools


def test_a_real_worker_of_a_process_pool_starts_what_was_deployed(api, root, write, gate, tmp_path):
    gate.touch()
    path = write({"name": "pooled", **FAR_AWAY})
    said = []
    assert deploy_command(path, "here", "process", None, None, 0, None, said.append) == 0
    assert any("prefect worker start --pool here" in line for line in said)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "here", "--type", "process"]
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        flow_run = run_now(api, "pooled", steps=1)
        state = wait_for_state(api, flow_run, "Completed", "Failed", "Crashed")
        assert state.name == "Completed", (state.message, (tmp_path / "worker.log").read_text())
        assert run_of(root, "pooled", flow_run).finished_steps() == [1]
    finally:
        # Prefect's own worker does not end at SIGTERM where it was started with SIGINT ignored, as scripts do.
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_files_for_containers_are_taken_by_prefects_own_command_and_server(api, root, write, tmp_path, kind):
    path = write({"name": f"in-{kind}", "cron": "30 2 * * *", "timezone": "Europe/Berlin"})
    output, said, pool = tmp_path / "prefect.yaml", [], f"pool-{kind}"
    claim = "runs" if kind == "kubernetes" else None
    assert deploy_command(path, pool, kind, "me/grpoflow:1", claim, 0, output, said.append) == 0
    for words in (
        ["work-pool", "create", pool, "--type", kind, "--base-job-template", str(tmp_path / "prefect-pool.json")],
        ["--no-prompt", "deploy", "--all", "--prefect-file", str(output)],
    ):
        done = subprocess.run([sys.executable, "-m", "prefect", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    with client_of(api) as client:
        deployment = deployment_named(client, f"in-{kind}")
        made = client.read_work_pool(pool)
    assert made.type == kind
    assert deployment.entrypoint == "flows.schedules.flow.scheduled_train"
    assert [(one.schedule.cron, one.schedule.timezone) for one in deployment.schedules] == [
        ("30 2 * * *", "Europe/Berlin")
    ]
    assert deployment.job_variables["image"] == "me/grpoflow:1"
    assert deployment.work_pool_name == pool
    assert set(deployment.parameter_openapi_schema["properties"]) == {"steps", "seed", "experiment_name", "overrides"}
    assert deployment.global_concurrency_limit.limit == 1


def test_a_folder_without_schedules_says_so(tmp_path):
    with pytest.raises(ValueError, match="has no schedules: serve a file of them with `grpoflow serve FILE`"):
        list_command(tmp_path, False, print)


def test_the_server_of_a_folder_is_remembered(write, root, api, tmp_path):
    remember_server(load_schedules(write({"name": "x", **FAR_AWAY})), api)
    assert yaml.safe_load((Path(root) / ".schedules" / "server.json").read_text()) == {"api_url": None}
