"""What breaks on a disk: damaged, cut and missing files, a full or read-only disk, locks; and runs ended anywhere.

Each gives a refusal that says what, where and the way out, or a fallback; nothing committed is lost.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import digest, run, tokens

from flows.cli import main
from flows.run_folder import GoBack
from flows.stages import plain_stages
from storage import Ragged, RunLocked, RunWriter, StorageError, build_table, open_run, read_table
from storage.checkpoints import checkpoints, intact_checkpoints, prune_checkpoints
from storage.durable import sha256_file
from tasks.stage import Step
from tasks.workers.policy import PolicyWorker

pytestmark = pytest.mark.slow

SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.total_epochs=9",
    "trainer.save_freq=2",
)
STAGES = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates")
INPUTS_OF_AN_UPDATE = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "advantages", "updates")


class Stopped(BaseException):
    """The process is gone."""


def stop():
    raise Stopped


@contextmanager
def at(index, stage, deed):
    """Within the block `deed` is called when this stage of this step is opened."""
    original = Step.open

    def opened(step, name, **options):
        if (step.index, name) == (index, stage):
            deed()
        return original(step, name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "open", opened)
        yield


@contextmanager
def around_record(index, before=lambda: None, after=lambda: None):
    """Within the block these are called before and after the record of this step is written."""
    original = RunWriter.finish_step

    def finish_step(the_run, step, record):
        if step == index:
            before()
        original(the_run, step, record)
        if step == index:
            after()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "finish_step", finish_step)
        yield


def stopped_at(cfg, index, stage):
    """A run whose process was gone when it opened this stage."""
    with at(index, stage, stop), pytest.raises(Stopped):
        run(cfg)
    return open_run(cfg.trainer.default_local_dir)


def files_of(folder, pattern="**/*"):
    """SHA-256 of every committed file below a folder."""
    changing = {"ledger.jsonl", "lock", "plan.json", "tracking.json"}
    paths = [path for path in Path(folder).glob(pattern) if path.is_file() and path.name not in changing]
    return {str(path.relative_to(folder)): sha256_file(path) for path in paths}


def command(capsys, *words):
    """Exit code and text of `grpoflow` with these words."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["grpoflow", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    printed = capsys.readouterr()
    return end.value.code, printed.out + printed.err


def nothing_half_done(folder):
    folder = Path(folder)
    assert not list(folder.rglob("*.aside"))
    assert all((attempt / "manifest.json").is_file() for attempt in folder.glob("steps/*/*/[0-9]*"))
    assert all((one / "manifest.json").is_file() for one in folder.glob("checkpoints/*"))


# ------------------------------------------------------------------------------------------------------ damaged files


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


FAULTS = {
    "a flipped byte": ("part-00000.arrow", flip),
    "a truncated part": ("part-00000.arrow", cut),
    "a manifest without its part": ("part-00000.arrow", Path.unlink),
    "an empty part": ("part-00000.arrow", empty),
    "a zero-byte manifest": ("manifest.json", empty),
    "a flipped byte in the manifest": ("manifest.json", flip),
    "a missing manifest": ("manifest.json", Path.unlink),
}


@pytest.fixture
def whole(tiny_run, tmp_path):
    """A run of four steps that nothing happened to, with checkpoints 2 and 4."""
    the_run, _ = run(tiny_run(*SMALL, "trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path / 'w'}"))
    return the_run


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_damaged_artifact_of_the_open_step_is_made_again_and_the_run_ends_as_if_it_had_not_been(
    tiny_run, tmp_path, whole, stage
):
    steps = (*SMALL, "trainer.total_training_steps=2")
    half = stopped_at(tiny_run(*steps), 2, "updates")
    for fault, (name, damage) in FAULTS.items():
        copy = tmp_path / fault.replace(" ", "-")
        shutil.copytree(half.root, copy)
        attempt = copy / "steps" / "000002" / stage / "0001"
        damage(attempt / name)
        kept = files_of(attempt)
        the_run, _ = run(tiny_run(*steps, f"trainer.default_local_dir={copy}"))
        assert digest(the_run, 2) == digest(whole, 2), fault
        told = [(event["step"], event["stage"]) for event in the_run.events() if event["event"] == "damaged"]
        assert told == ([] if fault == "a missing manifest" else [(2, stage)]), fault
        assert len(the_run.step(2).attempts(stage)) == (1 if fault == "a missing manifest" else 2), fault
        if told:
            assert files_of(attempt) == kept, fault
        nothing_half_done(copy)


