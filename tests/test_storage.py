"""Artifacts, runs and locks on a real disk."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from storage import Ragged, RunLocked, RunWriter, StorageError, build_table, open_run, read_table
from storage.artifacts import MANIFEST, Provenance, commit, commit_parts, read_manifest, write_part
from storage.ledger import STAGES, list_runs
from storage.schema import SCHEMAS, TEXT, escape_surrogates, schema_of

NOW = datetime.now(UTC)


def reward_columns(count=3, **changes):
    columns = {
        "sample_id": [f"000001-0000-{i:03d}" for i in range(count)],
        "group_id": ["000001-0000"] * count,
        "score": [1.0] * count,
        "status": ["ok"] * count,
        "parts": [[("gsm8k", 1.0)]] * count,
        "extracted": ["42"] * count,
        "extra": ["{}"] * count,
        "message": [None] * count,
        "seconds": [0.0] * count,
    }
    return {**columns, **changes}


@pytest.fixture
def run(tmp_path):
    with RunWriter.create(tmp_path / "run", "run") as writer:
        yield writer


def commit_rewards(run, step=1, key="k", **changes):
    return run.commit(
        step, "rewards", build_table("rewards", reward_columns(**changes)), key=key, policy_version=0, started_at=NOW
    )


def test_a_committed_artifact_reads_back_equal(run):
    artifact = commit_rewards(run, score=[1.0, None, 0.25])
    table = read_table(artifact)
    assert table["score"].to_pylist() == [1.0, None, 0.25]
    assert table.schema.equals(SCHEMAS["rewards"])
    assert artifact.rows == 3
    manifest = read_manifest(artifact.folder)
    assert (manifest.run_id, manifest.step, manifest.stage, manifest.attempt) == (run.run_id, 1, "rewards", 1)
    assert manifest.parts[0].bytes == artifact.bytes == (artifact.folder / "part-00000.arrow").stat().st_size


def test_equal_content_has_an_equal_digest_whoever_wrote_it_when(run):
    assert commit_rewards(run).digest == commit_rewards(run, step=2, key="other").digest
    assert commit_rewards(run, score=[0.0, 1.0, 1.0]).digest != commit_rewards(run).digest


def test_making_an_artifact_again_leaves_the_first_one_as_it_was(run):
    first = commit_rewards(run)
    before = (first.folder / "part-00000.arrow").read_bytes(), (first.folder / MANIFEST).read_bytes()
    second = commit_rewards(run, score=[0.0, 0.0, 0.0])
    assert (first.folder.name, second.folder.name) == ("0001", "0002")
    assert before == ((first.folder / "part-00000.arrow").read_bytes(), (first.folder / MANIFEST).read_bytes())
    assert run.step(1).table("rewards")["score"].to_pylist() == [0.0, 0.0, 0.0]


def test_every_artifact_has_a_path_of_its_own_for_every_step_and_attempt(run):
    folders = {commit_rewards(run, step=step).folder for step in (1, 2, 3) for _ in range(2)}
    assert len(folders) == 6
    assert all(
        f"steps/{step:06d}/rewards/{attempt:04d}" in " ".join(map(str, folders))
        for step in (1, 2, 3)
        for attempt in (1, 2)
    )


@pytest.mark.parametrize("column", ["score", "status", "seconds"])
def test_a_missing_column_is_an_error_and_never_zeros(column):
    columns = reward_columns()
    del columns[column]
    with pytest.raises(ValueError, match=rf"missing columns \['{column}'\]"):
        build_table("rewards", columns)


def test_a_null_where_none_may_be_is_an_error():
    with pytest.raises(ValueError, match="column status holds 1 nulls"):
        build_table("rewards", reward_columns(status=["ok", None, "ok"]))


def test_a_nan_is_kept_apart_from_a_null():
    scores = build_table("rewards", reward_columns(score=[float("nan"), None, 1.0]))["score"]
    assert scores.null_count == 1
    assert np.isnan(scores[0].as_py())


def test_a_column_that_is_all_null_in_one_step_joins_one_that_is_not(run):
    commit_rewards(run, step=1, extracted=[None] * 3, extra=["{}"] * 3, parts=[[]] * 3)
    commit_rewards(run, step=2, extracted=["7", None, "8"], extra=['{"pred": "7"}'] * 3)
    both = pa.concat_tables([run.step(step).table("rewards") for step in (1, 2)])
    assert both["extracted"].to_pylist() == [None, None, None, "7", None, "8"]
    assert both.schema.equals(SCHEMAS["rewards"])


def test_columns_are_the_same_in_the_first_and_the_hundredth_step(run):
    commit_rewards(run, step=1, extra=['{"a": 1}'] * 3)
    commit_rewards(run, step=100, extra=['{"b": [2]}'] * 3)
    assert run.step(1).table("rewards").schema.equals(run.step(100).table("rewards").schema)


def test_all_offsets_are_64_bit():
    def kinds(kind):
        yield kind
        for i in range(kind.num_fields):
            yield from kinds(kind.field(i).type)

    for schema in SCHEMAS.values():
        for column in schema:
            if pa.types.is_map(column.type):
                continue  # a handful of names a row; parts stay chunked
            assert not any(pa.types.is_string(kind) or pa.types.is_list(kind) for kind in kinds(column.type)), column


@pytest.mark.slow
def test_more_than_2_to_the_31_values_and_bytes_read_back_equal(tmp_path):
    size = 2**30 + 7
    values = np.arange(size, dtype=np.int64).astype(np.int8)
    part = Ragged(values, np.array([0, size // 2, size], dtype=np.int64)).to_arrow()
    joined = Ragged.from_arrow(pa.chunked_array([part, part]))
    assert joined.offsets[-1] == 2 * size > 2**31
    assert np.array_equal(joined[3], values[size // 2 :])
    del joined, part, values

    text = "x" * 2**28
    table = build_table("rewards", reward_columns(3, message=[text] * 3))
    folder = tmp_path / "big"
    folder.mkdir()
    parts = [write_part(folder, rank, table) for rank in range(3)]
    made_by = Provenance("r", 1, 1, 1, "k", 0, "", "", NOW)
    artifact = commit_parts(folder, "rewards", parts, made_by)
    back = read_table(artifact)
    assert back.num_rows == 9
    assert back["message"].nbytes > 2**31
    assert back["message"][8].as_py() == text


def test_a_flipped_bit_that_arrow_does_not_see_is_refused(run, tmp_path):
    artifact = commit_rewards(run)
    path = artifact.folder / "part-00000.arrow"
    data = bytearray(path.read_bytes())
    place = data.index(np.float64(1.0).tobytes() * 3)
    data[place] ^= 1
    path.write_bytes(data)
    with pa.ipc.open_file(str(path)) as reader:
        reader.read_all().validate(full=True)
    with pytest.raises(StorageError, match="SHA-256"):
        read_table(artifact)


def test_a_file_whose_footer_lists_fewer_batches_is_refused(run):
    artifact = commit_rewards(run)
    path = artifact.folder / "part-00000.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMAS["rewards"]):
        pass
    with pytest.raises(StorageError, match="bytes"):
        read_table(artifact)


def test_an_artifact_whose_file_is_gone_or_swapped_is_made_again_and_said_so(run):
    artifact = commit_rewards(run, key="same")
    assert run.find(1, "rewards", "same") == artifact
    other = commit_rewards(run, step=2, score=[0.0, 0.0, 0.0])
    (artifact.folder / "part-00000.arrow").write_bytes((other.folder / "part-00000.arrow").read_bytes())
    assert run.find(1, "rewards", "same") is None
    (artifact.folder / "part-00000.arrow").unlink()
    assert run.find(1, "rewards", "same") is None
    assert [event["event"] for event in run.events()] == ["damaged", "damaged"]


def test_an_artifact_made_from_other_things_is_not_used(run):
    commit_rewards(run, key="one")
    assert run.find(1, "rewards", "another") is None


def test_a_reader_sees_nothing_before_the_manifest_is_there(run):
    folder = run.step(1).folder / "rewards" / "0001"
    folder.mkdir(parents=True)
    write_part(folder, 0, build_table("rewards", reward_columns()))
    assert run.step(1).stages() == []
    with pytest.raises(FileNotFoundError, match="has no rewards"):
        run.step(1).table("rewards")


def test_a_failed_commit_leaves_nothing(run):
    folder = run.step(1).folder / "rewards" / "0001"
    with pytest.raises(ValueError, match="schema"):
        commit(folder, "rewards", [pa.table({"a": [1]})], Provenance("r", 1, 1, 1, "k", 0, "", "", NOW))
    assert not folder.exists()


def test_what_a_dead_writer_left_half_done_is_removed_by_the_next_one(tmp_path):
    with RunWriter.create(tmp_path / "run", "run") as run:
        kept = commit_rewards(run)
        torn = run.step(1).folder / "advantages" / "0001"
        torn.mkdir(parents=True)
        (torn / "part-00000.arrow").write_bytes(b"half")
        (run.root / ".config.yaml.aside").write_text("half")
    with RunWriter(tmp_path / "run"):
        assert not torn.exists()
        assert kept.folder.exists()
        assert not list((tmp_path / "run").rglob("*.aside"))


def test_a_manifest_cannot_point_outside_its_folder(run):
    artifact = commit_rewards(run)
    path = artifact.folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["parts"][0]["name"] = "../../../../secret.arrow"
    path.write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="no valid manifest"):
        read_table(artifact)


def test_an_artifact_of_a_newer_format_is_refused(run):
    artifact = commit_rewards(run)
    path = artifact.folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(StorageError, match="Upgrade grpoflow"):
        read_table(artifact)


def test_files_open_in_plain_pyarrow_and_polars(run):
    path = commit_rewards(run, score=[1.0, None, 0.5]).folder / "part-00000.arrow"
    with pa.ipc.open_file(str(path)) as reader:
        assert reader.read_all().num_rows == 3
    frame = pl.read_ipc(path)
    assert frame["score"].to_list() == [1.0, None, 0.5]


def test_a_lone_surrogate_is_escaped_and_other_unicode_is_kept():
    assert escape_surrogates("a\ud800b") == "a\\ud800b"
    for text in ("😀", "nul\x00", "\u202eright", "x" * 2**20):
        assert escape_surrogates(text) == text
        assert pa.array([text], TEXT)[0].as_py() == text


def test_ragged_rows_survive_arrow_and_empty_rows_are_rows():
    rows = Ragged.from_rows([[1, 2], [], [3]], np.int32)
    back = Ragged.from_arrow(pa.chunked_array([rows.to_arrow(), rows.to_arrow()]))
    assert [row.tolist() for row in back] == [[1, 2], [], [3], [1, 2], [], [3]]
    assert back.take(np.array([5, 1])).lengths.tolist() == [1, 0]
    assert Ragged.from_arrow(rows.to_arrow().slice(1, 2)).lengths.tolist() == [0, 1]


def test_a_live_writer_keeps_others_out_and_a_dead_one_does_not(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from storage import RunWriter\n"
        "run = RunWriter.create(Path(sys.argv[1]), 'run'); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunLocked, match=f"process {holder.pid} "):
        RunWriter(tmp_path / "run")
    assert open_run(tmp_path / "run").owner()["pid"] == holder.pid
    holder.kill()
    holder.wait()
    assert open_run(tmp_path / "run").owner() is None
    with RunWriter(tmp_path / "run") as run:
        assert run.state == "running"


def test_a_torn_last_line_of_the_ledger_is_no_event_and_does_not_spoil_the_next(run):
    run.append("opened", state="running")
    with (run.root / "ledger.jsonl").open("a") as file:
        file.write('{"event": "clo')
    run.append("closed", state="finished")
    assert [event["event"] for event in run.events()] == ["opened", "closed"]


def test_a_run_begins_in_an_empty_folder_and_not_in_one_that_holds_something(tmp_path):
    (tmp_path / "run").mkdir()
    with RunWriter.create(tmp_path / "run", "run", {"config.yaml": "a: 1"}) as run:
        assert (run.root / "config.yaml").read_text() == "a: 1"
    with pytest.raises(FileExistsError):
        RunWriter.create(tmp_path / "run", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_of_several_that_begin_the_same_run_at_once_one_does_and_nothing_of_the_others_stays(tmp_path):
    def begin(_):
        try:
            return RunWriter.create(tmp_path / "run", "run", {"config.yaml": "a: 1"})
        except FileExistsError:
            return None

    with ThreadPoolExecutor(8) as threads:
        begun = [run for run in threads.map(begin, range(24)) if run]
    assert len(begun) == 1
    assert begun[0].identity["name"] == "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    begun[0].__exit__()


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "a b"])
def test_a_run_cannot_be_named_like_a_path(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a run"):
        RunWriter.create(tmp_path / "x", name)


def test_runs_are_found_and_a_folder_that_is_none_is_refused(tmp_path, run):
    assert [found.run_id for found in list_runs(run.root.parent)] == [run.run_id]
    with pytest.raises(StorageError, match=r"has no run\.json"):
        open_run(tmp_path)


def test_every_stage_has_a_schema_and_an_unknown_one_is_refused():
    assert {"prompts", "val_rewards", "updates"} <= set(STAGES)
    assert all(schema_of(stage) for stage in STAGES)
    with pytest.raises(ValueError, match="no artifact is called 'reward'"):
        schema_of("reward")


def test_columns_are_documented():
    for schema in SCHEMAS.values():
        assert all(column.metadata[b"doc"] for column in schema)


def test_a_refused_table_is_kept_where_no_reader_looks(run):
    folder = run.quarantine(1, "rewards", build_table("rewards", reward_columns()), "a reason")
    assert json.loads((folder / "reason.json").read_text())["reason"] == "a reason"
    assert run.steps() == []
    assert Path(folder).parent.name == "quarantine"
