"""`grpoflow export --what rollouts|samples`: the same columns at every step, JSON without NaN, nothing overwritten."""

import json
import math
import shutil
from datetime import UTC, datetime

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted import copy_of, flip_byte
from tiny_runs import run as train
from typer.testing import CliRunner

from flows.audit.export import COLUMNS, export_any_command, row_schema
from flows.cli import app
from storage import RunWriter, StorageError, build_table, open_run
from storage.retention import Retention, drop, what_to_drop

REWARD = """
from decimal import Decimal

import numpy as np


class Thing:
    def __repr__(self):
        return "a thing"


def compute_score(data_source, solution_str, ground_truth, extra_info):
    extras = {"set": {2, 1}, "bytes": b"x", "decimal": Decimal("1.5"), "array": np.eye(2), "nan": float("nan")}
    return {"score": float(len(solution_str or "") % 2), **extras, "long": "y" * 100_000, "object": Thing()}
"""


@pytest.fixture(scope="module")
def sound(tiny_run_in, tmp_path_factory):
    """Three steps whose reward function returns what JSON cannot hold."""
    folder = tmp_path_factory.mktemp("sound")
    cfg = tiny_run_in(folder)("trainer.total_training_steps=3")
    (folder / "reward.py").write_text(REWARD)
    return train(cfg)[0]


def export(source, out, what, format=None, steps=None, adapter=False):
    return export_any_command(str(source), out, what, format, steps, adapter)


