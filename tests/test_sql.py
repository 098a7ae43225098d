"""`grpoflow sql`: views over a run's artifacts, read only as far as a query needs them, in a locked-down DuckDB."""

import csv
import io
import json
import math
import shutil
import sys
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from planted import copy_of, flip_byte
from tiny_runs import run as train
from typer.testing import CliRunner

from flows.audit.query import ask, describe_views, opened, sql_command
from flows.audit.query.rows import VIEWS
from flows.audit.sources import open_sources
from flows.cli import app
from flows.run_folder import GoBack
from storage import RunWriter, StorageError, build_table, open_run
from storage.retention import Retention, compress, drop, what_to_compress, what_to_drop


@pytest.fixture(scope="module")
def sound(tiny_run_in, tmp_path_factory):
    cfg = tiny_run_in(tmp_path_factory.mktemp("sound"))("trainer.total_training_steps=4", "trainer.test_freq=2")
    return train(cfg)[0]


@pytest.fixture
def run(sound, tmp_path):
    """A copy to damage."""
    return copy_of(sound, tmp_path)


def rows(words, query, steps=None):
    """The answer to a query as Python rows; and what is told beside it."""
    words = [str(word) for word in (words if isinstance(words, list) else [words])]
    with opened(open_sources(words), steps) as (connection, seen):
        return ask(connection, seen, query).read_all().to_pylist(), seen.sentences()


def values(words, query, steps=None):
    """The answer as a list of tuples."""
    return [tuple(row.values()) for row in rows(words, query, steps)[0]]


def printed(capsys, *words, format="table", **options):
    """What the command prints on stdout and stderr."""
    capsys.readouterr()
    assert sql_command([str(word) for word in words], options.pop("steps", None), format, options.pop("out", None)) == 0
    return capsys.readouterr()


# --------------------------------------------------------------------------------------------------------------- views


def test_the_sample_view_is_the_sample_table_of_python(sound):
    answer, told = rows(sound.root, "select * from samples order by step, sample_id")
    assert answer == sound.samples().to_pylist()
    assert told == []


@pytest.mark.parametrize("view", list(VIEWS))
def test_every_view_has_the_columns_that_are_documented(sound, view):
    described = rows(sound.root, f"describe {view}")[0]
    assert [row["column_name"] for row in described] == ["step", *VIEWS[view].schema.names]
    assert all(field.metadata[b"doc"] for field in VIEWS[view].schema)
    assert rows(sound.root, f"select * from {view}")[1] == []


def test_every_stage_view_has_the_rows_of_that_stage(sound):
    for stage in sound.step(2).stages():
        answer, _ = rows(sound.root, f"select * exclude step from {stage} where step = 2")
        assert answer == sound.step(2).table(stage).to_pylist()


def test_a_token_row_holds_every_aligned_value_of_that_token(sound):
    samples = sound.step(3).samples().to_pylist()
    answer, _ = rows(sound.root, "select * from tokens where step = 3")
    flat = [(row, token) for row in samples for token in range(len(row["response_ids"]))]
    assert len(answer) == len(flat)
    for (sample, token), found in zip(flat, answer, strict=True):
        assert (found["sample_id"], found["position"]) == (sample["sample_id"], token)
        assert found["token_id"] == sample["response_ids"][token]
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "loss_mask", "entropy"):
            assert found[name] == sample[name][token]
        assert found["sum_pi_squared"] is None and found["rollout_is_weights"] is None


def test_the_columns_that_follow_from_two_others_are_those_of_a_hand_calculation(sound):
    query = (
        "select rollout_log_probs, old_log_probs, ref_log_probs, sampler_gap, sampler_ratio, ref_kl, ref_kl_k3 "
        "from tokens"
    )
    for rollout, old, ref, gap, ratio, k1, k3 in values(sound.root, query, "2"):
        assert gap == pytest.approx(rollout - old, abs=1e-12)
        assert ratio == pytest.approx(math.exp(old - rollout))
        assert k1 == pytest.approx(old - ref, abs=1e-12)
        assert k3 == pytest.approx(math.exp(ref - old) - 1 - (ref - old), abs=1e-12)


