"""Schedules without a server: the file, names, clocks, what becomes of a process, files for work pools."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import yaml

from flows.config import ConfigError, load_config
from flows.schedules import process
from flows.schedules.places import Begun, Places
from flows.schedules.server import times_of
from flows.schedules.spec import Schedule, Served, configuration, load_schedules, refuse_unrunnable, served
from flows.slots import visible_devices
from flows.sweep.spec import base_config, load_sweep

NO_FOLDER = "~trainer.default_local_dir"
"""The configuration of `tiny_run` names a folder, which scheduled runs must not share."""


@pytest.fixture
def write(tiny_run, tmp_path, monkeypatch):
    """Write a schedule file beside a small run's configuration: `write({"cron": …}, …)`."""
    tiny_run()
    monkeypatch.chdir(tmp_path)

    def make(*schedules, **top):
        usual = {"name": "nightly", "train": ["base.yaml"], "overrides": [NO_FOLDER]}
        tree = {"storage": {"root": str(tmp_path / "runs")}, "schedules": [{**usual, **one} for one in schedules]} | top
        path = tmp_path / "schedules.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return make


def refusal_of(path):
    with pytest.raises(ConfigError) as refused:
        load_schedules(path)
    return str(refused.value)


def schedule(**values):
    return Schedule(**{"name": "nightly", "train": ("quickstart",), "interval_s": 60, **values})


def dates(one, start, days):
    """The times that Prefect's server makes of a schedule, by its own clock."""
    from prefect.server.schemas.schedules import CronSchedule, IntervalSchedule

    kind = CronSchedule if one.cron else IntervalSchedule
    on_server = kind.model_validate(times_of(one).model_dump(mode="json"))
    found = asyncio.run(on_server.get_dates(n=100, start=start, end=start + timedelta(days=days)))
    return [datetime.fromtimestamp(time.timestamp(), UTC) for time in found]


# --------------------------------------------------------------------------------------------------------- the file


def test_a_file_may_hold_several_schedules_and_finds_its_files_from_where_it_is(write, tmp_path, monkeypatch):
    path = write(
        {"cron": "30 2 * * *", "timezone": "Europe/Berlin"},
        {"name": "often", "interval_s": 600, "when_busy": "queue"},
        {"name": "look", "train": None, "preflight": ["base.yaml"], "interval_s": 3600},
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = load_schedules(path)
    assert [one.name for one in file.schedules] == ["nightly", "often", "look"]
    assert file.schedules[0].train == (str(tmp_path / "base.yaml"),)
    assert file.schedules[2].kind == "preflight"
    whole = served(file, None)
    assert whole["nightly"].folder == str(tmp_path / "elsewhere")
    assert Served.model_validate_json(whole["often"].model_dump_json()) == whole["often"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "give exactly one of cron, interval_s; it has none"),
        ({"cron": "0 2 * * *", "interval_s": 60}, "it has cron and interval_s"),
        ({"cron": "0 2 * * *"}, "cron needs a timezone, such as Europe/Berlin or UTC: whose clock?"),
        ({"cron": "0 2 * * *", "timezone": "Europe/Berln"}, "do you mean Europe/Berlin?"),
        ({"interval_s": 60, "when_busi": "skip"}, "schedules.0.when_busi"),
        ({"interval_s": 60, "when_busi": "skip"}, "there is no such key; do you mean when_busy?"),
        ({"interval_s": 60, "when_busy": "both"}, "'skip' or 'queue'"),
        ({"interval_s": 0.1}, "greater than or equal to 1"),
        ({"interval_s": 60, "sweep": "a.yaml"}, "give exactly one of train, preflight, sweep; it has train and sweep"),
        ({"interval_s": 60, "train": ["base.yml"]}, "'base.yml' is no file and no recipe"),
        ({"interval_s": 60, "overrides": ["trainer.seeed=1"]}, "trainer.seed"),
        ({"interval_s": 60, "overrides": ["storage.root=x"]}, "storage.root is said at the top of the file"),
        (
            {"interval_s": 60, "overrides": [NO_FOLDER, "actor_rollout_ref.actor.ppo_mini_batch_size=64"]},
            "ppo_mini_batch_size",
        ),
        ({"interval_s": 60, "overrides": []}, "trainer.default_local_dir puts every run into the same folder"),
        ({"interval_s": 60, "experiment_name": "{name}"}, "must have the time in it, such as {scheduled:"),
        ({"interval_s": 60, "experiment_name": "{when}"}, "cannot be filled in"),
        ({"interval_s": 60, "experiment_name": "a/{utc:%Y%m}"}, "cannot be the name of a run"),
        ({"interval_s": 60, "resume": True, "experiment_name": "{utc:%Y%m}"}, "with resume every time goes on"),
        ({"interval_s": 60, "name": "a b"}, "schedules.0.name"),
    ],
)
def test_a_file_is_refused_with_the_key_and_the_way_out(write, values, says):
    assert says in refusal_of(write(values))


