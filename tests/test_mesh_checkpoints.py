"""Policy versions saved by one number of ranks and loaded by another: the same weights and moments, and no damage."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mesh_ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_worker import config, some_sequences, some_signals

from storage.ragged import Ragged
from tasks.warm_start.word_problems import build_tokenizer
from tasks.workers.export import export_policy
from tasks.workers.mesh import Mesh
from tasks.workers.optim import optimizer_tensors
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import MicroBatching
from tasks.workers.weights import digests


def worker_in(mesh, model, options, reference=False):
    cfg = config(model, model={"dtype": "float32", **options.get("model", {})}, actor=options.get("actor", {}))
    return PolicyWorker(cfg, total_steps=10, with_reference=reference, mesh=mesh)


def train(worker, step):
    seqs = some_sequences()
    signals = some_signals(seqs, Ragged(np.full(len(seqs.responses.values), -4.0), seqs.responses.offsets))
    worker.update(seqs, signals, [[np.arange(0, 6), np.arange(6, 10)]], MicroBatching(4, None), step=step)
    worker.policy_version = step


def held(worker):
    """Digests of everything that a checkpoint brings back."""
    moments = digests(dict(optimizer_tensors(worker._optimizer, worker._weights)), worker.mesh)
    return [worker.weights_digest(), worker.policy_version, {name: value.hex() for name, value in moments.items()}]


def weights_of(worker):
    return {name: value.clone() for name, value in worker.full_weights()}


def saved(rank, world_size, model, options, out, source=None):
    """Load what others wrote, if anything, report it, take one more step and save."""
    cfg = config(model, actor=options.get("actor", {}))
    worker = worker_in(Mesh.join(cfg, rank, world_size, torch.device("cpu")), model, options)
    if source:
        worker.load(Path(source))
    first = held(worker)
    train(worker, worker.policy_version + 1)
    if rank == 0:
        Path(out).mkdir()
    torch.distributed.barrier()
    worker.save(Path(out))
    return [first, held(worker), worker.checkpoint_bytes()]


def the_same(answers):
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


# At a usual rate: Adam moves a weight whose gradient is nothing but rounding by as much as any other.
RATE = {"optim": {"lr": 1e-3, "weight_decay": 0.1}}
OFFLOADED = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"actor": RATE}, {"model": {"lora_rank": 4}, "actor": {**RATE, **OFFLOADED}}], ids=["all", "adapter"]
)
def test_a_checkpoint_of_two_ranks_goes_on_three_and_then_in_one_process(tiny_model, tmp_path, options):
    model, two, three, one = str(tiny_model("llama")), tmp_path / "two", tmp_path / "three", tmp_path / "one"
    _, written, room = the_same(run_ranks(saved, 2, tmp_path / "a", model=model, options=options, out=str(two)))
    assert sum(path.stat().st_size for path in two.iterdir()) <= room
    hybrid = {**options, "actor": {**RATE, "fsdp_config": {"fsdp_size": 1}}}
    read, later, _ = the_same(
        run_ranks(saved, 3, tmp_path / "b", model=model, options=hybrid, out=str(three), source=str(two))
    )
    assert read == written
    worker = worker_in(None, model, options)
    worker.load(three)
    assert held(worker) == later
    went_on = weights_of(worker)
    worker.load(two)
    assert held(worker) == written
    before = weights_of(worker)
    train(worker, 2)
    moved = 0.0
    for name, value in weights_of(worker).items():
        assert (went_on[name] - value).abs().max() <= 1e-5, name
        moved = max(moved, float((before[name] - value).abs().max()))
    assert moved > 1e-4
    one.mkdir()
    worker.save(one)
    again, _, _ = the_same(
        run_ranks(saved, 2, tmp_path / "c", model=model, options=options, out=str(tmp_path / "d"), source=str(one))
    )
    assert again == held(worker)


def exported(rank, world_size, model, options, out):
    """Train, save, and export the whole policy, the adapter alone, and once more to a folder that is taken."""
    worker = worker_in(Mesh.join(config(model), rank, world_size, torch.device("cpu")), model, options)
    train(worker, 1)
    worker.save(Path(out) / "saved")
    said = []
    for name, adapter in (("whole", False), ("adapter", True), ("whole", False)):
        try:
            export_policy(worker, build_tokenizer(), Path(out) / name, adapter=adapter)
            said.append("done")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_ranks_export_the_files_that_one_process_exports(tiny_model, tmp_path, lora_rank):
    tokenizer = build_tokenizer()
    model = str(tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    options, kinds = {"model": {"lora_rank": lora_rank}}, ["whole", "adapter"] if lora_rank else ["whole"]
    (tmp_path / "saved").mkdir()
    said = the_same(run_ranks(exported, 2, tmp_path / "a", model=model, options=options, out=str(tmp_path)))
    assert said[0] == "done" and "exists and is not empty" in said[2]
    assert (said[1] == "done") if lora_rank else ("only the LoRA adapter is to be exported" in said[1])
    alone = worker_in(None, model, options)
    alone.load(tmp_path / "saved")
    for kind in kinds:
        export_policy(alone, tokenizer, tmp_path / f"alone_{kind}", adapter=kind == "adapter")
        ours, theirs = tmp_path / f"alone_{kind}", tmp_path / kind
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
        for path in ours.glob("*.safetensors"):
            assert path.read_bytes() == (theirs / path.name).read_bytes()


def refused(rank, world_size, model, other, good, bad):
    """What loading says of a damaged folder and of another model's, and whether the worker stayed as it was."""
    cfg = config(model)
    worker = worker_in(Mesh.join(cfg, rank, world_size, torch.device("cpu")), model, {})
    worker.load(Path(good))
    before, said = held(worker), []
    for folder in (*bad, other):
        try:
            worker.load(Path(folder))
            said.append("loaded")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return [said, held(worker) == before]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_by_every_rank_and_changes_nothing(tiny_model, tmp_path):
    model, good = str(tiny_model("qwen2")), tmp_path / "good"
    run_ranks(saved, 2, tmp_path / "a", model=model, options={}, out=str(good))
    changed, torn, stateless, other = (tmp_path / name for name in ("changed", "torn", "stateless", "other"))
    for folder in (changed, torn, stateless):
        shutil.copytree(good, folder)
    first = sorted(changed.glob("*.safetensors"))[0]
    with safe_open(first, "pt") as file:
        about = file.metadata()
    tensors = load_file(first)
    next(value for name, value in tensors.items() if ":" not in name).view(-1)[0] += 1
    save_file(tensors, first, metadata=about)
    last = sorted(torn.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    (stateless / "state.json").write_text("{")
    other.mkdir()
    worker_in(None, str(tiny_model("qwen2", num_hidden_layers=1)), {}).save(other)
    bad = [str(folder) for folder in (changed, torn, stateless)]
    said, stayed = the_same(
        run_ranks(refused, 3, tmp_path / "b", model=model, other=str(other), good=str(good), bad=bad)
    )
    assert stayed and "changed is damaged: its weights do not have the digest" in said[0]
    assert said[1].startswith("ValueError") and "torn is damaged" in said[1]
    assert said[2].startswith("ValueError") and "is no policy of this run's model" in said[3]


def test_a_process_loads_what_ranks_saved_bit_for_bit(tiny_model, tmp_path):
    model, folder = str(tiny_model("qwen2")), tmp_path / "two"
    _, written, _ = the_same(run_ranks(saved, 2, tmp_path / "a", model=model, options={}, out=str(folder)))
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors", ".safetensors"]
    state = json.loads((folder / "state.json").read_text())
    worker = worker_in(None, model, {})
    worker.load(folder)
    assert worker.weights_digest() == state["weights_digest"]
    assert held(worker) == written
