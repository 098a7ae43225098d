"""Readers of what may come from anybody: any bytes give a value or the documented error, and nothing else, in time."""

import json
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_up import made_up_run

from flows.config import load_config
from flows.config_layers import parse_value, parse_yaml
from flows.launch_script import LaunchScriptError, config_of, parse_launch_script
from flows.run_folder import config_of as config_of_run
from flows.schedules.spec import load_schedules
from flows.sweep.spec import load_sweep
from storage import RunWriter, StorageError, open_run, read_table
from storage.arrow_file import unpacked_bytes
from storage.artifacts import MANIFEST, forget_checked, read_manifest
from storage.checkpoints import checkpoints, intact_checkpoints, save_checkpoint
from storage.durable import parse_json, sha256_json
from tasks.config import RunConfig

LONGEST_S = 20.0
"""Patience with one reading, on a busy machine; it takes milliseconds."""

often = settings(max_examples=120, suppress_health_check=list(HealthCheck))

HUGE = (2**63, -(2**63) - 1, 10**400, 1e308, float("inf"), float("nan"), -1, 0)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(HUGE),
    st.just("../../x"),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@contextmanager
def only(*errors):
    """Within the block only these errors may be raised, and it ends in time."""
    begun = time.monotonic()
    try:
        yield
    except errors as error:
        assert str(error), "an error says something"
    assert time.monotonic() - begun < LONGEST_S


@st.composite
def bent(draw, valid):
    """A valid value with one to three of its members replaced, removed or added, at any depth."""
    value = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        inner = value
        while True:
            names = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not names:
                break
            name = draw(st.sampled_from(names))
            if isinstance(inner[name], dict | list) and inner[name] and draw(st.booleans()):
                inner = inner[name]
                continue
            what = draw(st.sampled_from(("replace", "remove", "add")))
            if what == "remove":
                del inner[name]
            elif what == "add" and isinstance(inner, dict):
                inner[draw(st.text(max_size=8))] = draw(values)
            else:
                inner[name] = draw(values)
            break
    return value


def load_one(path):
    return load_config([path])