def test_metrics_and_steps_are_those_of_the_record(sound):
    record = sound.step(2).record["metrics"]
    assert dict(values(sound.root, "select name, value from metrics where step = 2")) == record
    step = rows(sound.root, "select * from steps where step = 2")[0][0]
    assert step["finished"] is True and step["lineage"] == 1
    assert step["samples"] == 32 and step["response_tokens"] == record["shape/rollouts/tokens"]
    assert step["stages"] == sound.step(2).stages() and step["missing"] == step["dropped"] == []


def test_every_generate_call_of_dynamic_sampling_can_be_asked_for(tiny_run):
    cfg = tiny_run("trainer.total_training_steps=1", "algorithm.filter_groups.enable=true", "data.train_batch_size=4")
    the_run, _ = train(cfg)
    calls = [stage for stage in the_run.step(1).stages() if stage.startswith("rollouts-")]
    assert calls
    expected = [(int(stage[-2:]), the_run.step(1).table(stage).num_rows) for stage in calls]
    assert values(the_run.root, "select call, count(*) from candidate_rollouts group by 1 order by 1") == expected
    kept = values(the_run.root, "select count(*) from candidate_rewards join rewards using (step, sample_id)")
    assert kept == [(the_run.step(1).table("rewards").num_rows,)]


def test_several_runs_at_once_have_a_column_that_says_which(sound, run):
    answer = values([sound.root, run.root], "select run, step, count(*) from rewards group by all order by all")
    assert answer == [(name, step, 32) for name in ("copy", "run") for step in (1, 2, 3, 4)]
    only = values([sound.root, run.root], "select distinct run from samples where run = 'copy' and step > 2")
    assert only == [("copy",)]
    joined = "from samples a join samples b using (step, sample_id) where a.run < b.run and a.score = b.score"
    assert values([sound.root, run.root], f"select count(*) {joined}") == [(128,)]


def test_two_runs_of_one_name_are_told_apart_by_their_paths(sound, tmp_path):
    other = tmp_path / "elsewhere" / "run"
    shutil.copytree(sound.root, other)
    answer = values([sound.root, other], "select distinct run from steps order by 1")
    assert answer == [(str(path),) for path in sorted([sound.root, other])]
    with pytest.raises(ValueError, match="named twice"):
        open_sources([str(other), str(other)])


def test_one_step_of_a_run_can_be_named(sound):
    assert values(f"{sound.root}@2", "select distinct step from samples") == [(2,)]
    with pytest.raises(StorageError, match=r"has no step 9; its steps are 1 to 4"):
        open_sources([f"{sound.root}@9"])


# -------------------------------------------------------------------------------------------------- histories, attempts


def test_a_lineage_sees_its_own_history(tiny_run):
    train(tiny_run("trainer.total_training_steps=2"))
    after, _ = train(tiny_run("trainer.total_training_steps=2", "trainer.seed=7"), back=GoBack(2))
    query = "select response_text from rollouts where step = 2"
    first, second = (values(f"{after.root}#{number}", query) for number in (1, 2))
    assert first != second == values(after.root, query)
    assert first == [
        (text,) for text in open_run(after.root, lineage=1).step(2).table("rollouts")["response_text"].to_pylist()
    ]
    both = values([f"{after.root}#1", f"{after.root}#2"], "select run, lineage from steps where step = 2 order by run")
    assert both == [("run#1", 1), ("run#2", 2)]
    with pytest.raises(StorageError, match="has no lineage 3"):
        open_sources([f"{after.root}#3"])


def test_the_attempt_that_the_finished_step_used_is_asked_not_the_newest(run):
    before = values(run.root, "select score from rewards where step = 2")
    table = run.step(2).table("rewards")
    columns = {name: table[name] for name in table.column_names}
    other = build_table("rewards", {**columns, "score": [0.5] * 32})
    with RunWriter(run.root) as writer:
        writer.commit(2, "rewards", other, key="x", policy_version=1, started_at=datetime.now(UTC))
    assert len(open_run(run.root).step(2).attempts("rewards")) == 2
    assert values(run.root, "select score from rewards where step = 2") == before
    assert values(run.root, "select score from samples where step = 2") == before


def test_a_run_that_is_being_written_can_be_asked_and_is_not_changed(run):
    def tree():
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.root.rglob("*") if path.is_file()}

    with RunWriter(run.root):
        before = tree()
        assert values(run.root, "select count(*) from samples") == [(128,)]
        assert tree() == before


# ------------------------------------------------------------------------------------------------------------- laziness


