"""Nothing listens to others, no name leads out of its folder, and what may come from anybody runs no code."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import yaml
from made_up import made_up_run
from tiny_runs import run
from typer.testing import CliRunner

from flows.cli import app
from flows.config import load_config
from flows.run_folder import run_folder
from flows.schedules.spec import load_schedules
from flows.sweep.spec import load_sweep
from storage import RunWriter, StorageError, open_run, read_table
from storage.arrow_file import unpacked_bytes
from storage.artifacts import MANIFEST, PACKED, forget_checked, read_manifest
from storage.checkpoints import check_checkpoint, checkpoints
from storage.durable import sha256_file, sha256_json, write_json
from storage.reuse import candidates
from storage.schema import SCHEMAS
from tasks.workers.ray_cluster import ray_of

OUTSIDE = ("../../outside", "..", "/tmp/outside", "a/../../outside", "a/b", "a\\b", "a\nb", "a\0b", "")


class Canary:
    """What runs code when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (os.system, (f"touch {self.file}",))


@pytest.fixture
def canary(tmp_path):
    """A file that is there once a pickle was loaded; the test fails then."""
    file = tmp_path / "pickle was loaded"
    yield file
    assert not file.exists()


# ------------------------------------------------------------------------------------------------------------ listening

CHILD = """
import sys
from flows.cli import main
sys.argv = ["grpoflow", *sys.argv[1:]]
main()
"""


def listening(process):
    """Addresses at which a process and all that it has started wait for others."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            told = one.net_connections(kind="inet")
        except psutil.Error:
            continue
        found |= {(one.pid, each.laddr.ip, each.laddr.port) for each in told if each.status == psutil.CONN_LISTEN}
        found |= {(one.pid, each.laddr.ip, each.laddr.port) for each in told if each.type.name == "SOCK_DGRAM"}
    return found


LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def test_a_run_with_its_own_prefect_server_and_its_pages_listen_on_loopback_alone(tiny_run, tmp_path):
    tiny_run("trainer.total_training_steps=1")
    words = ["train", str(tmp_path / "base.yaml"), "orchestration.enabled=true", "trainer.total_training_steps=1"]
    assert {ip for _, ip, _ in sockets_of(words, until_end=True)} == {"127.0.0.1"}
    assert {ip for _, ip, _ in sockets_of(["ui", str(tmp_path / "runs")], until_end=False)} == {"127.0.0.1"}


def sockets_of(words, *, until_end):
    """All sockets that a command's processes were seen to listen at, until it ends or, if asked, until it listens."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found, seen, deadline = set(), psutil.Process(process.pid), time.monotonic() + 300
    try:
        while process.poll() is None and not (found and not until_end):
            assert time.monotonic() < deadline
            found |= listening(seen)
            time.sleep(0.2)
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == (0 if until_end else process.returncode), said.decode()
    return found