def test_every_schedule_that_is_wrong_is_told_at_once(write):
    text = refusal_of(write({"interval_s": 60}, {"interval_s": 60, "train": ["no"]}, {"name": "b", "interval_s": 5}))
    assert "schedules.1.name" in text and "nightly is there twice" in text
    assert "schedules.1.train" in text


def test_what_belongs_to_runs_or_switches_prefect_off_is_refused_at_the_top(write):
    one = {"interval_s": 60}
    assert "schedules need Prefect" in refusal_of(write(one, orchestration={"enabled": False}))
    text = refusal_of(write(one, storage={"root": "runs", "compression": "zstd"}))
    assert "storage.compression" in text and "belongs to the configuration of the runs" in text


def test_a_cron_expression_that_cannot_be_read_is_refused_by_name():
    for text in ("61 2 * * *", "every day", "0 2 * *"):
        with pytest.raises(ValueError, match=f"schedule nightly: cron '{text}' cannot be read".replace("*", r"\*")):
            times_of(schedule(interval_s=None, cron=text, timezone="UTC"))


def test_a_run_is_configured_by_its_schedule_its_time_and_what_was_asked_for_it_alone(write, tmp_path):
    file = load_schedules(write({"interval_s": 60, "overrides": [NO_FOLDER, "trainer.seed=3"]}))
    one = served(file, "http://prefect.example/api")["nightly"]
    cfg = configuration(one, "nightly-1", ("trainer.seed=4",))
    assert (cfg.trainer.experiment_name, cfg.trainer.seed) == ("nightly-1", 4)
    assert cfg.storage.root == str(tmp_path / "runs")
    assert cfg.orchestration.api_url == "http://prefect.example/api"
    refuse_unrunnable(one)
    with pytest.raises(ValueError, match=r"trainer\.seeds"):
        refuse_unrunnable(one, ("trainer.seeds=4",))


# ------------------------------------------------------------------------------------------------------ names, times


def test_names_are_made_from_the_time_on_the_schedules_clock_or_in_utc():
    due = datetime(2026, 7, 1, 0, 30, tzinfo=UTC)
    assert schedule().run_name(due) == "nightly-20260701T003000Z"
    berlin = schedule(timezone="Europe/Berlin", experiment_name="{name}_{scheduled:%m-%d_%H%M}")
    assert berlin.run_name(due) == "nightly_07-01_0230"
    assert schedule(resume=True).run_name(due) == "nightly"


def test_no_two_runs_have_a_name_in_common_when_the_clock_shows_an_hour_twice():
    hourly = schedule(interval_s=3600, timezone="Europe/Berlin")
    times = dates(hourly, datetime(2026, 10, 25, tzinfo=ZoneInfo("Europe/Berlin")), 1)
    assert len(times) == 26, "the day has 25 hours"
    assert len({hourly.run_name(time) for time in times}) == 26


