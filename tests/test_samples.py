"""One row per sample, all stages joined by id, for Arrow, Polars, pandas and DuckDB; and content digests."""

import json
import shutil
from datetime import UTC, datetime

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from planted import copy_of, flip_byte
from tiny_runs import run as train

from storage import RunWriter, StorageError, build_table, open_run
from storage.retention import Retention, drop, what_to_drop
from storage.samples import SAMPLES, STAGE_OF, content_digest

STAGES = ("rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages")


@pytest.fixture(scope="module")
def sound(tiny_run_in, tmp_path_factory):
    cfg = tiny_run_in(tmp_path_factory.mktemp("sound"))("trainer.total_training_steps=3")
    return train(cfg)[0]


@pytest.fixture
def run(sound, tmp_path):
    """A copy to damage."""
    return copy_of(sound, tmp_path)


def commit_again(run, step, stage, table):
    """A newer attempt of an open step's artifact."""
    (run.root / f"steps/{step:06d}/step.json").unlink(missing_ok=True)
    with RunWriter(run.root) as writer:
        writer.commit(step, stage, table, key="again", policy_version=step - 1, started_at=datetime.now(UTC))
    return open_run(run.root)


def test_a_row_holds_what_every_stage_says_of_that_sample(sound):
    samples = sound.step(2).samples()
    assert samples.num_rows == 32
    assert samples.schema.equals(SAMPLES)
    rows = {row["sample_id"]: row for row in samples.to_pylist()}
    for stage in STAGES:
        for row in sound.step(2).table(stage).to_pylist():
            assert {name: rows[row["sample_id"]][name] for name in row} == row
    prompts = {row["group_id"]: row for row in sound.step(2).table("prompts").to_pylist()}
    for row in rows.values():
        assert {name: row[name] for name in prompts[row["group_id"]]} == prompts[row["group_id"]]


def test_b42_one_prompt_of_a_step_is_joined_by_id_and_its_token_columns_are_aligned(sound):
    samples = sound.step(2).samples().to_pylist()
    group = [row for row in samples if row["group_id"] == samples[0]["group_id"]]
    assert [row["sample_index"] for row in group] == [0, 1, 2, 3]
    for row in group:
        length = len(row["response_ids"])
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "loss_mask"):
            assert len(row[name]) == length > 0
        assert dict(row["parts"]) == {"compute_score": row["score"]}


def test_b42_a_deleted_stage_is_missing_and_never_zeros(run):
    shutil.rmtree(run.root / "steps/000002/rewards")
    samples = open_run(run.root).step(2).samples()
    assert json.loads(samples.schema.metadata[b"missing"]) == ["rewards"]
    for name in ("score", "status", "parts", "seconds"):
        assert samples[name].null_count == 32
    assert samples["advantages"].null_count == 0
    everything = open_run(run.root).samples()
    assert json.loads(everything.schema.metadata[b"missing"]) == {"2": ["rewards"]}
    score = everything.filter(pa.compute.equal(everything["step"], 3))["score"]
    assert score.null_count == 0


def test_rows_of_a_stage_in_another_order_go_to_their_samples(run):
    before = {row["sample_id"]: row["score"] for row in run.step(2).samples().to_pylist()}
    table = run.step(2).table("rewards")
    order = np.random.default_rng(0).permutation(table.num_rows)
    after = commit_again(run, 2, "rewards", table.take(pa.array(order)).combine_chunks()).step(2)
    assert after.table("rewards")["sample_id"].to_pylist() != list(before)
    assert {row["sample_id"]: row["score"] for row in after.samples().to_pylist()} == before


@pytest.mark.parametrize(
    ("rows", "told"),
    [(list(range(1, 32)), r"of which 1 are missing \['000002-0000-000'\]"), ([*range(32), 3], "1 of them with an id")],
    ids=["a sample is missing", "a sample is there twice"],
)
def test_a_stage_with_other_samples_is_refused_with_their_ids(run, rows, told):
    table = run.step(2).table("rewards").take(pa.array(rows)).combine_chunks()
    after = commit_again(run, 2, "rewards", table)
    with pytest.raises(StorageError, match=f"rewards of step 2 .*{told}"):
        after.step(2).samples()
    assert after.step(2).samples(["response_text"]).num_rows == 32