def spoil(run, keep):
    """Flip a byte in every part but those that are kept, as (step, stage)."""
    for step in run.steps():
        for stage in run.step(step).stages():
            if (step, stage) not in keep:
                flip_byte(run.step(step).used(stage) / "part-00000.arrow")


def test_only_files_of_the_views_and_steps_that_a_query_names_are_opened(run):
    spoil(run, keep={(3, "rewards"), (3, "rollouts"), (4, "rewards")})
    assert values(run.root, "select count(*) from rewards where step = 3") == [(32,)]
    assert values(run.root, "select count(*) from rewards where step >= 3") == [(64,)]
    assert values(run.root, "select count(*) from rewards where step in (3, 4)") == [(64,)]
    assert values(run.root, "select count(*) from rewards where step between 3 and 4 and score >= 0") == [(64,)]
    assert values(run.root, "select count(score) from samples where step = 3") == [(32,)]
    assert values(run.root, "select count(*) from rewards", "3..4") == [(64,)]
    assert values(run.root, "select count(*) from steps") == [(4,)]
    assert len(
        values(
            run.root, "select position, token_id, score from tokens join samples using (step, sample_id) where step = 3"
        )
    )
    assert values(
        run.root,
        "with r as (from rewards where step = 3), o as (from rollouts where step = 3) "
        "select count(*) from r join o using (sample_id)",
    ) == [(32,)]


def test_b96_a_damaged_file_is_refused_by_its_digest_where_a_query_needs_it(run):
    flip_byte(run.step(2).used("rewards") / "part-00000.arrow")
    for query in ("select avg(score) from rewards", "select avg(score) from samples", "select * from samples"):
        with pytest.raises(
            StorageError, match=r"000002/rewards/0001/part-00000.arrow has changed since it was committed"
        ):
            rows(run.root, query)
    assert len(values(run.root, "select response_text from samples")) == 128


def test_the_first_rows_of_a_long_answer_come_before_later_steps_are_read(run):
    with opened(open_sources([str(run.root)])) as (connection, seen):
        assert ask(connection, seen, "select * from samples limit 1").read_all().num_rows == 1
    spoil(run, keep={(1, stage) for stage in run.step(1).stages()})
    assert len(values(run.root, "select * from samples limit 1")) == 1


# --------------------------------------------------------------------------------------------------- what is not there


def test_b42_a_missing_stage_is_null_and_told_and_the_step_is_shown_as_incomplete(run):
    before = dict(values(run.root, "select step, sum(score) from samples group by step"))
    shutil.rmtree(run.root / "steps/000002/rewards")
    answer, told = rows(
        run.root, "select step, sum(score) as total, count(*) as n from samples group by step order by step"
    )
    assert [row["total"] for row in answer] == [before[1], None, before[3], before[4]]
    assert [row["n"] for row in answer] == [32] * 4
    assert told == ["copy: rewards of step 2: missing"]
    assert values(run.root, "select step from rewards group by step order by step") == [(1,), (3,), (4,)]
    assert values(run.root, "select step, missing from steps where len(missing) > 0") == [(2, ["rewards"])]


def test_an_open_step_shows_what_it_yet_lacks(run):
    (run.root / "steps/000004/step.json").unlink()
    shutil.rmtree(run.root / "steps/000004/updates")
    step = rows(run.root, "select finished, missing from steps where step = 4")[0][0]
    assert step == {"finished": False, "missing": ["updates"]}
    assert values(run.root, "select count(*) from samples where step = 4") == [(32,)]


def test_compressed_rows_are_read_and_dropped_ones_are_told(run, capsys):
    before = values(run.root, "select sample_id, score, response_text from samples where step >= 2 order by all")
    with RunWriter(run.root) as writer:
        rule = Retention("last", 3, compress=True)
        drop(writer, what_to_drop(writer, rule, needed=4))
        assert compress(writer, what_to_compress(writer, rule, needed=4)) > 0
    assert list(run.root.glob("steps/000002/rewards/0001/*.zst"))
    assert values(run.root, "select sample_id, score, response_text from samples order by all") == before
    out = printed(capsys, run.root, "select distinct step from samples order by 1", format="json")
    assert [row["step"] for row in json.loads(out.out)] == [2, 3, 4]
    assert out.err == "note: copy: rollouts of step 1: rows dropped by retention\n"
    assert values(run.root, "select step, len(dropped) > 0 from steps order by 1")[:2] == [(1, True), (2, False)]


