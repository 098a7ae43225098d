"""Faults planted into copies of a run: files changed, and artifacts written anew so that every digest fits again."""

import json
import shutil
import sqlite3
from pathlib import Path

import pyarrow as pa

from storage import Ragged, build_table, open_run
from storage.artifacts import read_manifest, write_part
from storage.durable import sha256_json
from storage.run_values import AFTER
from storage.schema import without_round


def copy_of(run, folder):
    """A copy of a run, and of the MLflow store beside it, under another folder; returns the run."""
    copied = folder / "copy"
    shutil.copytree(run.root, copied)
    story = copied / "tracking.json"
    if story.exists():
        old = json.loads(story.read_text())["uri"]
        shutil.copy(old.removeprefix("sqlite:///"), folder / "mlflow.db")
        for path in copied.glob("tracking*.json*"):
            path.write_text(path.read_text().replace(old, f"sqlite:///{folder / 'mlflow.db'}"))
    return open_run(copied)


def flip_byte(path, place=None):
    """Change one bit of a file; by default in its middle."""
    data = bytearray(Path(path).read_bytes())
    place = len(data) // 2 if place is None else place
    data[place] ^= 1
    Path(path).write_bytes(data)


def folder_of(run, step, stage):
    return run.step(step).used(stage)


def rewrite(run, step, stage, change, *, cover=True, manifest=None):
    """Write an artifact anew with other columns, under a manifest whose digests fit.

    Args:
        run: the run.
        step: number of the step.
        stage: name of the artifact.
        change: from its columns, as Python lists by name, to other ones; None: the same.
        cover: also have everything that was made from it, and the step's record, name the new digest.
        manifest: from the manifest's values to other ones.
    """
    folder = folder_of(run, step, stage)
    table = run.step(step).table(stage)
    if change is not None:
        columns = change(table.to_pydict())
        table = build_table(stage, {name: _array(columns[name], table.schema.field(name)) for name in columns})
    values = json.loads((folder / "manifest.json").read_text())
    old = values["digest"]
    parts = []
    if change is not None:
        for part in folder.glob("part-*"):
            part.unlink()
        parts = [write_part(folder, 0, table).model_dump(mode="json")]
        values |= {"parts": parts, "rows": table.num_rows, "bytes": parts[0]["bytes"]}
        values["shapes"] |= {"rows": table.num_rows, "bytes": parts[0]["bytes"]}
    if manifest is not None:
        manifest(values)
    _seal(folder, values)
    if cover:
        _cover(run, step, stage, old, read_manifest(folder).digest)


def _array(values, field):
    if pa.types.is_map(field.type):
        values = [list(dict(row).items()) for row in values]
    return pa.array(values, type=field.type)


def _seal(folder, values):
    """Write a manifest whose digest, key and checksum are those of the rest."""
    values.pop("checksum", None)
    values["digest"] = sha256_json([values["schema_id"], [[part["rows"], part["sha256"]] for part in values["parts"]]])
    if values["made_from"]:
        values["made_from"]["parents"] = values["parents"]
        values["key"] = sha256_json({name: each for name, each in values["made_from"].items() if name != "modules"})
    (folder / "manifest.json").write_text(json.dumps({**values, "checksum": sha256_json(values)}))


def _cover(run, step, stage, old, new):
    view = run.step(step)
    for child in view.stages():
        if without_round(child) in _later(stage):
            folder = view.attempts(child)[-1]
            values = json.loads((folder / "manifest.json").read_text())
            if values["parents"].get(stage) == old:
                values["parents"][stage] = new
                _seal(folder, values)
    path = run.record_path(step)
    record = json.loads(path.read_text())
    record["artifacts"][stage] = new
    manifest = read_manifest(view.attempts(stage)[-1])
    record["metrics"][f"shape/{stage}/bytes"] = float(manifest.bytes)
    record["metrics"][f"shape/{stage}/rows"] = float(manifest.rows)
    path.write_text(json.dumps(record))


def _later(stage):
    return AFTER.get(without_round(stage), ())


def set_metric(run, name, step, value):
    """Change one value in the run's SQLite store of MLflow."""
    uri = json.loads((run.root / "tracking.json").read_text())["uri"]
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as store:
        changed = store.execute("update metrics set value = ? where key = ? and step = ?", (value, name, step)).rowcount
    assert changed == 1


def tokens_of(run, step, stage="rollouts", column="response_ids"):
    return [row.tolist() for row in Ragged.from_arrow(run.step(step).table(stage)[column])]


def drop_last_batch_from_footer(folder):
    """Rewrite an artifact's only part as two batches of which the footer lists one, under fitting digests."""
    path = folder / "part-00000.arrow"
    with pa.ipc.open_file(path) as reader:
        table = reader.read_all()
    half = table.num_rows // 2
    whole, short = pa.BufferOutputStream(), pa.BufferOutputStream()
    for sink, rows in ((whole, table.num_rows), (short, half)):
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.slice(0, rows), max_chunksize=half)
    whole, short = whole.getvalue().to_pybytes(), short.getvalue().to_pybytes()
    end = b"\xff\xff\xff\xff\x00\x00\x00\x00"
    path.write_bytes(whole[: whole.rindex(end) + 8] + short[short.rindex(end) + 8 :])
    from storage.durable import sha256_file

    values = json.loads((folder / "manifest.json").read_text())
    values["parts"][0] |= {"rows": half, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    values |= {"rows": half, "bytes": path.stat().st_size}
    _seal(folder, values)