def test_a_ray_of_the_run_s_own_listens_on_loopback_alone():
    code = (
        "import psutil, sys\n"
        "from tasks.workers.ray_cluster import ray_of\n"
        "from test_security import listening\n"
        "with ray_of(None, 1, gpus=False):\n"
        "    print(sorted({ip for _, ip, _ in listening(psutil.Process())}))\n"
    )
    assert ray_of  # the same as in the code above
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1].replace("'", '"'))) <= set(LOOPBACK)


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("key", ["project_name", "experiment_name"])
def test_the_name_of_a_run_or_project_does_not_lead_out_of_the_folder_of_runs(tmp_path, key, name):
    trainer = {"default_local_dir": None, "project_name": "p", "experiment_name": "e", key: name}
    cfg = load_config().model_copy(update={"trainer": load_config().trainer.model_copy(update=trainer)})
    with pytest.raises(ValueError, match=f"trainer.{key}"):
        run_folder(cfg)


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_run_sweep_or_artifact_has_a_name_that_is_a_path(tmp_path, name):
    with pytest.raises(ValueError):
        RunWriter.create(tmp_path / "run", name)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"name": name, "space": {}, "objective": {"metric": "x"}}))
    with pytest.raises(ValueError):
        load_sweep(tmp_path / "sweep.yaml")
    assert not (tmp_path / "run").exists()
    with RunWriter.create(tmp_path / "good", "good") as writer:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match="no artifact is called"), writer.attempt(1, name):
            pass
        with pytest.raises(ValueError, match="no artifact is called"):
            writer.step(1).table(name)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of one made-up step."""
    return made_up_run(tmp_path_factory.mktemp("made"), 1).root


@pytest.fixture
def hostile(made, tmp_path):
    """A copy of it that a test may bend."""
    forget_checked()
    return shutil.copytree(made, tmp_path / "hostile")


def artifact(root, stage="rollouts"):
    return root / "steps" / "000001" / stage / "0001"


def sign(folder, **changes):
    """Bend a manifest and sign it as its own writer would."""
    values = {**json.loads((folder / MANIFEST).read_text()), **changes}
    values.pop("checksum", None)
    values["digest"] = sha256_json([values["schema_id"], [[each["rows"], each["sha256"]] for each in values["parts"]]])
    (folder / MANIFEST).write_text(json.dumps({**values, "checksum": sha256_json(values)}))


@pytest.mark.parametrize("name", ["../../../run.json", "/etc/passwd", "part-00000.arrow/../../x", "..", "part-0.arrow"])
def test_a_part_is_a_file_of_its_artifact_s_folder(hostile, name):
    folder = artifact(hostile)
    (part,) = json.loads((folder / MANIFEST).read_text())["parts"]
    sign(folder, parts=[{**part, "name": name}])
    with pytest.raises(StorageError, match="is no valid manifest"):
        read_table(folder)


def test_a_part_that_is_a_device_or_a_pipe_is_not_read(hostile):
    part = artifact(hostile) / "part-00000.arrow"
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(StorageError, match="is no plain file"):
        read_table(part.parent)
    part.unlink()
    part.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="is no plain file"):
        read_table(part.parent)


def test_a_manifest_that_names_another_step_or_artifact_is_not_believed(hostile):
    for change in ({"stage": "rewards"}, {"step": 2}, {"stage": "../../../outside"}):
        sign(artifact(hostile), **change)
        with pytest.raises(StorageError, match=r"is not where it lies|is no valid manifest"):
            open_run(hostile).step(1).table("rollouts")


def test_rows_are_taken_over_only_from_an_artifact_that_is_what_it_lies_as(hostile, tmp_path):
    sign(artifact(hostile), key="k" * 64)
    assert len(list(candidates([str(hostile)], tmp_path, 1, "rollouts", "k" * 64))) == 1
    sign(artifact(hostile), key="k" * 64, step=7)
    assert list(candidates([str(hostile)], tmp_path, 1, "rollouts", "k" * 64)) == []


@pytest.mark.parametrize("change", [{"name": "../../outside"}, {"run_id": "../../outside"}, {"run_id": "a/b"}])
def test_a_run_whose_names_lead_elsewhere_is_no_run(hostile, change):
    write_json(hostile / "run.json", {**json.loads((hostile / "run.json").read_text()), **change})
    with pytest.raises(StorageError, match=r"run.json is damaged"):
        open_run(hostile)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_a_file_of_a_checkpoint_lies_in_its_folder(tmp_path, name):
    told, root = [], hostile_checkpoint(tmp_path, files={name: {"bytes": 1, "sha256": "0" * 64}})
    assert checkpoints(root, told.append) == []
    assert len(told) == 1 and "is damaged" in told[0]


def hostile_checkpoint(root, **changes):
    folder = root / "checkpoints" / "000001"
    folder.mkdir(parents=True)
    manifest = {"format_version": 1, "step": 1, "lineage": 1, "files": {}, **changes}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": sha256_json(manifest)}))
    return root


# ---------------------------------------------------------------------------------------------------------- Arrow files


def replace_part(folder, write):
    """Another file in the place of a part, in a manifest that agrees with it."""
    path = folder / "part-00000.arrow"
    write(folder / "aside")  # not in place: the old file may be mapped
    (folder / "aside").rename(path)
    (part,) = json.loads((folder / MANIFEST).read_text())["parts"]
    sign(folder, parts=[{**part, "bytes": path.stat().st_size, "sha256": sha256_file(path)}])
    forget_checked()


def arrow_file(table, **options):
    def write(path):
        with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table)

    return write


def test_an_arrow_file_of_other_columns_types_or_rows_is_refused(hostile):
    folder = artifact(hostile)
    good = read_table(folder)
    narrow = good.set_column(0, "sample_id", good["sample_id"].cast(pa.string()))
    for bad in (narrow, good.drop_columns(["seed"]), good.append_column("more", good["seed"]), good.slice(1)):
        replace_part(folder, arrow_file(bad))
        with pytest.raises(StorageError, match=r"its columns or their types|rows but was committed"):
            read_table(folder)


def test_the_pickle_of_an_extension_type_is_not_loaded(hostile, canary):
    folder = artifact(hostile)
    good = read_table(folder)
    extended = good.schema.field("seed").with_metadata(
        {
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(Canary(canary)),
        }
    )
    replace_part(folder, arrow_file(good.cast(good.schema.set(good.schema.get_field_index("seed"), extended))))
    replaced = pa.ipc.open_file(str(folder / "part-00000.arrow")).schema.field("seed")
    assert replaced.metadata  # what pyarrow makes of it is a plain column
    read_table(folder)


def test_offsets_that_point_outside_the_file_are_refused(hostile):
    folder = artifact(hostile)
    valid = (folder / "part-00000.arrow").read_bytes()
    offsets = read_table(folder)["response_ids"].chunk(0).offsets
    wanted = offsets.buffers()[1].to_pybytes()[: 8 * len(offsets)]
    for value in (2**40, -8, 2**62):
        bent = struct.pack("<q", value) * 2 + wanted[16:]
        assert wanted in valid
        replace_part(folder, lambda path, bent=bent: path.write_bytes(valid.replace(wanted, bent)))
        with pytest.raises(StorageError, match="is no readable Arrow file"):
            read_table(folder)


def test_a_compressed_part_is_unpacked_no_further_than_its_manifest_says(hostile):
    folder = artifact(hostile)
    part = folder / "part-00000.arrow"
    with pa.output_stream(str(part) + PACKED, compression="zstd") as sink:
        for _ in range(64):
            sink.write(b"\0" * (16 << 20))
    part.unlink()
    before = pa.total_allocated_bytes()
    with pytest.raises(StorageError, match="it holds more than"):
        read_table(folder)
    assert pa.total_allocated_bytes() - before < 64 << 20 and Path(str(part) + PACKED).stat().st_size < 1 << 20


def test_an_arrow_file_that_unpacks_to_more_than_the_memory_is_refused_before_it_is_unpacked(hostile):
    folder = artifact(hostile)
    good = read_table(folder)
    many = pa.concat_tables([good] * 20_000).combine_chunks()
    replace_part(folder, arrow_file(many, compression="zstd"))
    content = pa.py_buffer((folder / "part-00000.arrow").read_bytes())
    assert 0.5 < unpacked_bytes(content) / many.nbytes < 2 and content.size < many.nbytes / 10
    lying = bytes(content).replace(struct.pack("<q", 8 * many.num_rows), struct.pack("<q", 2**60))
    replace_part(folder, lambda path: path.write_bytes(lying))
    before = pa.total_allocated_bytes()
    with pytest.raises(StorageError, match="bytes of memory, and"):
        read_table(folder)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_what_an_arrow_file_unpacks_to_is_nothing_where_nothing_is_compressed(hostile):
    assert unpacked_bytes(pa.py_buffer((artifact(hostile) / "part-00000.arrow").read_bytes())) == 0


def test_a_manifest_of_100_mb_is_refused_before_it_is_parsed(hostile):
    path = artifact(hostile) / MANIFEST
    path.write_bytes(b'{"notes": [' + b"0," * (50 << 20) + b"0]}")
    begun = time.monotonic()
    with pytest.raises(StorageError, match="is longer than"):
        read_manifest(path.parent)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("change", [{"rows": 10**30}, {"parts": [], "rows": 2**62}, {"attempt": "x" * 10**6}])
def test_counts_of_a_manifest_make_no_room_by_themselves(hostile, change):
    sign(artifact(hostile), **change)
    with pytest.raises(StorageError):
        read_table(artifact(hostile))


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def trained(tiny_run_in, tmp_path_factory):
    """A run of one step with its checkpoint."""
    cfg = tiny_run_in(tmp_path_factory.mktemp("trained"))("trainer.total_training_steps=1", "trainer.save_freq=1")
    return run(cfg)[0].root


def tensors(path):
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header, data, length=None):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def bent_files(folder, canary):
    """Hostile contents of a checkpoint's files, by what they are."""
    header, data = tensors(folder / "optimizer.safetensors")
    step = next(name for name in header if name.endswith(":step"))
    moment = next(name for name in header if name.endswith(":exp_avg"))
    vast = {**header[moment], "shape": [2**20, 2**20]}
    state = json.loads((folder / "state.json").read_text())
    evil = pickle.dumps(Canary(canary))
    return {
        "a pickle": ("model.safetensors", evil),
        "a pickle as moments": ("optimizer.safetensors", evil),
        "a header longer than the file": ("model.safetensors", with_header({}, b"", 2**60)),
        "a shape larger than the data": ("optimizer.safetensors", with_header({**header, moment: vast}, data)),
        "a count as large as the memory": ("optimizer.safetensors", with_header({**header, step: vast}, data)),
        "moments of no weight": ("optimizer.safetensors", with_header({**header, "x:exp_avg": vast}, data)),
        "a type that is none": ("model.safetensors", with_header({"w": {**header[moment], "dtype": "PICKLE"}}, data)),
        "nested state": ("state.json", b"[" * 100_000),
        "state of another kind": ("state.json", json.dumps({**state, "weights_digest": 7}).encode()),
        "no state": ("state.json", b"[]"),
    }


