"""Exported policies: what transformers and peft load is the worker's policy, and the worker is not changed by it."""

import json
import subprocess

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from storage.durable import StorageError
from storage.ragged import Ragged
from tasks.config import ModelConfig, RunConfig
from tasks.tokenizer import load_tokenizer
from tasks.warm_start.word_problems import build_tokenizer
from tasks.workers.export import export_policy
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import MicroBatching, Sequences

TEXT = "Tom has 12 apples and buys 7 more."
MODEL_FILES = ["config.json", "generation_config.json", "model.safetensors"]
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def base(tiny_model, tokenizer):
    """Make the folder of a random model that fits the tokenizer."""

    def make(model_type="llama", **more):
        return tiny_model(model_type, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **more)

    return make


def moved_worker(folder, **model):
    """A worker whose trained weights, the adapter's too, are away from where they began."""
    model = {"path": str(folder), "dtype": "float32", "enable_gradient_checkpointing": True, **model}
    cfg = RunConfig.model_validate({"actor_rollout_ref": {"model": model}, "trainer": {"device": "cpu"}})
    worker = PolicyWorker(cfg, total_steps=1, with_reference=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in worker._weights.values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return worker


def exported(worker, tokenizer, folder, **how):
    before = {name: tensor.clone() for name, tensor in worker.model.module.state_dict().items()}
    export_policy(worker, tokenizer, folder, **how)
    after = worker.model.module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    return folder


def largest_gap(worker, model):
    """Between the worker's log-probs and those of a transformers model, over four sequences of different lengths."""
    random = np.random.default_rng(0)
    rows = [random.integers(2, worker.model.config.vocab_size, n) for n in (9, 30, 1, 17)]
    prompt = [3, 4, 5]
    seqs = Sequences(Ragged.from_rows([prompt], np.int32), np.zeros(4, np.int64), Ragged.from_rows(rows, np.int32))
    ours = worker.log_probs(seqs, MicroBatching(4, None), temperature=1.0).log_probs
    ours = np.split(ours.values, ours.offsets[1:-1])
    gaps = []
    with torch.no_grad():
        for number, row in enumerate(rows):
            ids = torch.tensor([[*prompt, *row]])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            theirs = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            gaps.append(np.abs(theirs.numpy() - ours[number]).max())
    return max(gaps)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_policy_of_the_worker(base, tokenizer, tmp_path, model_type, tied):
    worker = moved_worker(base(model_type, tie_word_embeddings=tied))
    folder = exported(worker, tokenizer, tmp_path / "policy")
    assert sorted(path.name for path in folder.iterdir()) == [*MODEL_FILES, *TOKENIZER_FILES]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and largest_gap(worker, model) < 1e-5
    weights = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in weights) == (not tied)
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shared == tied


@pytest.mark.parametrize("how", [{}, {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 32}])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_merged_into_the_exported_weights_and_not_into_the_workers(base, tokenizer, tmp_path, how, tied):
    worker = moved_worker(base(tie_word_embeddings=tied), lora_rank=4, **how)
    model = AutoModelForCausalLM.from_pretrained(exported(worker, tokenizer, tmp_path / "policy"))
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
    assert largest_gap(worker, model) < 1e-5
    begun_with = AutoModelForCausalLM.from_pretrained(worker.cfg.actor_rollout_ref.model.path)
    assert largest_gap(worker, begun_with) > 1e-2


