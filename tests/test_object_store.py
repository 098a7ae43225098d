"""Runs in an object store: a real SeaweedFS, kills, another machine's cache, an outage."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from object_store import object_store
from rich.console import Console
from servers import wait_until
from tiny_runs import digest, run

from flows.config import load_config, to_yaml
from flows.doctor.services import check_store
from flows.doctor.subject import Subject
from flows.run_folder import run_folder
from flows.schedules.spec import configuration, load_schedules, served
from flows.show import ls
from flows.sweep.book import open_sweep
from flows.sweep.table import as_json
from storage import RunLocked, RunWriter, StorageError, open_run
from storage import lease as leases
from storage.artifacts import check_parts, read_manifest
from storage.copies import copy_of, local_folder
from storage.durable import sha256_file
from storage.mirror import hold
from storage.object_store import Bucket, parse_url
from storage.transfer import copy_run

STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with object_store(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """The server, with its credentials in the environment and a cache of this test's own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GRPOFLOW_CACHE", str(tmp_path / "cache"))
    return server


def in_store(tiny_run, name, *overrides):
    """The configuration of a tiny run at s3://team/<name>/toy/run."""
    place = (f"storage.root=s3://team/{name}", "trainer.project_name=toy", "trainer.experiment_name=run")
    return tiny_run(*STEPS, "~trainer.default_local_dir", *place, *overrides)


def another_machine(monkeypatch, tmp_path, name="other"):
    monkeypatch.setenv("GRPOFLOW_CACHE", str(tmp_path / name))


def keys(server, prefix):
    return {one.key.removeprefix(f"{prefix}/") for one in server.bucket.list(prefix)}


def test_a_run_in_the_store_is_the_run_on_the_disk_file_by_file(store, tiny_run, tmp_path):
    here, _ = run(tiny_run(*STEPS))
    there, _ = run(in_store(tiny_run, "same"))
    assert digest(there, 3) == digest(here, 3)
    copy = copy_of(there.root)
    assert copy.url == "s3://team/same/toy/run" and there.root.is_relative_to(tmp_path / "cache")
    # What lies in the store is what lies here, and nothing else; of three checkpoints the last is kept in both.
    assert keys(store, "same/toy/run") == {*copy.files(), "lease.json"}
    assert {name.split("/")[1] for name in copy.files() if name.startswith("checkpoints/")} == {"000003"}
    for name, path in copy.files().items():
        assert store.bucket.get(f"same/toy/run/{name}")[0] == path.read_bytes(), name
    assert json.loads(store.bucket.get("same/toy/run/lease.json")[0])["released"] is True