# -------------------------------------------------------------------------------------------------- what is not allowed


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd')",
        "select * from '/etc/passwd'",
        "select * from glob('/*')",
        "select * from read_parquet('https://example.com/x.parquet')",
        "select * from secret_python_table",
        "select * from duckdb_secrets() where load_aws_credentials()",
        "copy rewards to 'stolen.csv'",
        "attach 'other.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "pragma version",
        "create table t as select 1",
        "drop view rewards",
        "delete from rewards",
        "insert into rewards select * from rewards",
        "select 1; select 2",
        "",
    ],
)
def test_sql_reaches_nothing_but_the_views(sound, tmp_path, monkeypatch, query):
    secret_python_table = pa.table({"x": [1]})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as told:
        rows(sound.root, query)
    assert "\n" not in str(told.value) and secret_python_table.num_rows == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_name_is_one_line_with_the_names_that_are_near(sound):
    with pytest.raises(ValueError, match=r"^Catalog Error: .*rewrds does not exist! The views are rewards, ") as told:
        rows(sound.root, "select * from rewrds")
    assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match=r'"scor" not found.* rewards has the columns score, ') as told:
        rows(sound.root, "select scor from rewards")
    assert "response_ids" not in str(told.value)
    with pytest.raises(ValueError, match=r"^Parser Error: syntax error at or near"):
        rows(sound.root, "selec 1 from rewards")


def test_columns_of_one_name_are_numbered_in_every_format(sound, capsys, tmp_path):
    query = "select * from rewards r join rollouts o using (sample_id) where r.step = 1 and o.step = 1 limit 2"
    have = rows(sound.root, query)[0]
    assert len(have) == 2
    assert {"step", "step_1", "group_id", "group_id_1"} <= have[0].keys()
    assert json.loads(printed(capsys, sound.root, "select 1 as a, 2 as a, 3 as a_1", format="json").out) == [
        {"a": 1, "a_2": 2, "a_1": 3}
    ]
    assert "group_id_1" in printed(capsys, sound.root, query).out.splitlines()[0]


def test_a_value_that_python_has_not_is_one_line(sound):
    told = CliRunner().invoke(app, ["sql", str(sound.root), "select * from test_all_types()"])
    assert told.exit_code != 0
    assert isinstance(told.exception, ValueError) and "cast it to varchar" in str(told.exception)


def test_a_wrong_query_ends_with_code_2_and_one_line(sound):
    result = CliRunner().invoke(app, ["sql", str(sound.root), "select * from rewrds"])
    assert isinstance(result.exception, ValueError)
    assert CliRunner().invoke(app, ["sql", "no/run"]).exception.args[0].endswith("is no run: it has no run.json")
    with pytest.raises(ValueError, match="name a run before the query"):
        sql_command(["select 1"], None, "table", None)


# -------------------------------------------------------------------------------------------------------------- formats


QUERY = (
    "select step, sample_id, score, parts, loss_mask, response_text, message from samples order by sample_id limit 3"
)