def torn(text):
    """Texts that are a valid one with some bytes cut out or put in."""
    data = text.encode()
    cut = st.tuples(st.integers(0, len(data)), st.integers(0, 40), st.binary(max_size=20))
    return cut.map(lambda it: data[: it[0]] + it[2] + data[it[0] + it[1] :])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two made-up steps with a checkpoint."""
    folder = tmp_path_factory.mktemp("fuzz")
    run = made_up_run(folder, 2)
    with RunWriter(run.root) as writer:
        writer.append("opened", state="running", code_digest="", config_digest="")
        writer.append("config_changed", lineage=1, changes={"trainer.save_freq": [1, 2]})
        writer.append("closed", state="finished", reason=None)
        writer.open_lineage(2, None, {"trainer.save_freq": [2, 3]}, RunConfig().model_dump(mode="json"))

    def write(aside):
        (aside / "model.safetensors").write_bytes(b"weights")

    save_checkpoint(run.root, 1, write, expected_bytes=1, about={"policy_version": 1})
    return run.root


@pytest.fixture(scope="module")
def copied(whole, tmp_path_factory):
    """A copy of it, whose files a test may replace."""
    return shutil.copytree(whole, tmp_path_factory.mktemp("copy") / "run")


def signed(value):
    """With the checksum of the rest, where there can be one: whoever bends a manifest can sign it, too."""
    if not isinstance(value, dict):
        return value
    value.pop("checksum", None)
    try:
        return {**value, "checksum": sha256_json(value)}
    except ValueError:
        return value


@contextmanager
def in_place(path, content):
    """A file with another content, for the time of a block."""
    kept, aside = path.with_name(f"{path.name}.kept"), path.with_name(f"{path.name}.aside")
    path.rename(kept)
    aside.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    aside.rename(path)  # not in place: the file may be mapped
    try:
        yield path
    finally:
        kept.rename(path)


# ----------------------------------------------------------------------------------------------------------- run folder


@often
@given(st.data())
def test_any_manifest_of_an_artifact_is_read_or_refused(whole, copied, data):
    folder = copied / "steps" / "000001" / "rewards" / "0001"
    valid = json.loads((folder / MANIFEST).read_text())
    content = data.draw(bent(valid).map(signed) | bent(valid) | torn(json.dumps(valid)) | st.binary(max_size=60))
    with in_place(folder / MANIFEST, content):
        with only(StorageError):
            read_manifest(folder)
        with only(StorageError):
            read_table(folder)
        with only(StorageError, FileNotFoundError):
            open_run(copied).step(1).table("rewards")


@often
@given(st.data())
def test_any_arrow_file_is_read_or_refused(copied, data):
    """Also one whose manifest has its digest, as a hostile writer's would."""
    folder = copied / "steps" / "000001" / "rollouts" / "0001"
    part = folder / "part-00000.arrow"
    valid, manifest = part.read_bytes(), json.loads((folder / MANIFEST).read_text())
    place = data.draw(st.integers(0, len(valid) - 9))
    junk = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from((b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0" * 8)))
    bytes_now = valid[:place] + junk + valid[place + len(junk) :]
    if data.draw(st.booleans()):
        bytes_now = bytes_now[: data.draw(st.integers(0, len(bytes_now)))]
    with in_place(part, bytes_now), in_place(folder / MANIFEST, _of_part(manifest, bytes_now)):
        forget_checked()
        with only(StorageError):
            read_table(folder)
        with only(ValueError):
            unpacked_bytes(pa.py_buffer(bytes_now))


def _of_part(manifest, content):
    """The manifest that a hostile writer gives this content."""
    import hashlib

    part = {**manifest["parts"][0], "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    digest = sha256_json([manifest["schema_id"], [[part["rows"], part["sha256"]]]])
    return signed({**manifest, "parts": [part], "bytes": len(content), "digest": digest})


DOCUMENTS = ("run.json", "config.yaml", "ledger.jsonl", "lineages/0002.json", "steps/000001/step.json")


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_document_of_a_run_is_read_or_refused(copied, data, name):
    path = copied / name
    text = path.read_text()
    if name.endswith(".json"):
        content = data.draw(bent(json.loads(text)) | torn(text) | st.binary(max_size=60))
    elif name.endswith(".jsonl"):
        lines = [json.loads(line) for line in text.splitlines()]
        bad = data.draw(st.lists(st.sampled_from(lines).flatmap(bent), min_size=1, max_size=3))
        content = "\n".join(json.dumps(line) for line in [*lines, *bad]).encode()
    else:
        content = data.draw(torn(text))
    with in_place(path, content):
        for number in (None, 1):
            with only(StorageError):
                look_at_all_of(open_run(copied, number))


def look_at_all_of(run):
    _ = run.identity, run.state, run.owner(), run.steps(), run.finished_steps(), run.run_id
    for index in run.steps():
        _ = run.lineage_of(index), run.step(index).record, run.step(index).stages()
    config_of_run(run, run.lineage)


@often
@given(st.data())
def test_any_manifest_of_a_checkpoint_is_read_or_skipped_with_the_reason(copied, data):
    path = copied / "checkpoints" / "000001" / MANIFEST
    valid = json.loads(path.read_text())
    content = data.draw(bent(valid).map(signed) | torn(json.dumps(valid)) | st.binary(max_size=60))
    skipped = []
    with in_place(path, content):
        found = list(intact_checkpoints(copied, skipped.append))
        assert len(found) + len(skipped) == 1
        assert all("checkpoint 000001 is skipped" in reason for reason in skipped)
        for checkpoint in checkpoints(copied):
            assert all(Path(name).name == name and name != ".." for name in checkpoint.manifest["files"])


@often
@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"a":' * 50_000)
@example(b"9" * 5_000)
@example(b"1e999")
def test_any_json_is_a_value_or_a_value_error(text):
    with only(ValueError):
        parse_json(text)


# -------------------------------------------------------------------------------------------------------- configuration

YAML_WORDS = (
    *("data", "trainer", ":", "[", "]", "{", "}", "*a", "~", "0x", ".nan", "1e999", "#", "%", "|", '"', "'"),
    *("${data.seed}", "!!python/name:os.system"),
)
YAML_PIECES = st.sampled_from(
    [*YAML_WORDS, ": ", "\n", "\n  ", "- ", "&a ", "!!int ", "!!timestamp ", "!!binary ", "? ", "<<: ", "\t"]
)


@often
@given(st.lists(YAML_PIECES | st.text(max_size=4), max_size=30).map("".join) | st.text(max_size=60))
def test_any_yaml_is_a_value_or_says_why_not(text):
    with only(ValueError):
        parse_yaml(text)
    with only(ValueError):
        parse_value(text)


CONFIG = {
    "data": {"train_files": ["a.jsonl"], "train_batch_size": 8},
    "algorithm": {"adv_estimator": "grpo", "kl_ctrl": {"kl_coef": 0.1}},
    "trainer": {"project_name": "p", "total_epochs": 1, "logger": None},
}
SWEEP = {
    "name": "lr",
    "base": ["quickstart"],
    "space": {"actor_rollout_ref.actor.optim.lr": {"log_uniform": [1e-6, 1e-4]}},
    "objective": {"metric": "critic/score/mean"},
    "budget": {"trials": 4},
}
SCHEDULES = {"schedules": [{"name": "nightly", "train": ["quickstart"], "cron": "0 2 * * *", "timezone": "UTC"}]}


@pytest.mark.parametrize("read, valid", [(load_one, CONFIG), (load_sweep, SWEEP), (load_schedules, SCHEDULES)])
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_file_of_settings_is_loaded_or_refused(tmp_path_factory, data, read, valid):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(data.draw(torn(yaml.safe_dump(valid)) | bent(valid).map(lambda value: json.dumps(value).encode())))
    with only(ValueError):
        read(path)


KEYS = st.sampled_from(
    ("data.train_batch_size", "trainer.total_epochs", "algorithm", "algorithm.adv_estimator", "data.train_files", "x.y")
)


@often
@given(
    st.lists(st.tuples(KEYS, st.text(max_size=30) | values.map(repr)).map("=".join) | st.text(max_size=30), max_size=4)
)
def test_any_override_is_taken_or_refused(texts):
    with only(ValueError):
        load_config([], texts)


# ------------------------------------------------------------------------------------------------------- launch scripts

SHELL_WORDS = (
    *("data.train_batch_size=", "trainer.total_epochs=", "A=", "A+=", "$A", "${A}", "${A:-", "}", "$((", "))", "$("),
    *(")", "(", "`", '"', "'", "\\", "fi", "done", "&&", "||", "|", "&", ">", "#", "${A[@]}", "1", "9**9", "?"),
    *(":", "%", "=", "~"),
)
SHELL_PIECES = st.sampled_from(
    [
        *SHELL_WORDS,
        "\\\n",
        "\n",
        " ",
        "if ",
        "then ",
        "for ",
        "do ",
        "<<EOF\n",
        "EOF\n",
        "read ",
        "export ",
        "python -m x ",
    ]
)


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(st.lists(SHELL_PIECES | st.text(max_size=3), max_size=40).map("".join))
def test_any_launch_script_is_read_or_refused(text):
    with only(LaunchScriptError):
        config_of(parse_launch_script(f"python -m verl.x data.train_batch_size=8 {text}"))
    with only(LaunchScriptError):
        parse_launch_script(text)


LARGE_SCRIPTS = {
    "a value that doubles": "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40,
    "an array that doubles": "A=(x x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "a power of a power": "A=$((((((9**64)**64)**64)**64)**64))\n",
    "products": "A=9\n" + "A=$((A*A*A*A))\n" * 60,
    "brackets": "A=$(" + "(" * 50_000 + "\n",
    "defaults in defaults": "A=" + "${A:-" * 3000 + "}" * 3000 + "\n",
    "quotes in commands": "A=" + '"$(' * 3000 + "\n",
    "continuations": "A=x" + "\\\nx" * 20_000 + "\n",
    "settings": "python -m x " + " ".join(f"a.b{i}=1" for i in range(20_000)) + "\n",
    "sections of a key": "python -m x custom_reward_function.reward_kwargs." + "a." * 5000 + "a=1\n",
    "a file": "# comment\n" * 200_000,
}


@pytest.mark.parametrize("what", LARGE_SCRIPTS)
def test_a_launch_script_cannot_take_time_and_memory_as_it_likes(what):
    with only(LaunchScriptError):
        config_of(parse_launch_script(f"{LARGE_SCRIPTS[what]}python -m verl.x data.train_batch_size=8 a.b=$A"))