HOSTILE_FILES = (
    *("a pickle", "a pickle as moments", "a header longer than the file", "a shape larger than the data"),
    *("a count as large as the memory", "moments of no weight", "a type that is none", "nested state"),
    *("state of another kind", "no state"),
)


def test_a_hostile_checkpoint_is_refused_without_code_or_memory(trained, tmp_path, canary):
    """Each with a manifest that agrees with its files; one policy is asked to become each of them in turn."""
    from flows.run_folder import config_of
    from tasks.tokenizer import load_tokenizer
    from tasks.workers.rank import Role, open_rank

    source = trained / "checkpoints" / "000001"
    bent = bent_files(source, canary)
    assert tuple(bent) == HOSTILE_FILES
    cfg = config_of(open_run(trained), 1)
    rank = open_rank(cfg, None, load_tokenizer(cfg.actor_rollout_ref.model), role=Role.ACTOR, total_steps=1)
    before, limit = rank.policy.weights_digest(), psutil.Process().memory_info().rss + (1 << 30)
    for number, (what, (name, content)) in enumerate(bent.items()):
        root = tmp_path / str(number)
        folder = shutil.copytree(source, root / "checkpoints" / "000001")
        (folder / name).write_bytes(content)
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest.pop("checksum")
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": sha256_json(manifest)}))
        (checkpoint,) = checkpoints(root)
        check_checkpoint(checkpoint)
        with pytest.raises(ValueError) as refused:
            rank.policy.load(checkpoint.folder)
        assert str(folder) in str(refused.value), what
        assert psutil.Process().memory_info().rss < limit, what
    assert rank.policy.weights_digest() == before


