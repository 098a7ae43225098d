"""Retention: what is let go of, what never is, and that a kill or a full disk on the way loses nothing else."""

import errno
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import digest, run, tokens

from flows.gc import Retainer, gc_command, retention_of
from storage import RunLocked, RunWriter, StorageError, build_table, open_run, read_table
from storage.artifacts import DROPPED, check_parts, read_manifest
from storage.checkpoints import checkpoints, save_checkpoint
from storage.retention import (
    Retention,
    compress,
    drop,
    first_needed_step,
    what_is_dead,
    what_to_compress,
    what_to_drop,
)

LAST_2 = Retention("last", 2)


def commit(the_run, step, stage="rewards", rows=200):
    table = build_table(
        stage,
        {
            "sample_id": [f"{step}-{i}" for i in range(rows)],
            "group_id": [f"{step}"] * rows,
            "score": [1.0] * rows,
            "status": ["ok"] * rows,
            "parts": [[("f", 1.0)]] * rows,
            "extracted": [None] * rows,
            "extra": ["{}"] * rows,
            "message": [None] * rows,
            "seconds": [0.0] * rows,
        },
    )
    return the_run.commit(step, stage, table, key=f"k{step}", policy_version=step - 1, started_at=datetime.now(UTC))


def checkpoint(the_run, step):
    about = {"policy_version": step, "run_id": the_run.run_id}
    return save_checkpoint(
        the_run.root,
        step,
        lambda folder: (folder / "weights").write_bytes(b"w" * 1000),
        expected_bytes=1000,
        about=about,
        lineage=the_run.lineage,
    )


def steps_of(the_run, steps):
    for step in steps:
        commit(the_run, step)
        the_run.finish_step(step, {"metrics": {}, "artifacts": {}})


@pytest.fixture
def ten(tmp_path):
    """A run of ten finished steps with checkpoints 4 and 8, and an open step 11."""
    with RunWriter.create(tmp_path / "run", "ten", {"config.yaml": "{}\n"}) as the_run:
        steps_of(the_run, range(1, 11))
        commit(the_run, 11)
        checkpoint(the_run, 4)
        checkpoint(the_run, 8)
        yield the_run


def dropped(the_run, rule):
    return [item.step for item in what_to_drop(the_run, rule, first_needed_step(the_run))]


def has_rows(the_run):
    return [step for step in the_run.steps() if list(the_run.step(step).folder.glob("*/*/part-*"))]


# ------------------------------------------------------------------------------------------------------ the decision


def test_nothing_is_dropped_unless_a_rule_says_so(ten):
    assert dropped(ten, Retention()) == []


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (Retention("last", 2), [1, 2, 3, 4]),
        (Retention("last", 8), [1, 2]),
        (Retention("last", 10), []),
        (Retention("every", 2), [1, 3]),
        (Retention("every", 3), [1, 2, 4]),
        (Retention("every", 1), []),
    ],
)
def test_of_steps_up_to_the_oldest_checkpoint_the_rule_decides_and_later_ones_stay(ten, rule, steps):
    assert first_needed_step(ten) == 5
    assert dropped(ten, rule) == steps


def test_without_a_checkpoint_every_step_is_needed(tmp_path):
    with RunWriter.create(tmp_path / "run", "r") as the_run:
        steps_of(the_run, range(1, 11))
        assert first_needed_step(the_run) == 0
        assert dropped(the_run, Retention("last", 1)) == []


def test_checkpoints_that_are_all_damaged_are_none_and_one_that_is_damaged_leaves_more_to_keep(ten):
    (ten.root / "checkpoints" / "000008" / "weights").write_bytes(b"v" * 1000)
    assert dropped(ten, LAST_2) == [1, 2, 3, 4]
    (ten.root / "checkpoints" / "000004" / "weights").write_bytes(b"v" * 1000)
    assert dropped(ten, LAST_2) == []


def test_the_last_finished_step_and_the_open_one_stay_even_behind_a_checkpoint(tmp_path):
    with RunWriter.create(tmp_path / "run", "r") as the_run:
        steps_of(the_run, range(1, 4))
        checkpoint(the_run, 3)
        commit(the_run, 4)
        assert dropped(the_run, Retention("every", 100)) == [1, 2]