@pytest.mark.parametrize("stage", INPUTS_OF_AN_UPDATE)
def test_a_damaged_batch_that_a_policy_needs_is_refused_with_its_path_and_the_way_out(
    tiny_run, tmp_path, whole, stage, capsys
):
    (*_, newest) = sorted((whole.root / "checkpoints").iterdir())
    shutil.rmtree(newest)
    for fault, (name, damage) in FAULTS.items():
        copy = tmp_path / fault.replace(" ", "-")
        shutil.copytree(whole.root, copy)
        attempt = copy / "steps" / "000003" / stage / "0001"
        damage(attempt / name)
        kept = files_of(copy)
        more = ["trainer.total_training_steps=5", f"trainer.default_local_dir={copy}"]
        code, text = command(capsys, "train", tmp_path / "base.yaml", *SMALL, *more)
        assert code == 2, (fault, text)
        assert "000003" in text or "step 3" in text, (fault, text)
        assert stage in text, (fault, text)
        assert "--from-step 3" in text, (fault, text)
        assert (
            files_of(copy).items() >= {path: sha for path, sha in kept.items() if fault != "a missing manifest"}.items()
        )
        if fault == "a flipped byte":
            the_run, output = run(tiny_run(*SMALL, *more), back=GoBack(3))
            assert digest(the_run, 4) == digest(whole, 4)
            assert "lineage 2 begins at step 3" in output


def test_damage_before_an_intact_checkpoint_or_where_no_policy_needs_it_is_no_obstacle(tiny_run, tmp_path, whole):
    flip(whole.root / "steps" / "000001" / "rollouts" / "0001" / "part-00000.arrow")
    flip(whole.root / "steps" / "000004" / "rewards" / "0001" / "part-00000.arrow")
    five = ["trainer.total_training_steps=5", f"trainer.default_local_dir={tmp_path / 'w'}"]
    the_run, output = run(tiny_run(*SMALL, *five))
    assert "found 4 finished steps: checkpoint 4" in output
    assert the_run.finished_steps() == [1, 2, 3, 4, 5]


CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink])
def test_b20_a_checkpoint_with_a_damaged_file_is_skipped_said_and_never_counts(whole, name, damage):
    damage(whole.root / "checkpoints" / "000004" / name)
    said = []
    assert [one.step for one in intact_checkpoints(whole.root, said.append)] == [2]
    assert len(said) == 1
    assert "checkpoint 000004 is skipped" in said[0]
    assert str(whole.root / "checkpoints" / "000004") in said[0]
    assert prune_checkpoints(whole.root, keep=1) == []
    assert (whole.root / "checkpoints" / "000002" / "manifest.json").is_file()


def test_b20_resume_takes_the_newest_checkpoint_that_holds_and_makes_the_updates_after_it_again(
    tiny_run, tmp_path, whole
):
    five = [*SMALL, "trainer.total_training_steps=5"]
    expected, _ = run(tiny_run(*five, f"trainer.default_local_dir={tmp_path / 'e'}"))
    flip(whole.root / "checkpoints" / "000004" / "optimizer.safetensors")
    by_hand = whole.root / "checkpoints" / "000009"
    by_hand.mkdir()
    (by_hand / "model.safetensors").write_bytes(b"weights without the rest")
    the_run, output = run(tiny_run(*five, f"trainer.default_local_dir={whole.root}"))
    assert "checkpoint 000004 is skipped" in output
    assert "checkpoint 000009 is skipped" in output
    assert "checkpoint 2, updates 3 to 4 made again" in output
    assert digest(the_run, 5) == digest(expected, 5)
    assert by_hand.is_dir(), "who put it there may want it"


