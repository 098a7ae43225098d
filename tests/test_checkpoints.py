"""Checkpoints: only what is whole counts, the old one goes after the new one is safe, and a kill leaves no half."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from storage.artifacts import MANIFEST
from storage.checkpoints import (
    check_checkpoint,
    checkpoints,
    drop_leftovers,
    intact_checkpoints,
    prune_checkpoints,
    remove_checkpoint,
    save_checkpoint,
)
from storage.durable import StorageError
from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.workers.optim import optimizer_tensors, restore_optimizer
from tasks.workers.policy import PolicyWorker, Signals
from tasks.workers.sequences import MicroBatching, Sequences


def save(root, step, *, content=b"weights", lineage=1, expected_bytes=0, **about):
    def write(folder):
        (folder / "model.safetensors").write_bytes(content)
        (folder / "state.json").write_text("{}")

    return save_checkpoint(root, step, write, expected_bytes=expected_bytes, about=about, lineage=lineage)


def steps(root, **how):
    return [(checkpoint.step, checkpoint.lineage) for checkpoint in checkpoints(root, **how)]


def names(root):
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_checkpoint_holds_its_files_and_what_the_writer_said_of_them(tmp_path):
    made = save(tmp_path, 4, kl_coef=0.25, generate_calls=7)
    [found] = checkpoints(tmp_path)
    assert found == made and found.folder.name == "000004"
    assert found.manifest["kl_coef"] == 0.25 and found.manifest["generate_calls"] == 7
    assert found.manifest["step"] == 4 and found.manifest["lineage"] == 1
    assert {name: file["bytes"] for name, file in found.manifest["files"].items()} == {
        "model.safetensors": 7,
        "state.json": 2,
    }
    check_checkpoint(found)


def test_what_the_writer_says_cannot_replace_what_the_checkpoint_is(tmp_path):
    made = save(tmp_path, 4, files={}, lineage=2)
    assert sorted(made.manifest["files"]) == ["model.safetensors", "state.json"]
    assert save_checkpoint(tmp_path, 5, fill, expected_bytes=0, about={"step": 9}).manifest["step"] == 5


def fill(folder):
    (folder / "model.safetensors").write_bytes(b"weights")


def test_the_same_step_of_another_lineage_has_a_folder_of_its_own(tmp_path):
    save(tmp_path, 4, content=b"first")
    save(tmp_path, 4, content=b"second", lineage=2)
    save(tmp_path, 2)
    assert names(tmp_path) == ["000002", "000004", "000004-0002"]
    assert steps(tmp_path) == [(2, 1), (4, 1), (4, 2)]
    assert [one.step for one in intact_checkpoints(tmp_path, print, lambda one: one.lineage == 1)] == [4, 2]
    first, second = (one.folder / "model.safetensors" for one in checkpoints(tmp_path)[1:])
    assert (first.read_bytes(), second.read_bytes()) == (b"first", b"second")


def test_a_damaged_checkpoint_is_replaced_by_a_new_one_of_its_step(tmp_path):
    flip_byte(save(tmp_path, 4).folder / "model.safetensors")
    assert list(intact_checkpoints(tmp_path, lambda _: None)) == []
    again = save(tmp_path, 4)
    assert list(intact_checkpoints(tmp_path, lambda _: None)) == [again]
    assert names(tmp_path) == ["000004"]


def test_a_failed_save_leaves_the_damaged_folder_it_would_have_replaced_and_nothing_else(tmp_path):
    flip_byte(save(tmp_path, 4).folder / "model.safetensors")

    def fail(folder):
        fill(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        save_checkpoint(tmp_path, 4, fail, expected_bytes=0, about={})
    assert names(tmp_path) == ["000004"]


@pytest.mark.parametrize(
    "content, said", [(None, "names no file"), (b"", r"\.000003.*model.safetensors is empty")], ids=["no file", "empty"]
)
def test_a_checkpoint_without_content_is_not_committed(tmp_path, content, said):
    def write(folder):
        if content is not None:
            (folder / "model.safetensors").write_bytes(content)

    with pytest.raises(StorageError, match=said):
        save_checkpoint(tmp_path, 3, write, expected_bytes=0, about={})
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------ full disk


@pytest.fixture
def small_disk(tmp_path):
    """A run's folder on a disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a size-limited tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_while_a_checkpoint_is_written_leaves_the_old_one_and_no_half(small_disk):
    """B18: keep=1, save_freq=2, and the save of step 4 fails."""
    old = save(small_disk, 2, content=b"2" * 400_000)
    prune_checkpoints(small_disk, 1)
    with pytest.raises(StorageError) as failed:
        save(small_disk, 4, content=b"4" * 900_000, expected_bytes=500_000)
    said = str(failed.value)
    free = shutil.disk_usage(small_disk).free
    assert str(small_disk / "checkpoints") in said and "500,000 bytes are needed" in said
    assert f"{free:,} bytes are free" in said and "checkpoint 000004" in said
    assert names(small_disk) == ["000002"]
    assert list(intact_checkpoints(small_disk, pytest.fail)) == [old]


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(small_disk):
    def never(folder):
        pytest.fail("written though there is no room")

    with pytest.raises(StorageError, match=r"2,000,000 bytes are needed and [\d,]+ bytes are free"):
        save_checkpoint(small_disk, 1, never, expected_bytes=2_000_000, about={})
    assert names(small_disk) == []


