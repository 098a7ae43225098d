"""One step in one file: replayed where nothing else of the run is, without what is personal, and opened with care."""

import getpass
import io
import json
import shutil
import socket
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from planted import copy_of
from rich.console import Console
from tiny_runs import digest, run
from typer.testing import CliRunner

from flows.audit.bundle import impersonal_manifest, write_bundle
from flows.audit.bundle.unpack import unpacked
from flows.audit.replay import replay_step
from flows.cli import app
from flows.run_folder import GoBack
from storage import RunWriter, StorageError, open_run
from storage.artifacts import read_manifest
from storage.durable import sha256_json
from storage.retention import Retention, drop, what_to_drop

HELPED = (
    "from rules.parity import parity\n"
    "def compute_score(data_source, solution_str, ground_truth, extra_info, api_key=None):\n"
    "    return parity(solution_str or 'a')\n"
)


@pytest.fixture(scope="module")
def begun(tiny_run_in, tmp_path_factory):
    """Three steps, a checkpoint after the second, a reward function with a helper and a key, in a folder `lab`."""
    folder = tmp_path_factory.mktemp("home") / "lab"
    folder.mkdir()
    make = tiny_run_in(folder)
    cfg = make(
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
        "trainer.test_freq=3",
        "custom_reward_function.reward_kwargs.api_key=hunter2",
    )
    (folder / "reward.py").write_text(HELPED)
    (folder / "rules").mkdir()
    (folder / "rules" / "parity.py").write_text("def parity(text):\n    return float(ord(text[0]) % 2)\n")
    return run(cfg)[0]


@pytest.fixture(scope="module")
def bundles(begun, tmp_path_factory):
    """The bundles of steps 2 and 3, after which the run, its data and its model are not where they were."""
    folder = tmp_path_factory.mktemp("bundles")
    for step in (2, 3):
        write_bundle(begun, step, folder / f"{step}.zip")
    return folder


@pytest.fixture
def gone(begun, bundles):
    """Nothing of the run is where it was, for the time of a test."""
    lab = begun.root.parent
    away = lab.rename(lab.with_name("away"))
    yield bundles
    away.rename(lab)


def replayed(path, *, trusts_code=True, stages=None):
    with unpacked(path) as (the_run, about):
        wanted = stages or [stage for stage in about["stages"] if stage not in ("prompts", "val_prompts")]
        return replay_step(the_run, about["step"], wanted, bundled=True, trusts_code=trusts_code)


def entries(path):
    with zipfile.ZipFile(path) as file:
        return {entry.filename: file.read(entry) for entry in file.infolist()}


def written(path, files, **entry):
    """A zip of these files; `entry`: attributes of the last one."""
    with zipfile.ZipFile(path, "w") as file:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            if name == list(files)[-1]:
                for key, value in entry.items():
                    setattr(info, key, value)
            file.writestr(info, data)
    return path


# ----------------------------------------------------------------------------------------------------------- replaying


@pytest.mark.parametrize("step", [2, 3])
def test_a_bundle_replays_bit_for_bit_where_the_run_its_data_and_its_model_are_gone(begun, gone, tmp_path, step):
    moved = shutil.copy(gone / f"{step}.zip", tmp_path / "from a colleague.zip")
    found = replayed(moved)
    assert {one.stage: one.verdict for one in found if one.verdict != "equal"} == {}
    stages = ["rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates"]
    assert [one.stage for one in found] == stages + (["val_rollouts", "val_rewards"] if step == 3 else [])
    assert all(one.why == "" for one in found)


def test_the_command_makes_and_replays_a_bundle_in_another_process_and_folder(begun, gone, tmp_path):
    shutil.copy(gone / "2.zip", tmp_path / "step.zip")
    words = [sys.executable, "-m", "flows.cli", "replay", "step.zip", "--json"]
    code = "from flows.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words[3:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {row["stage"]: row for row in json.loads(done.stdout)}
    assert {row["verdict"] for stage, row in found.items() if stage != "rewards"} == {"equal"}
    assert found["rewards"]["verdict"] == "cannot"
    assert "it runs code that came in the bundle: rewards/0/reward.py:compute_score" in found["rewards"]["why"]
    assert [path.name for path in tmp_path.iterdir()] == ["step.zip"]