def test_another_machine_reads_a_run_and_fetches_rows_only_when_they_are_asked_for(
    store, tiny_run, tmp_path, monkeypatch
):
    first, _ = run(in_store(tiny_run, "read"))
    rows = first.step(2).table("rollouts").to_pylist()
    another_machine(monkeypatch, tmp_path)
    found = open_run("s3://team/read/toy/run")
    assert found.root != first.root and found.finished_steps() == [1, 2, 3] and found.state == "finished"
    assert not list(found.root.rglob("*.arrow")) and not list(found.root.rglob("*.safetensors"))
    assert found.step(2).table("rollouts").to_pylist() == rows
    assert len(list(found.root.rglob("*.arrow"))) == 1
    # An object that was changed in the store is refused by its digest.
    manifest = read_manifest(found.step(3).used("rewards"))
    name = f"read/toy/run/steps/000003/rewards/0001/{manifest.parts[0].name}"
    value = bytearray(store.bucket.get(name)[0])
    value[len(value) // 2] ^= 1
    store.bucket.put(name, bytes(value))
    with pytest.raises(StorageError, match="has changed since it was committed"):
        check_parts(found.step(3).used("rewards"), manifest)


@pytest.mark.slow
def test_a_run_killed_on_one_machine_goes_on_on_another_and_ends_with_the_same_weights(
    store, tiny_run, tmp_path, monkeypatch
):
    whole, _ = run(tiny_run(*STEPS))
    cfg = in_store(tiny_run, "moved")
    kill_at(cfg, tmp_path, "steps/000002/rewards/0001/manifest.json")
    root = local_folder("s3://team/moved/toy/run")
    made = {name: sha256_file(root / name) for name in copy_of(root).files() if "/rollouts/" in name}
    another_machine(monkeypatch, tmp_path)
    gone_on = run(cfg)[0]
    assert digest(gone_on, 3) == digest(whole, 3)
    assert gone_on.root != root and gone_on.state == "finished"
    # No rollouts were made a second time.
    assert not [name for name in keys(store, "moved/toy/run") if "/rollouts/0002/" in name]
    assert all(
        store.bucket.get(f"moved/toy/run/{name}")[0] == (root / name).read_bytes()
        for name in made
        if name.startswith("steps/000001/")
    )
    # The first machine's copy is the older one now: it takes the store's state, and keeps nothing that is in doubt.
    monkeypatch.setenv("GRPOFLOW_CACHE", str(tmp_path / "cache"))
    again = open_run("s3://team/moved/toy/run")
    assert again.root == root and again.finished_steps() == [1, 2, 3]
    assert again.step(3).table("updates").num_rows == gone_on.step(3).table("updates").num_rows


def kill_at(cfg, tmp_path, file):
    """Train in a process of its own, and kill it with -9 once a file is committed on its machine."""
    path = tmp_path / "cfg.yaml"
    path.write_text(to_yaml(cfg))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", str(path)], stdout=log, stderr=log, cwd=Path.cwd()
        )
    root = local_folder("s3://team/moved/toy/run") if "moved" in cfg.storage.root else cfg.storage.folder / "toy/run"
    try:
        wait_until(lambda: (root / file).exists() or process.poll() is not None, 240)
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_the_same_machine_brings_after_a_kill_what_had_not_reached_the_store(store, tiny_run, tmp_path):
    cfg = in_store(tiny_run, "late")
    kill_at(cfg, tmp_path, "steps/000002/rollouts/0001/manifest.json")
    root = local_folder("s3://team/late/toy/run")
    # As if the store had been a little further behind.
    behind = [name for name in keys(store, "late/toy/run") if name.startswith("steps/000002/")]
    store.bucket.delete([f"late/toy/run/{name}" for name in behind])
    made = sha256_file(next(root.glob("steps/000002/rollouts/0001/*.arrow")))
    gone_on, _ = run(cfg)
    assert sha256_file(next(gone_on.root.glob("steps/000002/rollouts/0001/*.arrow"))) == made
    assert keys(store, "late/toy/run") == {*copy_of(root).files(), "lease.json"}


def test_two_writers_on_two_machines_the_second_is_refused_and_a_silent_one_is_followed(store, tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "LEASE_S", 3.0)
    # Each on a machine of its own, as far as leases can tell.
    monkeypatch.setattr(leases, "this_machine", lambda: "one")
    place = local_folder("s3://team/two/toy/run")
    first = RunWriter.create(place, "run")
    another_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(leases, "this_machine", lambda: "two")
    other = local_folder("s3://team/two/toy/run")
    assert open_run("s3://team/two/toy/run").owner()["pid"] == os.getpid()
    with pytest.raises(RunLocked, match="s3://team/two/toy/run is being written by process"):
        RunWriter(other)
    # The first falls silent: as if its machine were cut off.
    first.mirror._lease.renew = lambda: None
    second = RunWriter(other)
    second.append("hello")
    wait_until(lambda: second.mirror.behind == 0, 30)
    # It wakes up, and finds that the run is another's.
    del first.mirror._lease.renew
    wait_until(lambda: first.mirror._lost is not None, 30)
    with pytest.raises(RunLocked, match="is process"):
        first.append("too late")
    with pytest.raises(RunLocked):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    events = [event["event"] for event in map(json.loads, store.bucket.get("two/toy/run/ledger.jsonl")[0].splitlines())]
    assert events == ["hello"]


@pytest.mark.slow
def test_training_goes_on_while_the_store_is_away_and_it_catches_up(store, tiny_run, tmp_path):
    cfg = in_store(tiny_run, "away")
    path = tmp_path / "cfg.yaml"
    path.write_text(to_yaml(cfg))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", str(path)], stdout=log, stderr=log, cwd=Path.cwd()
        )
    root = local_folder("s3://team/away/toy/run")
    wait_until(lambda: (root / "steps/000001/rollouts/0001/manifest.json").exists() or process.poll() is not None, 240)
    store.kill()
    try:
        wait_until(lambda: (root / "steps/000003/step.json").exists() or process.poll() is not None, 240)
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
    finally:
        store.start()
    assert process.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    told = (tmp_path / "log").read_text()
    assert "cannot be reached" in told and "takes files again" in told
    assert keys(store, "away/toy/run") == {*copy_of(root).files(), "lease.json"}
    assert open_run(root).finished_steps() == [1, 2, 3]