def test_a_full_disk_under_safetensors_is_a_full_disk(small_disk, tiny_model):
    worker = PolicyWorker(config(tiny_model(vocab_size=8000)), total_steps=2, with_reference=False)
    with pytest.raises(StorageError, match="no space left in"):
        save_checkpoint(small_disk, 1, worker.save, expected_bytes=0, about={})
    assert names(small_disk) == []


# -------------------------------------------------------------------------------------------------- what does not count


def test_folders_that_are_not_whole_are_skipped_with_the_reason_and_never_counted(tmp_path):
    """B20: the newest folders are not what a checkpoint is."""
    save(tmp_path, 1)
    good = save(tmp_path, 2)
    weights_alone = tmp_path / "checkpoints" / "000009"
    weights_alone.mkdir()
    (weights_alone / "model.safetensors").write_bytes(b"weights")
    (save(tmp_path, 3).folder / "model.safetensors").write_bytes(b"")
    flip_byte(save(tmp_path, 4).folder / "model.safetensors")
    (save(tmp_path, 5).folder / "state.json").unlink()
    (save(tmp_path, 6).folder / MANIFEST).write_text("{torn")
    (save(tmp_path, 7).folder / MANIFEST).write_text("[]")
    save(tmp_path, 8).folder.rename(tmp_path / "checkpoints" / "step_9")
    said = []
    assert next(intact_checkpoints(tmp_path, said.append)) == good
    reasons = {line.split(" is skipped: ")[0]: line for line in said}
    wanted = {
        "checkpoint 000003": "has 0 bytes but was committed with 7",
        "checkpoint 000004": "its SHA-256 is not the manifest's",
        "checkpoint 000005": "state.json is missing",
        "checkpoint 000006": "manifest.json is damaged",
        "checkpoint 000007": "manifest.json is damaged",
        "checkpoint 000009": "has no manifest.json, so it was never committed",
        "checkpoint step_9": "is of step 8 and lineage 1, which its folder's name does not say",
    }
    assert reasons.keys() == wanted.keys()
    assert all(reason in reasons[name] for name, reason in wanted.items())

    said.clear()
    assert prune_checkpoints(tmp_path, 2, said.append) == [] and len(said) == 7
    assert prune_checkpoints(tmp_path, 1) == [1]
    assert "000002" in names(tmp_path) and "000009" in names(tmp_path)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"format_version": 10**6}, "newer than this version's"),
        ({"files": {}}, "names no file"),
        ({"files": {"model.safetensors": {"bytes": 0, "sha256": "0" * 64}}}, "is empty"),
        ({"files": {"model.safetensors": {"bytes": 7}}}, "model.safetensors.sha256: Field required"),
        ({"files": ["model.safetensors"]}, "should be a valid dictionary"),
        ({"step": "four"}, "ValueError"),
        ({"lineage": 2}, "is of step 4 and lineage 2"),
    ],
    ids=["newer", "no files", "empty file", "no digest", "list", "no step", "lineage"],
)
def test_a_manifest_that_cannot_be_used_is_said(tmp_path, change, said):
    path = save(tmp_path, 4).folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    lines = []
    assert checkpoints(tmp_path, lines.append) == []
    assert len(lines) == 1 and said in lines[0]


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoints(tmp_path, pytest.fail) == [] and prune_checkpoints(tmp_path, 1) == []
    assert drop_leftovers(tmp_path) == []