BERLIN, NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")


@pytest.mark.parametrize(
    ("zone", "cron", "day", "expected"),
    [
        # The hour from 2 to 3 does not exist: 02:30 is an hour and a half after 01:00, which the clock calls 03:30.
        (BERLIN, "30 2 * * *", (2026, 3, 28), ["28 02:30+0100", "29 03:30+0200", "30 02:30+0200"]),
        (NEW_YORK, "30 2 * * *", (2026, 3, 7), ["07 02:30-0500", "08 03:30-0400", "09 02:30-0400"]),
        # Two times that come to the same moment are one.
        (BERLIN, "30 2,3 * * *", (2026, 3, 29), ["29 03:30+0200", "30 02:30+0200", "30 03:30+0200"]),
        # The clock shows the hour twice: the time counts once, at the first.
        (BERLIN, "30 2 * * *", (2026, 10, 24), ["24 02:30+0200", "25 02:30+0200", "26 02:30+0100"]),
        (NEW_YORK, "30 1 * * *", (2026, 10, 31), ["31 01:30-0400", "01 01:30-0400", "02 01:30-0500"]),
        # Times outside the hour stay on the clock.
        (BERLIN, "0 9 * * *", (2026, 3, 28), ["28 09:00+0100", "29 09:00+0200", "30 09:00+0200"]),
        (NEW_YORK, "0 9 * * *", (2026, 10, 31), ["31 09:00-0400", "01 09:00-0500", "02 09:00-0500"]),
    ],
)
def test_a_cron_schedule_keeps_to_its_clock_over_the_change_of_summer_time(zone, cron, day, expected):
    one = schedule(interval_s=None, cron=cron, timezone=zone.key)
    times = dates(one, datetime(*day, tzinfo=zone), 3)[:3]
    assert [f"{time.astimezone(zone):%d %H:%M%z}" for time in times] == expected


def test_an_hourly_cron_schedule_pauses_for_two_hours_when_the_clock_goes_back_and_an_interval_does_not():
    start = datetime(2026, 10, 25, 1, tzinfo=BERLIN)
    hourly = dates(schedule(interval_s=None, cron="0 * * * *", timezone="Europe/Berlin"), start, 1)[:4]
    assert [(b - a).total_seconds() / 3600 for a, b in itertools.pairwise(hourly)] == [1, 2, 1]
    interval = dates(schedule(interval_s=3600, timezone="Europe/Berlin"), start, 1)[:4]
    assert [(b - a).total_seconds() / 3600 for a, b in itertools.pairwise(interval)] == [1, 1, 1]


def test_a_day_of_86400_seconds_is_elapsed_time():
    times = dates(schedule(interval_s=86400, timezone="Europe/Berlin"), datetime(2026, 3, 28, 12, tzinfo=BERLIN), 3)
    assert [f"{time:%d %H:%M}" for time in times] == ["29 00:00", "30 00:00", "31 00:00"]


def test_times_of_an_interval_do_not_move_when_it_is_served_again():
    first = dates(schedule(interval_s=1000), datetime(2026, 1, 1, tzinfo=UTC), 0.1)
    again = dates(schedule(interval_s=1000), datetime(2026, 1, 1, 1, tzinfo=UTC), 0.1)
    assert set(first[4:]) <= set(again)


# ------------------------------------------------------------------------------------------- the process of a run