def test_a_run_with_a_hostile_checkpoint_goes_on_without_it_or_says_why_not(trained, tmp_path, canary):
    copy = shutil.copytree(trained, tmp_path / "run")
    folder = copy / "checkpoints" / "000001"
    (folder / "model.safetensors").write_bytes(pickle.dumps(Canary(canary)))
    told = []
    for checkpoint in checkpoints(copy):
        with pytest.raises(StorageError):
            check_checkpoint(checkpoint)
        told.append(checkpoint.step)
    assert told == [1]


# -------------------------------------------------------------------------------------------------------- configuration

BOMBS = {
    "python objects": "data: !!python/object/apply:os.system ['touch {canary}']\n",
    "python names": "data: !!python/name:os.system\n",
    "a billion laughs": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    "a billion sections": "a: &a {x: 1}\n"
    + "".join(
        f"{new}: &{new} {{{', '.join(f'k{i}: *{old}' for i in range(9))}}}\n"
        for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    "itself": "data: &a {train_files: *a}\n",
    "deep lists": "data: " + "[" * 100_000,
    "deep sections": "data: " + "{a: " * 50_000,
    "a huge number": "data: {train_batch_size: " + "9" * 100_000 + "}\n",
    "a key that is a list": "{[1]: 2}\n",
    "no character": 'data: "\\UFFFFFFFF"\n',
    "100 MB": "# comment\n" * 10_000_000,
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_hostile_configuration_is_refused_with_its_file_and_the_reason(tmp_path, canary, what):
    path = tmp_path / "hostile.yaml"
    path.write_text(BOMBS[what].replace("{canary}", str(canary)))
    before, begun = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises(ValueError, match=r"hostile\.yaml"):
        load_config([path])
    assert psutil.Process().memory_info().rss - before < 512 << 20
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "field", ["{name:>9999999999}", "{utc.__class__}", "{scheduled.min.__init__}", "{name!r:}", "{0}"]
)
def test_the_name_of_a_schedule_s_runs_takes_times_and_nothing_else(tmp_path, field):
    schedule = {
        "name": "nightly",
        "train": ["quickstart"],
        "interval_s": 60,
        "experiment_name": field + "{utc:%Y%m%dT%H%M%SZ}",
    }
    (tmp_path / "schedules.yaml").write_text(yaml.safe_dump({"schedules": [schedule]}))
    with pytest.raises(ValueError, match="cannot be filled in"):
        load_schedules(tmp_path / "schedules.yaml")


def test_a_section_cannot_be_made_a_part_of_itself():
    with pytest.raises(ValueError, match="algorithm is a section"):
        load_config([], ["algorithm.kl_ctrl='${algorithm}'"])


def test_the_command_tells_a_hostile_run_in_one_sentence(hostile, canary):
    (artifact(hostile) / MANIFEST).write_bytes(b"[" * 1_000_000)
    shown = CliRunner().invoke(app, ["show", str(hostile), "--step", "1", "--stage", "rollouts"])
    assert isinstance(shown.exception, StorageError) and "is nested more than" in str(shown.exception)
    out = CliRunner().invoke(app, ["show", str(hostile), "--step", "1", "--stage", "../../../../etc"])
    assert isinstance(out.exception, ValueError | StorageError | OSError)


def test_every_schema_is_made_of_plain_types():
    for schema in SCHEMAS.values():
        assert not [field for field in schema if isinstance(field.type, pa.BaseExtensionType)]