@pytest.mark.slow
def test_a_sweep_killed_on_one_machine_ends_on_another_with_the_table_of_one_on_the_disk(
    store, tiny_run, tmp_path, monkeypatch
):
    tiny_run()
    spec = {
        "name": "s",
        "base": [str(tmp_path / "base.yaml")],
        "space": {"actor_rollout_ref.actor.optim.lr": {"choice": [1e-3, 1e-2]}},
        "sampler": {"kind": "grid"},
        "objective": {"metric": "critic/score/mean"},
    }

    def start(name, *overrides):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**spec, "overrides": [*STEPS, *overrides]}))
        log = path.with_suffix(".log").open("a")
        words = [sys.executable, "-m", "flows.cli", "sweep", str(path)]
        return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def table(place):
        names = ("trial", "values", "state", "value", "runs", "step", "trained_steps")
        return [{name: row[name] for name in names} for row in as_json(open_sweep(place))["trials"]]

    assert start("disk").wait(300) == 0, (tmp_path / "disk.log").read_text()
    cut = start("there", "storage.root=s3://team/sweep")
    first = local_folder("s3://team/sweep/grpoflow/s-0000-s0")
    wait_until(lambda: (first / "steps/000002/step.json").exists() or cut.poll() is not None, 240)
    assert cut.poll() is None, (tmp_path / "there.log").read_text()
    kill_tree(cut.pid)
    cut.wait()
    another_machine(monkeypatch, tmp_path)
    assert open_sweep("s3://team/sweep/grpoflow/s.sweep").state == "crashed"
    assert start("there", "storage.root=s3://team/sweep").wait(300) == 0, (tmp_path / "there.log").read_text()
    assert table("s3://team/sweep/grpoflow/s.sweep") == table(tmp_path / "runs/grpoflow/s.sweep")
    # The first trial went on from what it had put into the store.
    assert not [name for name in keys(store, "sweep/grpoflow/s-0000-s0") if "steps/000001/rollouts/0002" in name]
    another_machine(monkeypatch, tmp_path, "reader")
    assert table("s3://team/sweep/grpoflow/s.sweep") == table(tmp_path / "runs/grpoflow/s.sweep")


def kill_tree(pid):
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def test_a_run_is_copied_between_disk_and_store_with_its_digests(store, tiny_run, tmp_path, monkeypatch):
    here, _ = run(tiny_run(*STEPS))
    files, size = copy_run(here.root, Path("s3://team/copied/run"))
    assert files == len([name for name in keys(store, "copied/run") if name != "lease.json"]) and size > 0
    another_machine(monkeypatch, tmp_path)
    copy_run(Path("s3://team/copied/run"), tmp_path / "back")
    back = open_run(tmp_path / "back")
    for path in here.root.rglob("*"):
        name = path.relative_to(here.root)
        if path.is_file() and name.name != "lock":
            assert (back.root / name).read_bytes() == path.read_bytes(), name
    with pytest.raises(StorageError, match="is there already"):
        copy_run(here.root, Path("s3://team/copied/run"))
    damaged = next((back.root / "steps").rglob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(StorageError, match="bytes but was committed"):
        copy_run(back.root, Path("s3://team/copied/damaged"))
    assert not [name for name in keys(store, "copied/damaged") if name != "lease.json"]


def test_retention_removes_rows_in_the_store_that_this_machine_never_had(store, tiny_run, tmp_path, monkeypatch):
    run(in_store(tiny_run, "kept", "trainer.max_actor_ckpt_to_keep=3"))
    another_machine(monkeypatch, tmp_path)
    from flows.gc import gc_command

    root = local_folder("s3://team/kept/toy/run")
    rule = ["storage.retention.keep=last", "storage.retention.steps=1"]
    gc_command(root, rule, dry_run=False, lineages=False, as_json=False, console=Console())
    left = {name for name in keys(store, "kept/toy/run") if name.endswith(".arrow")}
    assert left and all(name.startswith(("steps/000003/", "steps/000002/")) for name in left)
    with pytest.raises(StorageError, match="were dropped on"):
        open_run(root).step(1).table("rollouts")


@pytest.mark.parametrize("url", ["s3://", "s3://B/x", "s3://team/../x", "s3://team/a//b", "s3://team/./x", "s3://a/\0"])
def test_a_place_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="no place in an object store"):
        parse_url(url)