def test_a_sweep_that_runs_on_a_schedule_is_one_of_its_own_each_time(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "base.yaml").write_text("{}")
    path = tmp_path / "here" / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({"sweep": {"name": "lr", "base": ["base.yaml", "quickstart"], "overrides": ["a.b=1"]}})
    )
    one = Served(
        schedule=schedule(train=None, sweep=str(path), overrides=("c.d=2",)), root=str(tmp_path), folder=str(tmp_path)
    )
    words = process.command_words(one, "nightly-7", ["e.f=3"], tmp_path / "made")
    assert words == ["sweep", str(tmp_path / "made" / "nightly-7.yaml")]
    made = yaml.safe_load(Path(words[1]).read_text())
    assert made["name"] == "nightly-7"
    assert made["base"] == [str(tmp_path / "here" / "base.yaml"), "quickstart"]
    assert made["overrides"] == ["a.b=1", "c.d=2", "e.f=3", f"storage.root={tmp_path}"]


def test_the_sweep_file_that_is_made_for_a_time_is_a_sweep_on_the_same_configuration(write, tmp_path):
    space = {"actor_rollout_ref.actor.optim.lr": {"choice": [1e-3, 1e-4]}}
    sweep = {"name": "lr", "base": ["base.yaml"], "overrides": [NO_FOLDER], "space": space}
    sweep |= {"sampler": {"kind": "grid"}, "objective": {"metric": "critic/score/mean"}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    path = write(
        {"train": None, "sweep": "sweep.yaml", "overrides": ["trainer.total_training_steps=1"], "interval_s": 60}
    )
    one = served(load_schedules(path), None)["nightly"]
    _, made = process.command_words(one, "nightly-7", [], tmp_path / "made")
    spec = load_sweep(Path(made))
    cfg = base_config(spec)
    assert (spec.name, cfg.trainer.total_training_steps, cfg.storage.root) == ("nightly-7", 1, str(tmp_path / "runs"))


def test_a_process_that_is_told_to_end_gets_one_signal_however_often_it_is_told():
    class Told(Exception):
        pass

    counts = "import signal, sys, time; hits = []\n"
    counts += "signal.signal(signal.SIGTERM, lambda *_: hits.append(1)); print('ready', flush=True)\n"
    counts += "end = time.time() + 1.5\nwhile time.time() < end: time.sleep(0.05)\nsys.exit(len(hits))"
    child = subprocess.Popen([sys.executable, "-c", counts], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()

    def always():
        raise Told

    assert process.wait(child, always, (Told,))
    assert child.returncode == 1


def test_a_run_ends_politely_when_what_started_it_is_killed(tmp_path):
    """The flow run's process is killed with -9; its child is told to end by the kernel."""
    says = tmp_path / "told"
    child = "import os, signal, sys, time; from flows.child import end_with_parent\n"
    child += f"signal.signal(signal.SIGTERM, lambda *_: (open({str(says)!r}, 'w').write('told'), sys.exit(0)))\n"
    child += "end_with_parent(os.getppid()); print('ready', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    started.kill()
    started.wait()
    deadline = time.monotonic() + 10
    while not says.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert says.read_text() == "told"


def test_the_last_words_of_a_log_are_its_error_with_what_follows(tmp_path):
    log = tmp_path / "log"
    log.write_text("step 1\nerror: the configuration has 1 error:\n- a.b: no\n\n")
    assert process.last_words(log) == "error: the configuration has 1 error:\n- a.b: no"
    log.write_text("step 1\nstep 2\n")
    assert process.last_words(log) == "step 2"
    log.write_text("")
    assert process.last_words(log) == "it printed nothing"


def test_a_slots_devices_are_its_share_of_those_that_are_visible():
    assert visible_devices({}, 1, 2) == "2,3"
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 2) == "6,7"
    with pytest.raises(ValueError, match="slot 1 needs devices 2 to 3, and CUDA_VISIBLE_DEVICES has 3"):
        visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6"}, 1, 2)


def test_places_know_who_lives_and_what_was_begun_last(tmp_path):
    places = Places(tmp_path, "nightly")
    assert places.last() is None and not places.is_alive("a")
    with places.alive("a"):
        assert places.is_alive("a")
    assert not places.is_alive("a")
    holds = (
        "import os, time; from flows.schedules.places import Places\n"
        f"with Places({str(tmp_path)!r}, 'nightly').alive('b'): print(1, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    assert places.is_alive("b")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not places.is_alive("b"), "a process that was killed left its file, and lives no more"
    for hour in (1, 2):
        moment = f"2026-01-01T0{hour}:00:00+00:00"
        begun = places.write(Begun(f"run-{hour}", "x", moment, ("grpoflow",), "log", moment))
    places.write(begun, state="Completed")
    assert (places.last().name, places.last().state) == ("run-2", "Completed")
    assert places.begun("run-1").state is None and places.begun("run-3") is None


# ------------------------------------------------------------------------------------------------------ work pools


@pytest.fixture
def deploy(write, tmp_path, monkeypatch):
    """Write the files of a deployment to containers: `deploy("docker", …)` gives (prefect.yaml, template, said)."""
    from flows.schedules.pools import deploy_command

    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    path = write(
        {"cron": "30 2 * * *", "timezone": "Europe/Berlin"}, {"name": "q", "interval_s": 60, "when_busy": "queue"}
    )

    def make(kind, image="me/grpoflow:1", claim=None, gpus=0, output=tmp_path / "prefect.yaml"):
        said = []
        assert deploy_command(path, "gpus", kind, image, claim, gpus, output, said.append) == 0
        return yaml.safe_load(output.read_text()), json.loads((tmp_path / "prefect-pool.json").read_text()), said

    return make


def test_files_for_kubernetes_mount_the_runs_and_ask_for_gpus(deploy, tmp_path):
    tree, template, said = deploy("kubernetes", claim="runs", gpus=2)
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "runs", "mountPath": str(tmp_path / "runs")}]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    nightly, queued = tree["deployments"]
    assert nightly["schedules"] == [
        {"slug": "times", "active": True, "cron": "30 2 * * *", "timezone": "Europe/Berlin"}
    ]
    assert nightly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert queued["concurrency_limit"]["collision_strategy"] == "ENQUEUE"
    assert nightly["work_pool"]["job_variables"]["image"] == "me/grpoflow:1"
    known = json.loads(nightly["work_pool"]["job_variables"]["env"]["GRPOFLOW_SCHEDULES"])
    assert known["nightly"]["api_url"] == "http://prefect.example:4200/api"
    assert any("prefect --no-prompt deploy --all" in line for line in said)