# -------------------------------------------------------------------------------------------------------------- keeping


def test_the_newest_stay_and_the_steps_of_the_others_are_returned(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    assert prune_checkpoints(tmp_path, None) == [] and len(checkpoints(tmp_path)) == 5
    assert prune_checkpoints(tmp_path, 2) == [1, 2, 3]
    assert steps(tmp_path) == [(4, 1), (5, 1)]


def test_an_old_checkpoint_goes_only_when_enough_newer_ones_are_intact(tmp_path):
    save(tmp_path, 2)
    flip_byte(save(tmp_path, 4).folder / "model.safetensors")
    assert prune_checkpoints(tmp_path, 1) == []
    save(tmp_path, 6)
    assert prune_checkpoints(tmp_path, 1) == [2, 4]
    assert names(tmp_path) == ["000006"]


def test_a_checkpoint_that_is_damaged_while_the_run_goes_on_does_not_count_any_more(tmp_path):
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    check_checkpoint(newest)
    flip_byte(newest.folder / "model.safetensors")
    assert prune_checkpoints(tmp_path, 1) == []


def test_checkpoints_that_the_lineage_does_not_see_are_neither_counted_nor_removed(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 4)
    save(tmp_path, 6)
    save(tmp_path, 4, lineage=2)

    def seen(checkpoint):
        return checkpoint.lineage == (1 if checkpoint.step < 4 else 2)

    assert prune_checkpoints(tmp_path, 2, seen=seen) == []
    assert prune_checkpoints(tmp_path, 1, seen=seen) == [2]
    assert steps(tmp_path) == [(4, 1), (4, 2), (6, 1)]


def test_a_removal_that_is_killed_leaves_no_folder_that_looks_like_a_checkpoint(tmp_path, monkeypatch):
    made = save(tmp_path, 2)

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(made)
    assert names(tmp_path) == [".000002.removed.aside"]
    assert checkpoints(tmp_path, pytest.fail) == []
    assert drop_leftovers(tmp_path) == [".000002.removed.aside"] and names(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import storage.checkpoints as module

def write(folder):
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    if where == "write":
        os.kill(os.getpid(), signal.SIGKILL)

root, where = Path(sys.argv[1]), sys.argv[2]
if where != "write":
    original = getattr(module, where)
    def wrapped(*args, **kwargs):
        if sys.argv[3] == "after":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(module, where, wrapped)
module.save_checkpoint(root, 4, write, expected_bytes=0, about={})
module.prune_checkpoints(root, 1)
"""


@pytest.mark.parametrize(
    "where, moment, left",
    [
        ("write", "", [2]),
        ("write_json", "before", [2]),
        ("write_json", "after", [2]),
        ("_put_in_place", "before", [2]),
        ("_put_in_place", "after", [2, 4]),
        ("prune_checkpoints", "before", [2, 4]),
        ("remove_checkpoint", "before", [2, 4]),
        ("prune_checkpoints", "after", [4]),
    ],
)
def test_a_kill_at_any_moment_leaves_an_intact_checkpoint_and_only_whole_ones(tmp_path, where, moment, left):
    save(tmp_path, 2)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), where, moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [one.step for one in intact_checkpoints(tmp_path, pytest.fail)] == left[::-1]
    assert all(name.endswith(".aside") for name in names(tmp_path) if name.startswith("."))
    save(tmp_path, 6)
    assert names(tmp_path) == [f"{step:06d}" for step in [*left, 6]]


# ---------------------------------------------------------------------------------------------------------- the policy


def config(folder, **model):
    model = {"path": str(folder), "dtype": "float32", "enable_gradient_checkpointing": False, **model}
    optim = {"lr": 1e-2, "weight_decay": 0.1, "lr_warmup_steps": 2}
    return RunConfig.model_validate(
        {"actor_rollout_ref": {"model": model, "actor": {"optim": optim}}, "trainer": {"device": "cpu"}}
    )


def trained(cfg, *, updates):
    worker = PolicyWorker(cfg, total_steps=4, with_reference=False)
    for step in updates:
        update(worker, step)
    return worker


def update(worker, step):
    random = np.random.default_rng(step)
    responses = Ragged.from_rows([random.integers(2, 60, n) for n in (3, 5, 2, 4)], np.int32)
    seqs = Sequences(Ragged.from_rows([[3, 4], [5]], np.int32), np.array([0, 0, 1, 1]), responses)
    old = worker.log_probs(seqs, MicroBatching(4, None), temperature=1.0).log_probs
    advantages = Ragged(random.standard_normal(14).astype(np.float32), responses.offsets)
    signals = Signals(advantages, Ragged(np.ones(14, bool), responses.offsets), old, None, None, seqs.group)
    worker.update(seqs, signals, [[np.arange(4)]], MicroBatching(4, None), step=step)
    worker.policy_version = step


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_restored_policy_goes_on_bit_for_bit_with_its_schedule_and_moments(tiny_model, tmp_path, lora_rank):
    cfg = config(tiny_model(), lora_rank=lora_rank)
    worker = trained(cfg, updates=(1, 2))
    made = save_checkpoint(tmp_path, 2, worker.save, expected_bytes=worker.checkpoint_bytes(), about={})
    restored = trained(cfg, updates=())
    restored.load(made.folder)
    assert restored.policy_version == 2 and restored.tensor_digests() == worker.tensor_digests()
    update(worker, 3)
    update(restored, 3)
    assert restored.weights_digest() == worker.weights_digest()
    moments, others = (dict(optimizer_tensors(each._optimizer, each._weights)) for each in (worker, restored))
    assert moments.keys() == others.keys() and all(torch.equal(moments[name], others[name]) for name in moments)


def test_the_room_that_is_looked_for_is_what_a_checkpoint_takes(tiny_model, tmp_path):
    worker = trained(config(tiny_model(vocab_size=2000)), updates=(1,))
    folder = save_checkpoint(tmp_path, 1, worker.save, expected_bytes=0, about={}).folder
    taken = sum(path.stat().st_size for path in folder.iterdir())
    assert taken <= worker.checkpoint_bytes() <= 1.2 * taken


def test_no_file_of_a_checkpoint_is_a_pickle(tiny_model, tmp_path):
    worker = trained(config(tiny_model()), updates=(1,))
    folder = save_checkpoint(tmp_path, 1, worker.save, expected_bytes=0, about={}).folder
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST,
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert json.loads((folder / "state.json").read_text()).keys() == {
        "policy_version",
        "weights_digest",
        "frozen_digest",
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_the_files_of_a_checkpoint(tiny_model, tmp_path):
    """So that a later run on several ranks can spread them anew."""
    worker = trained(config(tiny_model()), updates=(1,))
    folder = save_checkpoint(tmp_path, 1, worker.save, expected_bytes=0, about={}).folder
    written = {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}
    read = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert len(read) == 4 * len(worker.tensor_digests())
    assert all(torch.equal(read[name], written[name]) for name in written)


def test_a_policy_that_cannot_be_loaded_leaves_the_worker_as_it_was(tiny_model, tmp_path):
    worker = trained(config(tiny_model()), updates=(1,))
    worker.save(tmp_path)
    other = trained(config(tiny_model()), updates=(1, 2))
    before = (other.weights_digest(), dict(optimizer_tensors(other._optimizer, other._weights)))
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "weights_digest": "0" * 64}))
    with pytest.raises(ValueError, match="is damaged"):
        other.load(tmp_path)
    moments = dict(before[1])
    moments.pop(next(name for name in moments if name.endswith(":exp_avg")))
    with pytest.raises(ValueError, match="is missing or of another shape"):
        restore_optimizer(other._optimizer, other._weights, moments)
    after = dict(optimizer_tensors(other._optimizer, other._weights))
    assert other.weights_digest() == before[0] and other.policy_version == 2
    assert all(torch.equal(after[name], before[1][name]) for name in before[1])


def test_the_first_tensor_that_differs_can_be_named(tiny_model):
    worker = trained(config(tiny_model()), updates=())
    before = worker.tensor_digests()
    assert before == trained(config(tiny_model()), updates=()).tensor_digests()
    assert list(before) == sorted(before) and all(len(digest) == 16 for digest in before.values())
    update(worker, 1)
    assert worker.tensor_digests() == before, "with warm-up the first step has rate 0"
    update(worker, 2)
    after = worker.tensor_digests()
    assert before.keys() == after.keys() and all(before[name] != after[name] for name in before)