def test_a_zero_byte_manifest_in_a_run_that_went_back_is_no_dead_end(tiny_run, tmp_path, whole):
    cfg = tiny_run(*SMALL, "trainer.total_training_steps=4", f"trainer.default_local_dir={whole.root}")
    with at(4, "advantages", stop), pytest.raises(Stopped):
        run(cfg, back=GoBack(3))
    attempt = open_run(whole.root).step(4).attempts("rollouts")[-1]
    expected = digest(whole, 4)
    empty(attempt / "manifest.json")
    the_run, _ = run(cfg)
    assert digest(the_run, 4) == expected


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "inputs.json"])
@pytest.mark.parametrize("damage", [empty, cut])
def test_a_damaged_document_is_named_and_nothing_else_is_touched(tiny_run, tmp_path, name, damage, capsys):
    the_run, _ = run(tiny_run(*SMALL, "trainer.total_training_steps=2"))
    damage(the_run.root / name)
    kept = files_of(the_run.root)
    code, text = command(capsys, "train", tmp_path / "base.yaml", *SMALL, "trainer.total_training_steps=3")
    assert code == 2
    assert str(the_run.root / name) in text.replace("\n", "")
    assert "damaged" in text or "cannot be read" in text
    assert files_of(the_run.root) == kept


def test_a_damaged_record_of_a_step_is_named_with_the_way_out_which_makes_nothing_again(tiny_run, tmp_path, capsys):
    two = [*SMALL, "trainer.total_training_steps=2"]
    the_run, _ = run(tiny_run(*two))
    record = the_run.root / "steps" / "000002" / "step.json"
    before = the_run.step(2).record["artifacts"]
    empty(record)
    code, text = command(capsys, "show", the_run.root, "--step", 2)
    assert code == 2
    assert f"{record} is damaged" in text.replace("\n", "")
    assert "Remove it: the step is then finished again from its stages" in text.replace("\n", " ")
    record.unlink()
    the_run, _ = run(tiny_run(*two))
    assert the_run.step(2).record["artifacts"] == before
    assert [len(the_run.step(2).attempts(stage)) for stage in STAGES] == [1] * 7


# ------------------------------------------------------------------------------------------------ full and locked disks


class Disk:
    """A small disk of its own."""

    def __init__(self, path, size):
        path.mkdir()
        self.path, self.ballast = path, path / "ballast"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
        if made.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")

    def fill(self, leave=0):
        """Leave so many bytes free."""
        with self.ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
            file.truncate(max(file.tell() - leave, 0))

    def empty(self):
        self.ballast.unlink()

    def remount(self, how):
        subprocess.run(["mount", "-o", f"remount,{how}", self.path], check=True)