def test_files_for_docker_mount_runs_and_the_working_directory(deploy, tmp_path):
    tree, _, _ = deploy("docker")
    volumes = tree["deployments"][0]["work_pool"]["job_variables"]["volumes"]
    assert volumes == [f"{tmp_path / 'runs'}:{tmp_path / 'runs'}", f"{tmp_path}:{tmp_path}"]


def test_options_of_deploy_that_do_not_go_together_are_refused(deploy, monkeypatch):
    with pytest.raises(ValueError, match="needs --image IMAGE"):
        deploy("docker", image=None)
    with pytest.raises(ValueError, match="--claim and --gpus are for --type kubernetes"):
        deploy("docker", gpus=1)
    with pytest.raises(ValueError, match="it is one of process, docker, kubernetes"):
        deploy("ecs")
    monkeypatch.delenv("PREFECT_API_URL")
    with pytest.raises(ValueError, match=r"set orchestration\.api_url in the file"):
        deploy("kubernetes")


def test_the_configuration_of_a_scheduled_run_is_that_of_the_command_line(write, tmp_path):
    """The command that a flow run starts is one that a user can give."""
    one = served(load_schedules(write({"interval_s": 60})), None)["nightly"]
    kind, *words = process.command_words(one, "nightly-1", [], tmp_path / "made")
    files = [Path(word) for word in words if "=" not in word and not word.startswith("~")]
    cfg = load_config(files, [word for word in words if Path(word) not in files])
    assert kind == "train"
    assert cfg == configuration(one, "nightly-1")