def test_code_in_a_bundle_runs_only_when_it_is_trusted(gone, tmp_path):
    (one,) = replayed(gone / "2.zip", trusts_code=False, stages=["rewards"])
    assert one.verdict == "cannot" and one.why.endswith("Read it there, then add --trust-code")
    (one,) = replayed(gone / "2.zip", trusts_code=True, stages=["rewards"])
    assert one.verdict == "equal"


def test_prompts_of_a_bundle_need_the_data_files_and_say_so(begun, gone):
    (one,) = replayed(gone / "2.zip", stages=["prompts"])
    assert one.verdict == "cannot" and "train.jsonl" in one.why
    data = begun.root.parent.with_name("away") / "train.jsonl"
    with unpacked(gone / "2.zip") as (the_run, _):
        (one,) = replay_step(the_run, 2, ["prompts"], bundled=True, overrides=[f"data.train_files={data}"])
    assert one.verdict == "equal"


def test_an_edited_row_is_found_in_a_bundle_too(begun, tmp_path):
    from planted import rewrite

    copied = copy_of(begun, tmp_path)

    def edit(columns):
        columns["old_log_probs"][7][1] -= 0.01
        return columns

    rewrite(copied, 2, "old_log_probs", edit)
    write_bundle(copied, 2, tmp_path / "edited.zip")
    (one,) = replayed(tmp_path / "edited.zip", stages=["old_log_probs"])
    assert (one.verdict, one.first.row, one.first.token) == ("differs", "000002-0001-003", 1)


def test_a_step_that_was_made_again_later_is_bundled_as_each_history_has_it(tiny_run, tmp_path):
    run(tiny_run())
    cfg = tiny_run("actor_rollout_ref.actor.optim.lr=0.01")
    run(cfg, back=GoBack(2, "updates"))
    root = cfg.trainer.default_local_dir
    for lineage in (1, 2):
        about = write_bundle(open_run(root, lineage), 2, tmp_path / f"{lineage}.zip")
        assert about["lineage"] == lineage
        found = replayed(tmp_path / f"{lineage}.zip")
        assert {one.verdict for one in found} == {"equal"}
        with unpacked(tmp_path / f"{lineage}.zip") as (the_run, _):
            assert digest(the_run, 2) == digest(open_run(root, lineage), 2)


def test_the_first_step_needs_no_checkpoint_and_dynamic_sampling_brings_all_its_calls(tiny_run, tmp_path):
    filtered = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=6")
    the_run, _ = run(tiny_run(*filtered, "data.gen_batch_size=4"))
    for step in (1, 2):
        about = write_bundle(the_run, step, tmp_path / f"{step}.zip")
        names = [name for name in about["files"] if "checkpoints" in name]
        assert bool(names) == (step == 2)
        drawn = [stage for stage in about["stages"] if stage.startswith("prompts-")]
        found = replayed(tmp_path / f"{step}.zip", stages=[s for s in about["stages"] if s not in drawn])
        assert {one.verdict for one in found} == {"equal"} and "prompts" in [one.stage for one in found]


