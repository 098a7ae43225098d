"""What benchmarks/gpu_check.py works on: a random model with the sizes of Qwen2.5-0.5B, a batch, and their FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from storage.ragged import Ragged
from tasks.warm_start.word_problems import build_tokenizer
from tasks.workers.model import without_progress_bar
from tasks.workers.sequences import MicroBatching, Sequences, cut

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "H200": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 products with float32 sums, 10^12 operations a second, from NVIDIA's data sheets (those with sparsity
halved); the first name that is part of the device's counts."""


@dataclass(frozen=True)
class Sizes:
    """The model, and the batch it works on.

    Attributes:
        hidden: width; `layers`, `heads`, `kv_heads`, `mlp`, `vocabulary` as in the model's configuration.
        prompts: G prompts of `prompt_tokens` // 4 to `prompt_tokens` tokens.
        n: responses to each, of `response_tokens` // 4 to `response_tokens` tokens.
        micro_tokens: most tokens of a micro-batch.
        checked: sequences whose log-probs are compared with float32.
    """

    hidden: int = 896
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    mlp: int = 4864
    vocabulary: int = 151936
    prompts: int = 32
    n: int = 8
    prompt_tokens: int = 256
    response_tokens: int = 512
    micro_tokens: int = 16384
    checked: int = 16


TINY = Sizes(64, 2, 4, 2, 128, 512, prompts=4, n=2, prompt_tokens=12, response_tokens=16, micro_tokens=64, checked=4)


def model_config(sizes: Sizes, **tokens: int | None) -> Qwen2Config:
    """The model's configuration, beside it the ids of special tokens."""
    return Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        # Logits then spread by about 1.5, so that predictions differ from one another.
        initializer_range=1.5 / math.sqrt(sizes.hidden),
        **tokens,
    )


def build_model(folder: Path, sizes: Sizes) -> None:
    """Write random weights that bfloat16 holds exactly, so that every type starts from the same, and a tokenizer."""
    tokenizer = build_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]), without_progress_bar():
        torch.manual_seed(0)
        Qwen2ForCausalLM(model_config(sizes, **ids)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_batch(sizes: Sizes) -> Sequences:
    """Sequences of random tokens and of uneven lengths, the same at every call."""
    random = np.random.default_rng(0)

    def rows(count: int, longest: int) -> Ragged:
        lengths = random.integers(max(longest // 4, 1), longest + 1, count)
        return Ragged.from_lengths(random.integers(3, sizes.vocabulary, lengths.sum(), dtype=np.int32), lengths)

    count = sizes.prompts * sizes.n
    prompts = rows(sizes.prompts, sizes.prompt_tokens)
    return Sequences(prompts, np.repeat(np.arange(sizes.prompts), sizes.n), rows(count, sizes.response_tokens))


def forward_flops(sizes: Sizes, seqs: Sequences, micro: MicroBatching, *, shared: bool) -> float:
    """Operations of the matrix products in one forward pass over a batch; an update makes three times as many.

    Two for each weight of a product and token, four for each width and pair of query and key (arXiv 2001.08361, 2.1;
    arXiv 2204.02311, appendix B, which defines MFU). Counted is what the layout needs: no padding, no keys that causal
    attention does not see, the head at response tokens alone, a shared prompt once per micro-batch, and nothing that
    is computed again in the backward pass.
    """
    size = sizes.hidden // sizes.heads
    heads, kv = sizes.heads * size, sizes.kv_heads * size
    weights = sizes.layers * (2 * sizes.hidden * heads + 2 * sizes.hidden * kv + 3 * sizes.hidden * sizes.mlp)
    tokens = pairs = 0.0
    for part in cut(seqs, np.arange(len(seqs.group)), micro, share_prompts=shared):
        group, responses = seqs.group[part], seqs.responses.lengths[part].astype(np.float64)
        prompts = seqs.prompts.lengths[np.unique(group) if shared else group].astype(np.float64)
        before = seqs.prompts.lengths[group]
        tokens += prompts.sum() + responses.sum()
        pairs += (prompts**2 / 2).sum() + (before * responses + responses**2 / 2).sum()
    head = 2 * sizes.hidden * sizes.vocabulary * len(seqs.responses.values)
    return 2 * weights * tokens + 4 * sizes.layers * heads * pairs + head


def peak_tflops(device_name: str) -> float | None:
    """The greatest rate of a device; None: it is not known."""
    return next((rate for part, rate in PEAK_TFLOPS.items() if part in device_name), None)