def test_a_step_behind_an_unfinished_one_does_not_count_as_finished(tmp_path):
    with RunWriter.create(tmp_path / "run", "r") as the_run:
        steps_of(the_run, [1, 2, 3, 5, 6])
        checkpoint(the_run, 6)
        assert first_needed_step(the_run) == 0


def test_all_attempts_of_a_dropped_step_go(ten):
    commit(ten, 1)
    items = what_to_drop(ten, LAST_2, first_needed_step(ten))
    assert [(item.step, item.stage, item.attempt) for item in items[:2]] == [(1, "rewards", 1), (1, "rewards", 2)]
    assert items[0].bytes == read_manifest(items[0].folder).bytes
    assert items[0].why == "storage.retention keeps the last 2 steps"


def test_the_decision_changes_nothing(ten):
    before = sorted((str(path), path.stat().st_mtime_ns) for path in ten.root.rglob("*"))
    dropped(ten, LAST_2)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in ten.root.rglob("*")) == before


# ---------------------------------------------------------------------------------------------------------- dropping


def test_a_dropped_artifact_keeps_its_manifest_and_a_reader_is_told_when_and_why(ten):
    artifact = ten.step(1).artifact("rewards")
    manifest = ten.step(1).manifest("rewards")
    items = what_to_drop(ten, LAST_2, first_needed_step(ten))
    assert drop(ten, items) == sum(item.bytes for item in items) > 0
    assert has_rows(ten) == [5, 6, 7, 8, 9, 10, 11]
    assert ten.step(1).manifest("rewards") == manifest
    today = datetime.now(UTC).date().isoformat()
    with pytest.raises(StorageError, match=f"dropped on {today}.*storage.retention keeps the last 2 steps"):
        read_table(artifact)
    with pytest.raises(StorageError, match="dropped on"):
        ten.step(1).table("rewards")
    assert ten.find(1, "rewards", "k1") is None
    assert dropped(ten, LAST_2) == []
    assert [event["bytes"] for event in ten.events() if event["event"] == "dropped"] == [
        sum(item.bytes for item in items)
    ]