def test_a_sample_id_that_two_rollouts_have_is_refused(run):
    table = run.step(2).table("rollouts").take(pa.array([0, *range(31)])).combine_chunks()
    with pytest.raises(StorageError, match=r"rollouts of step 2 .* has a sample_id twice"):
        commit_again(run, 2, "rollouts", table).step(2).samples()


def test_a_sample_in_another_group_than_its_rollout_is_refused(run):
    table = run.step(2).table("rewards")
    groups = table["group_id"].to_pylist()
    groups[0] = groups[-1]
    columns = {name: groups if name == "group_id" else table[name] for name in table.column_names}
    after = commit_again(run, 2, "rewards", build_table("rewards", columns))
    with pytest.raises(StorageError, match=r"rewards of step 2 .* another group than rollouts"):
        after.step(2).samples()


def test_b96_a_flipped_bit_is_refused_by_digest_and_only_where_it_is_needed(run):
    flip_byte(run.step(2).used("rewards") / "part-00000.arrow")
    fresh = open_run(run.root)
    with pytest.raises(StorageError, match=r"rewards.*has changed since it was committed"):
        fresh.step(2).samples()
    with pytest.raises(StorageError, match="has changed since it was committed"):
        fresh.samples([1, 2])
    assert fresh.step(2).samples(["response_text", "advantages"]).num_rows == 32
    assert fresh.samples([1, 3]).num_rows == 64


def test_several_steps_lie_below_one_another_behind_a_step_column(sound):
    two = sound.samples([1, 3], ["sample_id", "score"])
    assert two.column_names == ["step", "sample_id", "score"]
    assert two["step"].to_pylist() == [1] * 32 + [3] * 32
    assert sound.samples()["step"].unique().to_pylist() == [1, 2, 3]
    assert two["score"].to_pylist() == [
        score for step in (1, 3) for score in sound.step(step).table("rewards")["score"].to_pylist()
    ]


def test_steps_whose_rows_were_dropped_are_named_and_one_that_is_asked_for_is_refused(run):
    with RunWriter(run.root) as writer:
        drop(writer, what_to_drop(writer, Retention("last", 1), needed=3))
    left = open_run(run.root).samples()
    assert left["step"].unique().to_pylist() == [3]
    assert json.loads(left.schema.metadata[b"dropped"]) == [1, 2]
    with pytest.raises(StorageError, match=r"rows of .* were dropped"):
        open_run(run.root).samples([1])


def test_what_is_not_there_is_said_with_what_is(sound, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"step 9 of .* has no rollouts; it has: none"):
        sound.step(9).samples()
    with pytest.raises(ValueError, match="no column 'reward'; there are sample_id, group_id"):
        sound.step(1).samples(["reward"])
    with RunWriter.create(tmp_path / "empty", "empty"), pytest.raises(FileNotFoundError, match="no step has any"):
        open_run(tmp_path / "empty").samples()


def test_only_the_stages_of_the_wanted_columns_are_read(run):
    for stage in ("old_log_probs", "ref_log_probs", "advantages", "prompts"):
        flip_byte(run.step(1).used(stage) / "part-00000.arrow")
    assert open_run(run.root).step(1).samples(["sample_id", "score"]).num_rows == 32
    assert STAGE_OF["score"] == "rewards" and STAGE_OF["prompt_text"] == "prompts"


def test_samples_go_into_polars_pandas_and_duckdb_with_the_same_values(sound):
    samples = sound.step(1).samples()
    scores = samples["score"].to_pylist()
    frame = pl.from_arrow(samples)
    assert frame["score"].to_list() == scores
    assert frame["old_log_probs"].to_list() == samples["old_log_probs"].to_pylist()
    panda = samples.to_pandas()
    assert panda["score"].tolist() == scores
    assert [len(ids) for ids in panda["response_ids"]] == frame["response_ids"].list.len().to_list()
    assert duckdb.sql("select sum(score) from samples").fetchall() == [(sum(scores),)]
    rewards = sound.step(1).table("rewards")
    assert duckdb.sql("select count(*) from rewards where status = 'ok'").fetchall() == [(32,)]
    assert pl.from_arrow(rewards).height == 32