def test_a_folder_that_only_says_it_is_a_copy_is_none(store, tmp_path):
    # Credentials are never used on a server that a folder from elsewhere names.
    shutil.copytree(local_folder("s3://team/x").parent, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "run").mkdir()
    assert copy_of(tmp_path / "elsewhere" / "run") is None and hold(tmp_path / "elsewhere" / "run") is None


def test_what_the_store_refuses_is_told(store, monkeypatch):
    with pytest.raises(StorageError, match="has no bucket nobody-made-it"):
        list(Bucket("nobody-made-it", store.endpoint).list("x"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID") as told:
        Bucket("team", store.endpoint).get("x")
    assert "wrong" not in str(told.value)
    with pytest.raises(ValueError, match="without user and password"):
        local_folder("s3://team/x", "http://me:secret@localhost:1")


def test_a_lease_of_a_process_that_is_gone_is_taken_at_once(store, tmp_path):
    place = local_folder("s3://team/gone/toy/run")
    code = (
        "import os, sys; from pathlib import Path; from storage import RunWriter; "
        "RunWriter.create(Path(sys.argv[1]), 'run').append('first'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(place)], check=False).returncode == 9
    began = time.monotonic()
    with RunWriter(place) as writer:
        writer.append("second")
    assert time.monotonic() - began < leases.LEASE_S / 2
    events = [json.loads(line)["event"] for line in store.bucket.get("gone/toy/run/ledger.jsonl")[0].splitlines()]
    assert events == ["first", "second"]


def test_a_copy_that_was_removed_to_make_room_is_brought_again(store, tiny_run):
    cfg = in_store(tiny_run, "room")
    first, _ = run(cfg)
    weights = digest(first, 3)
    shutil.rmtree(first.root)
    again = open_run("s3://team/room/toy/run")
    assert again.finished_steps() == [1, 2, 3] and digest(again, 3) == weights
    shutil.rmtree(first.root)
    with RunWriter(first.root) as writer:
        assert writer.finished_steps() == [1, 2, 3]
    assert "steps/000001/rollouts/0001/manifest.json" in keys(store, "room/toy/run")


def test_the_runs_of_a_store_are_listed_by_another_machine(store, tiny_run, tmp_path, monkeypatch):
    run(in_store(tiny_run, "listed"))
    another_machine(monkeypatch, tmp_path)
    output = io.StringIO()
    ls(local_folder("s3://team/listed"), True, Console(file=output))
    [found] = json.loads(output.getvalue())
    assert (found["path"], found["state"], found["last_step"]) == ("s3://team/listed/toy/run", "finished", 3)


def test_doctor_tries_the_store_and_leaves_nothing_there(store, monkeypatch):
    cfg = load_config([], ["storage.root=s3://team/doctored"])
    (found,) = check_store(Subject(cfg.storage.folder, cfg))
    assert found.status == "ok" and not list(store.bucket.list("doctored-"))
    monkeypatch.setattr(Bucket, "put_if", lambda self, key, value, etag: self.put(key, value))
    (found,) = check_store(Subject(cfg.storage.folder, cfg))
    assert found.status == "error" and "conditional PUT" in found.advice


def test_runs_of_schedules_lie_in_the_store_too(store, tmp_path):
    path = tmp_path / "nightly.yaml"
    one = {"name": "n", "train": ["quickstart"], "interval_s": 3600}
    path.write_text(yaml.safe_dump({"storage": {"root": "s3://team/nights"}, "schedules": [one]}))
    file = load_schedules(path)
    cfg = configuration(served(file, None)["n"], "tonight")
    assert run_folder(cfg) == local_folder("s3://team/nights/quickstart/tonight")
    assert cfg.storage.root == "s3://team/nights" and file.root.is_relative_to(tmp_path / "cache")