def test_an_adapter_alone_is_a_peft_folder_for_the_model_it_was_trained_on(base, tokenizer, tmp_path, monkeypatch):
    started_with = base()
    monkeypatch.chdir(started_with.parent)
    worker = moved_worker(f"./{started_with.name}", lora_rank=4)
    folder = exported(worker, tokenizer, tmp_path / "adapter", adapter=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(started_with)
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert not (folder / "model.safetensors").exists()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(started_with), folder)
    assert largest_gap(worker, model) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_keep_their_type(base, tokenizer, tmp_path, dtype, lora_rank):
    worker = moved_worker(base(), dtype=dtype, lora_rank=lora_rank)
    folder = exported(worker, tokenizer, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


def test_a_run_can_begin_with_an_exported_policy(base, tokenizer, tmp_path):
    worker = moved_worker(base())
    folder = exported(worker, tokenizer, tmp_path / "policy")
    cfg = RunConfig.model_validate(
        {"actor_rollout_ref": {"model": {"path": str(folder), "dtype": "float32"}}, "trainer": {"device": "cpu"}}
    )
    assert PolicyWorker(cfg, total_steps=1, with_reference=False).weights_digest() == worker.weights_digest()


def test_the_tokenizer_goes_along_with_its_chat_template(base, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = exported(moved_worker(base()), tokenizer, tmp_path / "policy")
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert loaded(TEXT)["input_ids"] == ids and loaded.decode(ids) == tokenizer.decode(ids)
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token_id == tokenizer.eos_token_id
    ours = load_tokenizer(ModelConfig.model_validate({"path": str(folder)}))
    assert ours(TEXT)["input_ids"] == ids


def test_a_tokenizer_that_transformers_makes_another_of_is_said(base, tokenizer, tmp_path, caplog):
    """For `qwen2` in config.json transformers makes a byte-level tokenizer, whatever tokenizer.json holds."""
    exported(moved_worker(base("qwen2")), tokenizer, tmp_path / "policy")
    assert "AutoTokenizer makes Qwen2Tokenizer of the exported folder" in caplog.text


def test_a_generation_config_goes_out_as_it_came_in(base, tokenizer, tmp_path):
    """transformers reads a temperature without do_sample, and then refuses to write it."""
    started_with = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base()).save_pretrained(started_with)
    (started_with / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [1, 4]}))
    worker = moved_worker(started_with)
    folder = exported(worker, tokenizer, tmp_path / "policy")
    written = json.loads((folder / "generation_config.json").read_text())
    assert written["temperature"] == 0.6 and written["eos_token_id"] == [1, 4]
    assert worker.model.network.generation_config.temperature == 0.6


SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e5}, SCALED], ids=["plain", "scaled"])
def test_readers_before_transformers_5_find_the_rotary_base_too(base, tokenizer, tmp_path, rope):
    worker = moved_worker(base(rope_parameters=rope))
    folder = exported(worker, tokenizer, tmp_path / "policy")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == rope["rope_theta"] and config["rope_parameters"] == rope
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)
    assert largest_gap(worker, AutoModelForCausalLM.from_pretrained(folder)) < 1e-5


def test_large_weights_are_cut_into_shards_with_an_index(base, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.workers.export.SHARD_SIZE", "20KB")
    worker = moved_worker(base())
    folder = exported(worker, tokenizer, tmp_path / "policy")
    shards = {path.name for path in folder.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()) == shards
    assert largest_gap(worker, AutoModelForCausalLM.from_pretrained(folder)) < 1e-5


def test_a_folder_in_use_is_not_written_into(base, tokenizer, tmp_path):
    worker = moved_worker(base())
    empty, used = tmp_path / "empty", tmp_path / "used"
    empty.mkdir()
    used.mkdir()
    (used / "config.json").write_text("mine")
    exported(worker, tokenizer, empty)
    with pytest.raises(ValueError, match="exists and is not empty"):
        export_policy(worker, tokenizer, used)
    with pytest.raises(ValueError, match="exists and is not empty"):
        export_policy(worker, tokenizer, used / "config.json")
    assert (used / "config.json").read_text() == "mine"


def test_an_adapter_that_is_not_there_cannot_be_exported(base, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model\.lora_rank is 0"):
        export_policy(moved_worker(base()), tokenizer, tmp_path / "adapter", adapter=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pages", [0, 2, 8, -2], ids=["check", "weights", "weights later", "tokenizer"])
def test_a_full_disk_leaves_nothing_of_an_export(base, tokenizer, tmp_path, monkeypatch, pages):
    """Seen before, or met while the weights or the tokenizer are written, when another process has taken the room."""
    worker = moved_worker(base())
    whole = exported(worker, tokenizer, tmp_path / "whole")
    taken = sum(-(-path.stat().st_size // 4096) for path in whole.iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={4 * (taken + pages if pages < 0 else max(pages, 1))}k"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting a size-limited tmpfs needs root")
    try:
        if pages:
            monkeypatch.setattr("tasks.workers.export.files_bytes", lambda _: 0)
        with pytest.raises(StorageError, match=r"no space left in .*bytes are free"):
            export_policy(worker, tokenizer, disk / "policy")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_exported_files_can_be_read_by_whom_any_new_file_can(base, tokenizer, tmp_path):
    export_policy(moved_worker(base()), tokenizer, tmp_path / "out")
    (tmp_path / "plain").write_text("x")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}