# ------------------------------------------------------------------------------------------------------ content digests


def rewards(**changes):
    columns = {
        "sample_id": ["a", "b", "c"],
        "group_id": ["g"] * 3,
        "score": [1.0, None, 0.0],
        "status": ["ok", "error", "ok"],
        "parts": [[("f", 1.0)], [("f", None)], []],
        "extracted": ["1", None, ""],
        "extra": ["{}"] * 3,
        "message": [None, "x", None],
        "seconds": [0.1, 0.2, 0.3],
    }
    return build_table("rewards", {**columns, **changes})


@pytest.mark.parametrize("stage", ["prompts", *STAGES, "updates"])
def test_a_content_digest_does_not_depend_on_how_rows_are_cut(sound, stage):
    table = sound.step(1).table(stage)
    pieces = pa.concat_tables([table.slice(0, 1), table.slice(1, 0), table.slice(1)])
    assert content_digest(pieces) == content_digest(table) == content_digest(pieces.combine_chunks())
    assert content_digest(table.slice(1)) != content_digest(table)
    assert content_digest(table.slice(1)) == content_digest(table.take(pa.array(range(1, table.num_rows))))


def test_a_content_digest_leaves_measured_seconds_out_and_nothing_else():
    base = content_digest(rewards())
    assert content_digest(rewards(seconds=[9.0, 9.0, 9.0])) == base
    changes = [
        {"score": [1.0, 0.0, 0.0]},
        {"score": [1.0, None, -0.0]},
        {"score": [0.0, None, 1.0]},
        {"extracted": ["1", "", None]},
        {"extracted": ["1", "1", ""]},
        {"extra": ["{", "}{}", "{}"]},
        {"parts": [[("f", 1.0)], [("g", None)], []]},
        {"sample_id": ["a", "c", "b"]},
    ]
    digests = [content_digest(rewards(**change)) for change in changes]
    assert base not in digests and len(set(digests)) == len(digests)


def test_what_lies_under_a_null_does_not_count():
    def column(hidden):
        return pa.Array.from_buffers(
            pa.float64(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([1.0, hidden, 3.0]).tobytes())]
        )

    def lists(hidden):
        offsets = pa.array([0, 1, 3, 4], pa.int64())
        values = pa.array([1.0, hidden, hidden, 2.0], pa.float32())
        return pa.LargeListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))

    for make in (column, lists):
        assert make(7.0).to_pylist()[1] is None
        assert content_digest(pa.table({"x": make(7.0)})) == content_digest(pa.table({"x": make(8.0)}))
    assert content_digest(pa.table({"x": lists(7.0)})) != content_digest(
        pa.table({"x": pa.array([[1.0], [], [2.0]], pa.large_list(pa.float32()))})
    )


def test_a_nan_equals_itself_and_another_type_does_not():
    table = pa.table({"x": pa.array([float("nan"), 1.0])})
    assert content_digest(table) == content_digest(pa.table({"x": pa.array([float("nan"), 1.0])}))
    assert content_digest(pa.table({"x": [1, 2]})) != content_digest(pa.table({"x": pa.array([1, 2], pa.int32())}))


def test_two_makings_of_the_same_step_have_the_same_content_and_other_artifacts(tiny_run, tmp_path):
    first, _ = train(tiny_run("trainer.total_training_steps=1"))
    second, _ = train(
        tiny_run("trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'again'}"),
    )
    for stage in first.step(1).stages():
        tables = [each.step(1).table(stage) for each in (first, second)]
        assert content_digest(tables[0]) == content_digest(tables[1]), stage
    assert first.step(1).manifest("rewards").digest != second.step(1).manifest("rewards").digest