def test_reward_functions_that_are_named_by_module_come_with_their_package(tiny_run, tmp_path, monkeypatch):
    package = tmp_path / "src" / "myrules"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text(
        "from . import letters\nfrom myrules.letters import odd\n"
        "def score(solution_str):\n    return odd(solution_str)\n"
    )
    (package / "letters.py").write_text("def odd(text):\n    return float(ord((text or 'a')[0]) % 2)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    functions = "reward.functions=[{name: 'myrules.words:score'}]"
    the_run, _ = run(tiny_run("custom_reward_function.path=null", functions, "trainer.total_training_steps=1"))
    about = write_bundle(the_run, 1, tmp_path / "step.zip")
    code = {name for name in about["files"] if name.startswith("rewards/")}
    assert code == {f"rewards/0/myrules/{name}.py" for name in ("__init__", "words", "letters")}
    shutil.rmtree(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "myrules.words", raising=False)
    monkeypatch.delitem(sys.modules, "myrules", raising=False)
    done = CliRunner().invoke(
        app, ["replay", str(tmp_path / "step.zip"), "--stage", "reward", "--trust-code", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert [row["verdict"] for row in json.loads(done.stdout)] == ["equal"]


# -------------------------------------------------------------------------------------------------------- what is in it


def test_nothing_in_a_bundle_names_the_machine_the_user_the_folders_or_a_secret(begun, bundles):
    lab = str(begun.root.parent)
    words = {lab, str(begun.root.parent.parent), str(Path.home()), "hunter2", f'"{socket.gethostname()}"'}
    if len(getpass.getuser()) > 4:
        words.add(getpass.getuser())
    for name, data in entries(bundles / "3.zip").items():
        assert not [word for word in words if word.encode() in data], name
    about = json.loads(entries(bundles / "3.zip")["bundle.json"])
    assert about["left_out"] == ["custom_reward_function.reward_kwargs.api_key, which may be a secret"]
    assert {entry.date_time for entry in zipfile.ZipFile(bundles / "3.zip").infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_manifest_keeps_its_digests_valid_without_host_process_and_paths(begun):
    folder = begun.step(2).used("rollouts")
    values = json.loads((folder / "manifest.json").read_text())
    plain = impersonal_manifest(values)
    kept = ("digest", "parts", "parents", "metrics", "shapes", "code_digest", "policy_version", "seconds", "rows")
    assert {name: plain[name] for name in kept} == {name: values[name] for name in kept}
    assert (plain["host"], plain["pid"], plain["lineage"]) == ("", 0, 1)
    assert plain["made_from"]["config"]["actor_rollout_ref.model"]["path"] == "model"
    about = {name: value for name, value in plain["made_from"].items() if name != "modules"}
    assert plain["key"] == sha256_json(about)
    assert plain["checksum"] == sha256_json({name: value for name, value in plain.items() if name != "checksum"})


def test_what_is_unpacked_is_a_run_whose_artifacts_are_intact(begun, bundles):
    with unpacked(bundles / "3.zip") as (the_run, about):
        place = the_run.root
        assert the_run.run_id == begun.run_id == about["run_id"]
        for stage in begun.step(3).stages():
            assert the_run.step(3).manifest(stage).digest == begun.step(3).manifest(stage).digest
            assert the_run.step(3).table(stage).equals(begun.step(3).table(stage))
        assert read_manifest(the_run.step(2).used("advantages")).notes == begun.step(2).manifest("advantages").notes
        assert about["policy"] == {"version": 2, "weights_digest": digest(begun, 2)}
    assert not place.exists()


def test_a_bundle_only_reads_the_run_and_replaces_no_file(begun, bundles, tmp_path):
    copied = copy_of(begun, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")}
    with RunWriter(copied.root):
        before = {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")}
        write_bundle(copied, 2, tmp_path / "2.zip")
        assert {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")} == before
    with pytest.raises(FileExistsError, match="Give -o another name"):
        write_bundle(copied, 2, tmp_path / "2.zip")
    with pytest.raises(StorageError, match=r"no step 7; it has steps \[1, 2, 3\]"):
        write_bundle(copied, 7, tmp_path / "7.zip")
    with pytest.raises(StorageError, match="lies in the folder of a run"):
        write_bundle(copied, 2, copied.root / "2.zip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.zip", "copy"]


def test_a_step_whose_rows_are_dropped_cannot_be_bundled(begun, tmp_path):
    copied = copy_of(begun, tmp_path)
    with RunWriter(copied.root) as writer:
        drop(writer, what_to_drop(writer, Retention("last", 1), 3))
    with pytest.raises(StorageError, match="were dropped on"):
        write_bundle(open_run(copied.root), 1, tmp_path / "1.zip")
    assert not (tmp_path / "1.zip").exists()


def test_a_model_with_pickled_weights_alone_is_not_bundled(begun, tmp_path):
    shutil.copytree(begun.root.parent / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(StorageError, match="a bundle takes no pickle"):
        write_bundle(begun, 2, tmp_path / "2.zip", overrides=[f"actor_rollout_ref.model.path={tmp_path / 'model'}"])


def test_the_command_says_what_is_in_the_file_and_what_is_not(begun, tmp_path):
    done = CliRunner().invoke(app, ["bundle", str(begun.root), "--step", "3", "-o", str(tmp_path / "it.zip")])
    assert done.exit_code == 0, done.output
    assert "step 3 of" in done.stdout and "with policy 2" in done.stdout
    assert "left out: custom_reward_function.reward_kwargs.api_key" in done.stdout
    assert "a replay runs only with --trust-code" in done.stdout
    assert (tmp_path / "it.zip").stat().st_size < 4 << 20


# ----------------------------------------------------------------------------------------------------- opened with care

ESCAPES = (
    "../evil.json",
    "/tmp/evil.json",
    "run/../../evil.json",
    "C:\\evil.json",
    "run\\..\\evil.json",
    "run//a.json",
)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_name_that_leads_out_of_the_folder_is_refused_before_anything_is_written(bundles, tmp_path, name):
    path = written(tmp_path / "evil.zip", {**entries(bundles / "2.zip"), name: b"{}"})
    with pytest.raises(StorageError, match="Nothing was unpacked"), unpacked(path):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["evil.zip"]


@pytest.mark.parametrize(
    ("name", "entry", "reason"),
    [
        ("run/link.json", {"external_attr": (stat.S_IFLNK | 0o777) << 16}, "is no plain file"),
        ("run/packed.json", {"compress_type": zipfile.ZIP_DEFLATED}, "is compressed"),
        ("model/weights.bin", {}, "is no file of a bundle"),
        ("model/weights.pkl", {}, "is no file of a bundle"),
        ("run/folder.json/", {}, "is no plain file's name"),
        ("run/more.json", {}, "does not hold the files that its bundle.json names: run/more.json"),
    ],
)
def test_links_pickles_compressed_and_stray_files_are_refused(bundles, tmp_path, name, entry, reason):
    path = written(tmp_path / "odd.zip", {**entries(bundles / "2.zip"), name: b"0" * 5000}, **entry)
    with pytest.raises(StorageError, match=reason), unpacked(path):
        pass


def test_a_changed_a_missing_and_a_cut_file_are_refused(bundles, tmp_path):
    files = entries(bundles / "2.zip")
    name = next(name for name in files if name.endswith(".arrow"))
    changed = bytes([files[name][0] ^ 1]) + files[name][1:]
    with pytest.raises(StorageError, match="has changed since the bundle was made"):
        unpacked(written(tmp_path / "changed.zip", {**files, name: changed})).__enter__()
    fewer = {one: data for one, data in files.items() if one != name}
    with pytest.raises(StorageError, match="does not hold the files"):
        unpacked(written(tmp_path / "fewer.zip", fewer)).__enter__()
    (tmp_path / "cut.zip").write_bytes((bundles / "2.zip").read_bytes()[:-3000])
    with pytest.raises(StorageError, match="is no bundle of grpoflow, or is damaged"):
        unpacked(tmp_path / "cut.zip").__enter__()
    with pytest.raises(StorageError, match=r"it has no bundle\.json"):
        unpacked(written(tmp_path / "other.zip", {"a.json": b"{}"})).__enter__()


def test_a_bundle_of_a_newer_format_is_refused(bundles, tmp_path):
    files = entries(bundles / "2.zip")
    about = {**json.loads(files["bundle.json"]), "format": "grpoflow.bundle/2"}
    path = written(tmp_path / "newer.zip", {**files, "bundle.json": json.dumps(about).encode()})
    with pytest.raises(StorageError, match=r"this version reads grpoflow\.bundle/1"):
        unpacked(path).__enter__()


def test_a_file_that_is_no_zip_is_told_by_the_command(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "notes.txt")])
    assert isinstance(done.exception, StorageError) and "is no bundle of grpoflow" in str(done.exception)


def test_another_step_than_the_bundle_s_is_refused(bundles):
    from flows.audit.replay.command import replay_command

    options = {
        "lineage": None,
        "device": "cpu",
        "trusts_code": False,
        "as_json": True,
        "console": Console(file=io.StringIO()),
    }
    with pytest.raises(ValueError, match="holds step 2, not 3"):
        replay_command(bundles / "2.zip", 3, None, [], **options)