@pytest.fixture
def disk(tmp_path):
    made = []

    def make(size):
        made.append(Disk(tmp_path / f"disk{len(made)}", size))
        return made[-1]

    yield make
    for one in made:
        subprocess.run(["umount", "--lazy", one.path], check=False, capture_output=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_is_full_in_a_stage_ends_the_run_and_costs_that_stage_alone(
    tiny_run, tmp_path, whole, disk, stage, capsys
):
    small = disk("8m")
    tiny_run()
    words = [*SMALL, "trainer.total_training_steps=2", f"trainer.default_local_dir={small.path / 'run'}"]
    calls = []
    with at(2, stage, lambda: (calls.append(1), small.fill())):
        code, text = command(capsys, "train", tmp_path / "base.yaml", *words)
    assert code == 2
    assert calls == [1], "a full disk is not tried again"
    # While rewards are scored the log-probs beside them meet the full disk too.
    hit = "(rewards|old_log_probs|ref_log_probs)" if stage == "rewards" else stage
    assert re.search(rf"error: no space left in .*{hit}.*bytes are free", text.replace("\n", " ")), text
    assert "run the same command again" in text
    nothing_half_done(small.path / "run")
    kept = files_of(small.path / "run", "steps/**/*")
    assert not any(f"000002/{stage}" in path for path in kept)
    small.empty()
    the_run, _ = run(tiny_run(*words))
    assert files_of(small.path / "run", "steps/**/*").items() >= kept.items()
    assert digest(the_run, 2) == digest(whole, 2)
    assert the_run.state == "finished"


def test_a_disk_too_full_for_a_line_in_the_ledger_still_tells_why_the_run_ended(tiny_run, tmp_path, disk, capsys):
    small = disk("8m")
    tiny_run()
    words = [*SMALL, "trainer.total_training_steps=2", f"trainer.default_local_dir={small.path / 'run'}"]

    def fill_to_the_last_byte():
        ledger = small.path / "run" / "ledger.jsonl"
        with ledger.open("a") as file:
            file.write(" " * (4095 - ledger.stat().st_size % 4096) + "\n")
        small.fill()

    with at(2, "old_log_probs", fill_to_the_last_byte):
        code, text = command(capsys, "train", tmp_path / "base.yaml", *words)
    assert code == 2
    # While log-probs are computed the rewards beside them meet the full disk too.
    assert re.search(
        r"error: no space left in .* for artifact (old_log_probs|ref_log_probs|rewards) of step 2", text
    ), text
    small.empty()
    the_run, _ = run(tiny_run(*words))
    assert the_run.finished_steps() == [1, 2]


@pytest.mark.parametrize("when", ["before", "within"])
def test_b18_a_checkpoint_that_does_not_fit_leaves_the_one_before_it(tiny_run, tmp_path, whole, disk, when, capsys):
    small = disk("8m")
    tiny_run()
    folder = small.path / "run"
    keep_1 = [*SMALL, "trainer.max_actor_ckpt_to_keep=1", f"trainer.default_local_dir={folder}"]
    words = [*keep_1, "trainer.total_training_steps=4"]
    original = PolicyWorker.save

    def save(worker, aside):
        if worker.policy_version == 4:
            small.fill()
        original(worker, aside)

    with (
        pytest.MonkeyPatch.context() as patch,
        around_record(4, after=small.fill if when == "before" else lambda: None),
    ):
        if when == "within":
            patch.setattr(PolicyWorker, "save", save)
        code, text = command(capsys, "train", tmp_path / "base.yaml", *words)
    assert code == 2, text
    flat = text.replace("\n", " ")
    assert re.search(r"no space left in \S+checkpoints for checkpoint 000004: [\d,]+ bytes are needed", flat), text
    assert "bytes are free" in flat
    assert [one.step for one in intact_checkpoints(folder, pytest.fail)] == [2]
    nothing_half_done(folder)
    small.empty()
    the_run, output = run(tiny_run(*words))
    assert "checkpoint 2, updates 3 to 4 made again" in output
    assert digest(the_run, 4) == digest(whole, 4)
    assert [one.step for one in checkpoints(folder)] == [4]


def big_table(megabytes):
    """A table of ref_log_probs of about so many MB."""
    rows = Ragged.from_lengths(np.zeros(megabytes * 250_000, np.float32), np.full(50, megabytes * 5000))
    names = [f"000001-0000-{i:03d}" for i in range(50)]
    return build_table("ref_log_probs", {"sample_id": names, "group_id": ["g"] * 50, "ref_log_probs": rows})


def test_b26_an_artifact_that_does_not_fit_leaves_no_file_however_often_it_is_tried(disk):
    small = disk("50m")
    with RunWriter.create(small.path / "run", "run") as writer:
        writer.commit(1, "ref_log_probs", big_table(40), key="a", policy_version=0, started_at=datetime.now(UTC))
        before = files_of(small.path)
        free = shutil.disk_usage(small.path).free
        calls = []

        def stage():
            calls.append(1)
            return writer.commit(
                2, "ref_log_probs", big_table(40), key="b", policy_version=0, started_at=datetime.now(UTC)
            )

        with plain_stages() as stages:
            for _ in range(5):
                with pytest.raises(StorageError, match=r"no space left in .*bytes are free"):
                    stages.run(stage)
        assert len(calls) == 5, "each of them was tried once"
        assert files_of(small.path) == before
        assert shutil.disk_usage(small.path).free >= free - 8192
        assert read_table(writer.step(1).artifact("ref_log_probs")).num_rows == 50


def test_b26_room_for_a_step_is_looked_for_before_a_token_is_generated(tiny_run, tmp_path, disk, capsys):
    small = disk("8m")
    tiny_run()
    words = [*SMALL, "trainer.total_training_steps=3", f"trainer.default_local_dir={small.path / 'run'}"]
    with (
        around_record(1, after=lambda: small.fill(leave=24 * 1024)),
        at(2, "rollouts", lambda: pytest.fail("it generates")),
    ):
        code, text = command(capsys, "train", tmp_path / "base.yaml", *words)
    assert code == 2
    assert re.search(r"no space left in .* for step 2: [\d,]+ bytes are needed and [\d,]+ bytes are free", text), text
    small.empty()
    the_run, _ = run(tiny_run(*words))
    assert the_run.finished_steps() == [1, 2, 3]


def test_a_disk_that_is_full_when_a_step_is_finished_says_so_and_makes_no_stage_again(
    tiny_run, tmp_path, whole, disk, capsys
):
    small = disk("8m")
    tiny_run()
    words = [*SMALL, "trainer.total_training_steps=2", f"trainer.default_local_dir={small.path / 'run'}"]
    with around_record(2, before=small.fill):
        code, text = command(capsys, "train", tmp_path / "base.yaml", *words)
    assert code == 2
    assert re.search(r"no space left in .* for the record of step 2: .*bytes are free", text.replace("\n", " ")), text
    nothing_half_done(small.path / "run")
    small.empty()
    the_run, _ = run(tiny_run(*words))
    assert digest(the_run, 2) == digest(whole, 2)
    assert [len(the_run.step(2).attempts(stage)) for stage in STAGES] == [1] * 7


def test_a_read_only_disk_is_refused_and_can_be_read(tiny_run, tmp_path, disk, capsys):
    small = disk("8m")
    words = [*SMALL, "trainer.total_training_steps=2", f"trainer.default_local_dir={small.path / 'run'}"]
    run(tiny_run(*words))
    kept = files_of(small.path)
    small.remount("ro")
    more = [*words, "trainer.total_training_steps=3"]
    code, text = command(capsys, "train", tmp_path / "base.yaml", *more)
    assert code == 2
    assert str(small.path) in text.replace("\n", "")
    assert "ead-only" in text
    code, text = command(capsys, "train", tmp_path / "base.yaml", f"trainer.default_local_dir={small.path / 'new'}")
    assert code == 2
    assert "ead-only" in text
    assert open_run(small.path / "run").state == "finished"
    assert open_run(small.path / "run").step(2).table("rollouts").num_rows == 16
    assert files_of(small.path) == kept
    small.remount("rw")
    the_run, _ = run(tiny_run(*more))
    assert the_run.finished_steps() == [1, 2, 3]


HOLDER = (
    "import sys; from pathlib import Path; from storage import RunWriter\n"
    "run = RunWriter(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_the_lock_of_a_live_process_is_refused_with_its_owner_and_the_lock_of_a_dead_one_is_not(
    tiny_run, tmp_path, capsys
):
    words = [*SMALL, "trainer.total_training_steps=2"]
    the_run, _ = run(tiny_run(*words))
    kept = files_of(the_run.root)
    arguments = [sys.executable, "-c", HOLDER, the_run.root]
    holder = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    code, text = command(capsys, "train", tmp_path / "base.yaml", *SMALL, "trainer.total_training_steps=3")
    assert code == 2
    assert f"is being written by process {holder.pid} on" in text.replace("\n", " ")
    assert "trainer.experiment_name" in text
    assert files_of(the_run.root) == kept
    with pytest.raises(RunLocked):
        RunWriter(the_run.root)
    holder.kill()
    holder.communicate()
    assert json.loads((the_run.root / "lock").read_text())["pid"] == holder.pid
    the_run, _ = run(tiny_run(*SMALL, "trainer.total_training_steps=3"))
    assert the_run.finished_steps() == [1, 2, 3]


# -------------------------------------------------------------------------------------------------- ended, and gone on


def optimizer_file(the_run, step):
    return sha256_file(the_run.root / "checkpoints" / f"{step:06d}" / "optimizer.safetensors")


def learning_rates(the_run):
    return [the_run.step(step).table("updates")["lr"].to_pylist() for step in the_run.finished_steps()]


def prompts(the_run):
    return [the_run.step(step).table("prompts")["prompt_index"].to_pylist() for step in the_run.finished_steps()]


def test_b09_a_run_that_ended_at_an_epoch_s_end_goes_on_with_the_next_epoch(tiny_run):
    cfg = tiny_run(*SMALL, "trainer.total_epochs=2", "trainer.total_training_steps=null", "trainer.save_freq=4")
    the_run = stopped_at(cfg, 5, "prompts")
    assert the_run.finished_steps() == [1, 2, 3, 4]
    assert [one.step for one in checkpoints(the_run.root)] == [4]
    the_run, output = run(cfg)
    assert "found 4 finished steps: checkpoint 4" in output
    assert the_run.finished_steps() == list(range(1, 9))
    taken = prompts(the_run)
    assert sorted(chain(*taken[:4])) == sorted(chain(*taken[4:])) == list(range(16))
    assert next(line for line in output.splitlines() if line.startswith("step ")).startswith("step 5/8")


@pytest.mark.parametrize("save_freq", [-1, 2])
def test_b12_a_run_resumed_after_every_step_of_epochs_with_a_tail_is_the_run_that_was_not(
    tiny_run, tmp_path, save_freq
):
    steps = [*SMALL, "trainer.total_epochs=3", "trainer.total_training_steps=null", f"trainer.save_freq={save_freq}"]
    steps += [
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    ]
    expected, _ = run(tiny_run(*steps, f"trainer.default_local_dir={tmp_path / 'w'}", rows=10))
    cfg = tiny_run(*steps, rows=10)
    for index in range(2, 7):
        assert stopped_at(cfg, index, "prompts").finished_steps() == list(range(1, index))
    the_run, _ = run(cfg)
    assert prompts(the_run) == prompts(expected)
    assert [len(set(chain(*prompts(the_run)[i : i + 2]))) for i in (0, 2, 4)] == [8, 8, 8]
    assert learning_rates(the_run) == learning_rates(expected)
    assert [digest(the_run, step) for step in range(1, 7)] == [digest(expected, step) for step in range(1, 7)]
    assert optimizer_file(the_run, 6) == optimizer_file(expected, 6)
    assert [len(the_run.step(step).attempts(stage)) for step in range(1, 7) for stage in STAGES] == [1] * 42


def test_b13_the_learning_rates_of_a_resumed_run_are_those_of_one_that_did_not_stop(tiny_run, tmp_path, capsys):
    warm_up = [*SMALL, "trainer.total_training_steps=10", "actor_rollout_ref.actor.optim.lr_warmup_steps=5"]
    decay = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    expected, _ = run(tiny_run(*warm_up, decay, f"trainer.default_local_dir={tmp_path / 'w'}"))
    cfg = tiny_run(*warm_up, decay)
    stopped_at(cfg, 7, "rollouts")
    the_run, _ = run(cfg)
    assert learning_rates(the_run) == learning_rates(expected)
    assert len({rates[0] for rates in learning_rates(the_run)}) >= 9
    other = "actor_rollout_ref.actor.optim.lr_warmup_steps=1"
    code, text = command(capsys, "train", tmp_path / "base.yaml", *warm_up, decay, other)
    assert code == 2
    assert "lr_warmup_steps: the run has 5, asked for is 1" in text.replace("\n", " ")
    assert "--from-step" in text


def test_b15_another_experiment_in_a_used_folder_is_refused_and_a_harmless_change_is_written_down(
    tiny_run, tmp_path, capsys
):
    words = [*SMALL, "trainer.total_training_steps=2"]
    the_run, _ = run(tiny_run(*words))
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    kept, ledger = files_of(the_run.root), (the_run.root / "ledger.jsonl").read_bytes()
    refused = {
        f"actor_rollout_ref.model.path={tmp_path / 'other'}": "actor_rollout_ref.model.path: the run has",
        "actor_rollout_ref.rollout.n=8": "actor_rollout_ref.rollout.n: the run has 4, asked for is 8",
        "actor_rollout_ref.actor.optim.lr=0.5": "actor_rollout_ref.actor.optim.lr: the run has 0.001, asked for is 0.5",
    }
    for change, reason in refused.items():
        code, text = command(capsys, "train", tmp_path / "base.yaml", *words, "trainer.total_training_steps=3", change)
        assert code == 2, change
        assert reason in text.replace("\n", " "), change
        assert "Nothing was written" in text
        assert "trainer.resume_mode=disable" in text.replace("\n", " ")
    assert files_of(the_run.root) == kept
    assert (the_run.root / "ledger.jsonl").read_bytes() == ledger
    after, _ = run(tiny_run(*SMALL, "trainer.total_training_steps=3", "trainer.save_freq=1"))
    [changed] = [event["changes"] for event in after.events() if event["event"] == "config_changed"]
    assert changed == {"trainer.save_freq": [2, 1], "trainer.total_training_steps": [2, 3]}
    fresh, _ = run(tiny_run(*words, "trainer.resume_mode=disable"))
    assert fresh.run_id != the_run.run_id


def test_b24_a_step_that_had_generated_is_gone_on_with_and_later_samples_are_those_of_an_unbroken_run(
    tiny_run, tmp_path
):
    eight = [*SMALL, "trainer.total_training_steps=8", "trainer.save_freq=3"]
    expected, _ = run(tiny_run(*eight, f"trainer.default_local_dir={tmp_path / 'w'}"))
    cfg = tiny_run(*eight)
    the_run = stopped_at(cfg, 5, "updates")
    generated = files_of(the_run.step(5).folder / "rollouts")
    the_run, _ = run(cfg)
    assert files_of(the_run.step(5).folder / "rollouts") == generated
    for step in range(5, 9):
        assert prompts(the_run)[step - 1] == prompts(expected)[step - 1]
        ids = [one.step(step).table("prompts")["group_id"].to_pylist() for one in (the_run, expected)]
        assert ids[0] == ids[1]
        assert tokens(the_run, step) == tokens(expected, step)
    assert digest(the_run, 8) == digest(expected, 8)


# -------------------------------------------------------------------------------------------------------------- memory

READ_AND_WRITE = """
import os, shutil, sys
from datetime import UTC, datetime
from pathlib import Path
import numpy as np
from storage import Ragged, RunWriter, build_table, read_table

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

run = RunWriter.create(Path(sys.argv[1]), "run")
names = [f"s{i}" for i in range(64)]
for step in range(1, 301):
    values = np.full(64 * 8_000, step, np.float32)
    rows = Ragged.from_lengths(values, np.full(64, 8_000))
    table = build_table("ref_log_probs", {"sample_id": names, "group_id": names, "ref_log_probs": rows})
    artifact = run.commit(step, "ref_log_probs", table, key="k", policy_version=0, started_at=datetime.now(UTC))
    del table, rows, values
    back = Ragged.from_arrow(read_table(artifact)["ref_log_probs"])
    assert back.values[0] == back.values[-1] == step
    del back
    if step > 3:
        shutil.rmtree(run.step(step - 3).folder)
    print(resident())
"""


def test_b99_resident_memory_stays_flat_over_300_steps_of_reading_and_writing(tmp_path):
    script = [sys.executable, "-c", READ_AND_WRITE, str(tmp_path / "run")]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    resident = np.array([int(line) for line in done.stdout.split()])
    assert len(resident) == 300
    assert resident[250:].mean() < 1.1 * resident[50:100].mean()
    assert resident[50:].max() < 1.1 * np.median(resident[50:])


def test_b99_every_step_says_what_memory_the_process_and_arrow_hold(tiny_run):
    the_run, _ = run(tiny_run(*SMALL, "trainer.total_training_steps=2"))
    for step in (1, 2):
        metrics = the_run.step(step).record["metrics"]
        assert metrics["memory/resident_bytes"] > metrics["memory/arrow_bytes"] >= 0