def test_every_format_gives_the_same_rows(sound, capsys, tmp_path):
    expected = rows(sound.root, QUERY)[0]
    as_json = json.loads(printed(capsys, sound.root, QUERY, format="json").out)
    assert [{**row, "parts": list(row["parts"].items())} for row in as_json] == expected
    lines = printed(capsys, sound.root, QUERY, format="jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == as_json
    table = list(csv.DictReader(io.StringIO(printed(capsys, sound.root, QUERY, format="csv").out)))
    assert [row["response_text"] for row in table] == [row["response_text"] for row in expected]
    assert [json.loads(row["loss_mask"]) for row in table] == [row["loss_mask"] for row in expected]
    assert [float(row["score"]) for row in table] == [row["score"] for row in expected]
    for format in ("parquet", "arrow"):
        out = tmp_path / f"answer.{format}"
        assert printed(capsys, sound.root, QUERY, format=format, out=out).out == ""
        frame = pl.read_parquet(out) if format == "parquet" else pl.read_ipc(out)
        assert frame["response_text"].to_list() == [row["response_text"] for row in expected]
        assert frame["loss_mask"].to_list() == [row["loss_mask"] for row in expected]
    text = printed(capsys, sound.root, QUERY).out.splitlines()
    assert text[0].split()[:3] == ["step", "sample_id", "score"] and len(text) == 4


def test_nothing_but_json_is_on_stdout_and_a_nan_is_null(sound, capsys):
    query = "select 'nan'::double as a, ['inf'::float, 1.5] as b, [] as c where (select count(*) from rewards) > 0"
    assert json.loads(printed(capsys, sound.root, query, format="json").out) == [{"a": None, "b": [None, 1.5], "c": []}]
    assert json.loads(printed(capsys, sound.root, "select * from rewards where false", format="json").out) == []


def test_a_long_table_is_cut_and_says_so(sound, capsys):
    out = printed(capsys, sound.root, "select sample_id from samples")
    assert len(out.out.splitlines()) == 101
    assert out.err == "note: the first 100 rows; --format csv or json gives all\n"


def test_files_are_neither_overwritten_nor_put_into_a_run(sound, tmp_path):
    there = tmp_path / "there.csv"
    there.write_text("mine")
    with pytest.raises(StorageError, match=r"there.csv is there already and is not overwritten"):
        sql_command([str(sound.root), QUERY], None, "csv", there)
    assert there.read_text() == "mine"
    inside = sound.root / "steps" / "answer.parquet"
    with pytest.raises(StorageError, match="lies in the folder of a run"):
        sql_command([str(sound.root), QUERY], None, "parquet", inside)
    with pytest.raises(ValueError, match="not for a terminal: name a new file with -o FILE"):
        sql_command([str(sound.root), QUERY], None, "parquet", None)
    with pytest.raises(ValueError, match="--format xml: there are table, json"):
        sql_command([str(sound.root), QUERY], None, "xml", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.csv"]


def test_an_answer_that_fails_half_way_leaves_no_file(run, tmp_path):
    flip_byte(run.step(4).used("rewards") / "part-00000.arrow")
    with pytest.raises(StorageError, match="has changed since"):
        sql_command([str(run.root), "select * from rewards"], None, "csv", tmp_path / "out" / "answer.csv")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_a_query_the_views_and_columns_are_listed(sound, capsys):
    text = printed(capsys, sound.root).out
    assert text.strip() == describe_views()
    for name, view in VIEWS.items():
        assert f"\n{name}: " in f"\n{text}"
        assert all(f"  {column} " in text for column in view.schema.names)
    assert "ground_truth           varchar          reference answer: JSON text" in text
    assert "which run" not in text and "which run" in describe_views(several=True)


def test_a_query_may_be_longer_than_a_path(sound, capsys):
    query = f"select count(*) as n from samples where response_text <> '{'x' * 5000}'"
    assert json.loads(printed(capsys, sound.root, query, format="json").out) == [{"n": 128}]


def test_a_query_is_read_from_standard_input(sound, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("select count(*) as n from samples"))
    assert json.loads(printed(capsys, sound.root, "-", format="json").out) == [{"n": 128}]


def test_tokens_of_a_step_come_in_batches_of_bounded_size(sound, monkeypatch):
    monkeypatch.setattr("flows.audit.query.rows.TOKENS_PER_BATCH", 10)
    expected = [
        (row["sample_id"], place)
        for row in sound.step(1).samples().to_pylist()
        for place in range(len(row["response_ids"]))
    ]
    assert values(sound.root, "select sample_id, position from tokens where step = 1") == expected
    sizes = [len(table) for table in VIEWS["tokens"].rows(sound.step(1), ["position"])]
    assert max(sizes) <= 10 and sum(sizes) == len(expected)


def test_a_list_that_is_not_aligned_with_its_response_is_refused(run):
    table = run.step(4).table("old_log_probs")
    short = [row[:-1] for row in table["old_log_probs"].to_pylist()]
    columns = {name: short if name == "old_log_probs" else table[name] for name in table.column_names}
    (run.root / "steps/000004/step.json").unlink()
    with RunWriter(run.root) as writer:
        made = build_table("old_log_probs", columns)
        writer.commit(4, "old_log_probs", made, key="x", policy_version=3, started_at=datetime.now(UTC))
    with pytest.raises(StorageError, match=r"old_log_probs of step 4 .* is not aligned with response_ids"):
        rows(run.root, "select old_log_probs from tokens where step = 4")
    assert np.isfinite([row[0] for row in values(run.root, "select advantages from tokens where step = 4")]).all()