def test_a_kill_while_dropping_leaves_an_artifact_whole_or_marked_and_the_next_time_ends_it(ten, monkeypatch):
    items = what_to_drop(ten, LAST_2, first_needed_step(ten))
    known, calls = Path.unlink, []

    def die(path, **options):
        if path.name.startswith("part-"):
            calls.append(path)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return known(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            drop(ten, items)
    assert has_rows(ten)[0] == 2
    with pytest.raises(StorageError, match="dropped on"):
        ten.step(2).table("rewards")
    assert ten.step(3).table("rewards").num_rows == 200
    assert dropped(ten, LAST_2) == [2, 3, 4]
    drop(ten, what_to_drop(ten, LAST_2, first_needed_step(ten)))
    assert has_rows(ten)[0] == 5


def test_a_full_disk_does_not_keep_rows_from_being_dropped(ten, monkeypatch):
    from storage import retention

    known = retention.write_json

    def full(path, value):
        if list(path.parent.glob("part-*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        known(path, value)

    monkeypatch.setattr(retention, "write_json", full)
    drop(ten, what_to_drop(ten, LAST_2, first_needed_step(ten)))
    assert has_rows(ten)[0] == 5
    assert (ten.step(1).attempts("rewards")[0] / DROPPED).is_file()


# -------------------------------------------------------------------------------------------------------- compressing


def test_a_compressed_artifact_takes_less_and_reads_and_checks_as_before(ten):
    rule = Retention(compress=True)
    artifact, table = ten.step(1).artifact("rewards"), ten.step(1).table("rewards").combine_chunks()
    items = what_to_compress(ten, rule, first_needed_step(ten))
    assert [item.step for item in items] == [1, 2, 3, 4]
    assert compress(ten, items) > artifact.bytes
    assert [path.name for path in artifact.folder.glob("part-*")] == ["part-00000.arrow.zst"]
    assert read_table(artifact) == table
    assert ten.find(1, "rewards", "k1") == artifact
    assert what_to_compress(ten, rule, first_needed_step(ten)) == []
    assert ten.step(5).attempts("rewards")[0].joinpath("part-00000.arrow").is_file()


def test_what_a_rule_keeps_is_compressed_and_the_rest_is_dropped(ten):
    rule = Retention("every", 2, compress=True)
    needed = first_needed_step(ten)
    assert [item.step for item in what_to_compress(ten, rule, needed)] == [2, 4]
    compress(ten, what_to_compress(ten, rule, needed))
    assert dropped(ten, Retention("last", 1)) == [1, 2, 3, 4]
    drop(ten, what_to_drop(ten, Retention("last", 1), needed))
    assert has_rows(ten)[0] == 5


def test_a_changed_byte_in_a_compressed_artifact_is_refused(ten):
    compress(ten, what_to_compress(ten, Retention(compress=True), first_needed_step(ten)))
    folder = ten.step(1).attempts("rewards")[0]
    part = folder / "part-00000.arrow.zst"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    with pytest.raises(StorageError, match="has changed since"):
        check_parts(folder, read_manifest(folder))


def test_a_damaged_artifact_is_not_compressed(ten):
    part = ten.step(1).attempts("rewards")[0] / "part-00000.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    compress(ten, what_to_compress(ten, Retention(compress=True), first_needed_step(ten)))
    assert sorted(path.name for path in part.parent.iterdir()) == ["manifest.json", "part-00000.arrow"]


def test_a_kill_while_compressing_leaves_the_artifact_readable_and_no_file_aside(ten, monkeypatch):
    items = what_to_compress(ten, Retention(compress=True), first_needed_step(ten))
    table = ten.step(1).table("rewards")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("storage.retention.sync_folder", die)  # both files are there
        with pytest.raises(KeyboardInterrupt):
            compress(ten, items)
    assert read_table(items[0].folder) == table
    compress(ten, what_to_compress(ten, Retention(compress=True), first_needed_step(ten)))
    assert sorted(path.name for path in items[0].folder.iterdir()) == ["manifest.json", "part-00000.arrow.zst"]
    assert read_table(items[0].folder) == table


def test_a_full_disk_while_compressing_leaves_the_artifact_as_it_was(ten, monkeypatch):
    items = what_to_compress(ten, Retention(compress=True), first_needed_step(ten))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("storage.retention.sync_file", full)
    with pytest.raises(StorageError, match="no space left"):
        compress(ten, items)
    assert sorted(path.name for path in items[0].folder.iterdir()) == ["manifest.json", "part-00000.arrow"]


# ---------------------------------------------------------------------------------------------------------- lineages


def test_a_future_that_was_gone_back_from_goes_when_asked_for_and_what_the_new_one_sees_stays(ten):
    ten.open_lineage(6, None, {}, {})
    steps_of(ten, [6, 7])
    checkpoint(ten, 7)
    assert first_needed_step(ten) == 5
    assert dropped(ten, Retention("last", 1)) == [1, 2, 3, 4]
    dead = what_is_dead(ten)
    assert [(item.step, item.stage, item.attempt) for item in dead] == [
        (6, "rewards", 1),
        (7, "rewards", 1),
        (8, "rewards", 1),
        (9, "rewards", 1),
        (10, "rewards", 1),
        (11, "rewards", 1),
        (8, "checkpoint", 1),
    ]
    drop(ten, dead)
    assert [(it.step, it.lineage) for it in checkpoints(ten.root)] == [(4, 1), (7, 2)]
    for step in (5, 6, 7):
        assert ten.step(step).table("rewards").num_rows == 200
    with pytest.raises(StorageError, match="a future that the run went back from"):
        open_run(ten.root, lineage=1).step(6).table("rewards")
    assert what_is_dead(ten) == []


def test_checkpoints_of_an_abandoned_future_do_not_free_steps_of_the_present(ten):
    ten.open_lineage(3, None, {}, {})
    steps_of(ten, range(3, 6))
    assert first_needed_step(ten) == 0
    assert dropped(ten, Retention("last", 1)) == []


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_goes_on_and_falls_back_on_an_older_checkpoint_after_retention(tiny_run, tmp_path):
    steps = ["trainer.total_epochs=9", "trainer.save_freq=2"]
    whole, _ = run(
        tiny_run(*steps, "trainer.total_training_steps=7", f"trainer.default_local_dir={tmp_path / 'whole'}")
    )
    cfg = tiny_run(*steps, "trainer.total_training_steps=6", "storage.retention.keep=last", "storage.retention.steps=1")
    the_run, _ = run(cfg)
    with RunWriter(the_run.root) as writer:
        Retainer(writer, cfg, print).after_checkpoint(6)
    assert has_rows(the_run) == [3, 4, 5, 6]
    assert "the last 1 steps" in collect(the_run, dry_run=True)
    weights = the_run.root / "checkpoints" / "000006" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (the_run.root / "checkpoints" / "000004" / "model.safetensors").unlink()
    the_run, output = run(tiny_run(*steps, "trainer.total_training_steps=7"))
    assert "checkpoint 2" in output and "updates 3 to 6" in output
    assert tokens(the_run, 7) == tokens(whole, 7)
    assert digest(the_run, 7) == digest(whole, 7)


def test_retention_in_the_loop_searches_each_step_once_and_never_ends_the_run(ten, monkeypatch):
    from tasks.config import RunConfig

    cfg = RunConfig(storage={"retention": {"keep": "last", "steps": 2}})
    said = []
    retainer = Retainer(ten, cfg, said.append)
    assert retainer.after_checkpoint(8) > 0
    begun = []
    from flows import gc

    known = gc.what_to_drop
    monkeypatch.setattr(gc, "what_to_drop", lambda *args, begin: begun.append(begin) or known(*args, begin=begin))
    assert retainer.after_checkpoint(8) == 0
    assert begun == [5]

    def fail(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(gc, "drop", fail)
    assert retainer.after_checkpoint(8) == 0
    assert "training goes on" in said[-1]


def test_parts_that_are_written_compressed_are_not_compressed_again():
    from tasks.config import RunConfig

    storage = {"compression": "zstd", "retention": {"keep": "every", "steps": 5, "compress": True}}
    assert retention_of(RunConfig(storage=storage)) == Retention("every", 5, False)


# ---------------------------------------------------------------------------------------------------------------- gc


def collect(the_run, *overrides, dry_run=False, lineages=False, as_json=False):
    output = io.StringIO()
    console = Console(file=output, width=160)
    gc_command(the_run.root, overrides, dry_run=dry_run, lineages=lineages, as_json=as_json, console=console)
    return output.getvalue()


LAST = ("storage.retention.keep=last", "storage.retention.steps=2")


def test_gc_says_beforehand_what_it_then_does(ten):
    told = collect(ten, *LAST, dry_run=True)
    assert "would be free" in told and "recovery needs step 5 and all after it" in told
    assert has_rows(ten)[0] == 1
    with pytest.raises(RunLocked):
        collect(ten, *LAST)
    ten.__exit__()
    done = collect(ten, *LAST)
    assert told.replace("would be", "are") == done
    assert has_rows(ten)[0] == 5
    assert "nothing is past its time" in collect(ten, *LAST)


def test_gc_without_a_rule_drops_nothing_and_names_the_rule(ten):
    ten.__exit__()
    assert "storage.retention keeps all steps" in collect(ten)
    assert has_rows(ten)[0] == 1


def test_gc_removes_abandoned_futures_on_request(ten):
    ten.open_lineage(6, None, {}, {})
    steps_of(ten, [6])
    ten.__exit__()
    assert "nothing is past its time" in collect(ten)
    told = json.loads(collect(ten, lineages=True, as_json=True))
    assert [(item["step"], item["stage"]) for item in told["items"]][-1] == (8, "checkpoint")
    assert told["bytes"] == sum(item["bytes"] for item in told["items"])
    assert [it.step for it in checkpoints(ten.root)] == [4]


def test_gc_compresses_what_the_rule_keeps(ten):
    ten.__exit__()
    told = json.loads(collect(ten, "storage.retention.compress=true", as_json=True))
    assert [(item["how"], item["step"]) for item in told["items"]] == [("compress", step) for step in (1, 2, 3, 4)]
    assert told["bytes"] > 0
    assert open_run(ten.root).step(1).table("rewards").num_rows == 200


def test_gc_of_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(StorageError, match="is no run"):
        collect(type("R", (), {"root": tmp_path})())


def test_gc_takes_no_overrides_but_its_own(ten):
    with pytest.raises(ValueError, match=r"not trainer\.seed=1"):
        collect(ten, "trainer.seed=1", dry_run=True)