def lines_of(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_b38_json_lines_hold_every_value_by_the_written_rule_with_the_same_columns_at_every_step(sound, tmp_path):
    out = tmp_path / "samples.jsonl"
    assert export(sound.root, out, "samples") == 0
    rows = lines_of(out)
    assert len(rows) == 96 and {row["step"] for row in rows} == {1, 2, 3}
    assert {tuple(row) for row in rows} == {("step", *COLUMNS["samples"])}
    extra = json.loads(rows[0]["extra"])
    assert extra["set"] == [1, 2] and extra["decimal"] == "1.5" and extra["array"] == [[1.0, 0.0], [0.0, 1.0]]
    assert extra["nan"] is None and extra["object"] == "a thing" and len(extra["long"]) < 70_000
    for row, expected in zip(rows, sound.samples().to_pylist(), strict=True):
        assert row == {**expected, "parts": dict(expected["parts"])}


def test_a_nan_in_a_stored_column_is_null_in_json_and_a_nan_in_parquet(sound, tmp_path):
    run = copy_of(sound, tmp_path)
    table = run.step(3).table("old_log_probs")
    entropy = [[math.nan, *row[1:]] for row in table["entropy"].to_pylist()]
    columns = {name: entropy if name == "entropy" else table[name] for name in table.column_names}
    (run.root / "steps/000003/step.json").unlink()
    with RunWriter(run.root) as writer:
        made = build_table("old_log_probs", columns)
        writer.commit(3, "old_log_probs", made, key="x", policy_version=2, started_at=datetime.now(UTC))
    export(f"{run.root}@3", tmp_path / "x.jsonl", "samples")
    assert all(row["entropy"][0] is None and row["old_log_probs"][0] < 0 for row in lines_of(tmp_path / "x.jsonl"))
    export(f"{run.root}@3", tmp_path / "x.parquet", "samples", "parquet")
    assert all(math.isnan(row[0]) for row in pl.read_parquet(tmp_path / "x.parquet")["entropy"].to_list())


def test_parquet_has_the_types_of_the_schema_even_where_a_stage_is_missing(sound, tmp_path):
    run = copy_of(sound, tmp_path)
    for stage in ("rewards", "ref_log_probs"):
        shutil.rmtree(run.root / "steps/000002" / stage)
    for steps in ("1", "2", None):
        out = tmp_path / f"{steps}.parquet"
        export(run.root, out, "samples", "parquet", steps)
        assert pq.read_schema(out).equals(row_schema("samples"))
    frame = pl.read_parquet(tmp_path / "None.parquet")
    assert frame.filter(pl.col("step") == 2)["score"].null_count() == 32
    assert frame.filter(pl.col("step") != 2)["score"].null_count() == 0


def test_rollouts_are_prompts_and_responses(sound, tmp_path):
    export(f"{sound.root}@2", tmp_path / "rollouts.jsonl", "rollouts")
    rows = lines_of(tmp_path / "rollouts.jsonl")
    texts = sound.step(2).table("rollouts")["response_text"].to_pylist()
    assert [row["response_text"] for row in rows] == texts
    assert {"prompt_text", "ground_truth", "response_ids", "finish_reason"} <= rows[0].keys()
    assert {"score", "advantages", "old_log_probs"}.isdisjoint(rows[0])


def test_a_hugging_face_folder_has_one_parquet_file_a_step_and_a_card(sound, tmp_path, capsys):
    out = tmp_path / "data_set"
    export(sound.root, out, "samples", "hf", "2..")
    assert capsys.readouterr().out == f"64 samples of steps 2..3 are in {out}\n"
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files == ["README.md", "data/train-000002.parquet", "data/train-000003.parquet"]
    frame = pl.read_parquet(out / "data" / "*.parquet")
    assert frame["sample_id"].to_list() == sound.samples([2, 3])["sample_id"].to_pylist()
    assert not any(pa.types.is_map(field.type) for field in pq.read_schema(out / "data/train-000002.parquet"))
    assert frame["parts"][0].to_list() == [{"key": "compute_score", "value": frame["score"][0]}]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nconfigs:") and "path: data/train-*.parquet" in card
    assert "| `score` | double | weighted sum of the parts; null: no verdict |" in card
    assert str(tmp_path) not in card


def test_nothing_is_overwritten_or_put_into_a_run(sound, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for what, format in (("samples", "jsonl"), ("rollouts", "hf")):
        with pytest.raises(StorageError, match="there already and is not overwritten"):
            export(sound.root, there, what, format)
    for what in ("samples", "checkpoint"):
        with pytest.raises(StorageError, match="lies in the folder of a run"):
            export(sound.root, sound.root / "exported", what)
    assert not (sound.root / "exported").exists() and list(tmp_path.iterdir()) == [there]


def test_nothing_is_put_into_another_run_either(sound, tmp_path):
    other = copy_of(sound, tmp_path)
    with pytest.raises(StorageError, match="lies in the folder of a run"):
        export(sound.root, other.root / "steps/rows.jsonl", "samples")


def test_without_a_format_the_file_s_name_says_it(sound, tmp_path):
    export(sound.root, tmp_path / "rows.parquet", "rollouts")
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 96
    with pytest.raises(ValueError, match="grpoflow sql --format csv"):
        export(sound.root, tmp_path / "rows.csv", "rollouts")


def test_a_failure_leaves_nothing(sound, tmp_path):
    run = copy_of(sound, tmp_path)
    flip_byte(run.step(3).used("rewards") / "part-00000.arrow")
    for format in ("jsonl", "parquet", "hf"):
        with pytest.raises(StorageError, match="has changed since it was committed"):
            export(run.root, tmp_path / "out" / "rows", "samples", format)
    assert list((tmp_path / "out").iterdir()) == []
    assert export(run.root, tmp_path / "out" / "rows", "rollouts") == 0


def test_dropped_steps_are_left_out_and_told(sound, tmp_path, capsys):
    run = copy_of(sound, tmp_path)
    with RunWriter(run.root) as writer:
        drop(writer, what_to_drop(writer, Retention("last", 1), needed=3))
    export(run.root, tmp_path / "x.jsonl", "samples")
    told = capsys.readouterr()
    assert told.out.startswith("32 samples of step 3 are in ")
    assert told.err == "note: rows of steps 1..2 were dropped by retention and are left out\n"
    with pytest.raises(StorageError, match="were dropped"):
        export(f"{run.root}@1", tmp_path / "y.jsonl", "samples")
    with pytest.raises(FileNotFoundError, match="no rollouts to export"):
        export(run.root, tmp_path / "y.jsonl", "samples", steps="1")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"what": "tokens"}, "--what tokens: there are checkpoint, rollouts, samples"),
        ({"what": "samples", "format": "csv"}, "rows are written as jsonl, parquet, hf"),
        ({"what": "samples", "adapter": True}, "--adapter goes with --what checkpoint"),
        ({"what": "checkpoint", "format": "jsonl"}, "a checkpoint is written as hf"),
        ({"what": "checkpoint", "steps": "1"}, "--steps goes with"),
    ],
)
def test_what_does_not_go_together_is_said(sound, tmp_path, options, told):
    with pytest.raises(ValueError, match=told):
        export(sound.root, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_exported_as_before_where_nothing_else_is_asked_for(sound, tmp_path):
    run = copy_of(sound, tmp_path)
    result = CliRunner().invoke(app, ["export", f"{run.root}@3", str(tmp_path / "policy")])
    assert result.exit_code == 0, result.exception
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        each.name for each in (tmp_path / "policy").iterdir()
    }
    assert open_run(run.root).finished_steps() == [1, 2, 3]
