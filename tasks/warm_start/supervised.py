"""The short supervised training that a recipe's policy starts from: a tiny Llama, next-token loss on responses.

Every demonstration has the same length, so batches need neither padding nor masks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as bars

from tasks.seeds import hashed
from tasks.warm_start.parameters import Schedule, Shape


def train_model(
    shape: Shape, schedule: Schedule, tokenizer: Any, prompts: np.ndarray, responses: np.ndarray, seed: int
) -> tuple[LlamaForCausalLM, dict[str, float]]:
    """Train a new model on demonstrations, in the order given.

    Args:
        shape: size of the model.
        schedule: length and step size.
        tokenizer: its size and special tokens go into the model's config.
        prompts: [steps * batch, P] token ids.
        responses: [steps * batch, R] token ids; the loss is taken on these alone.
        seed: seed of the first weights.

    Returns:
        The model, and `loss` (mean of the last tenth of the steps), `steps`, `tokens`, `seconds`.

    Raises:
        RuntimeError: the gradient is not finite.
    """
    start, losses = time.perf_counter(), []
    sequences = torch.from_numpy(np.concatenate([prompts, responses], axis=1))
    model = _new_model(shape, tokenizer, sequences.shape[1], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.lr, weight_decay=0.01, fused=True)
    with _one_thread():
        for step, batch in enumerate(sequences.split(schedule.batch)):
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr * lr_factor(step, schedule)
            loss = _response_loss(model, batch, responses.shape[1])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            losses.append(loss.item())
    tail = losses[-max(len(losses) // 10, 1) :]
    return model.eval(), {
        "loss": float(np.mean(tail)),
        "steps": float(len(losses)),
        "tokens": float(sequences.numel()),
        "seconds": time.perf_counter() - start,
    }


def lr_factor(step: int, schedule: Schedule) -> float:
    """Share of the peak learning rate at an optimizer step, counted from 0."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(schedule.steps - schedule.warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * done))


def _new_model(shape: Shape, tokenizer: Any, length: int, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2 * length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    with _seeded("weights", seed):
        return LlamaForCausalLM(config).train()


def _response_loss(model: LlamaForCausalLM, batch: torch.Tensor, response_length: int) -> torch.Tensor:
    """Mean next-token loss over the last `response_length` tokens of each row of batch [B, T]."""
    logits = model(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=response_length).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, -response_length:].flatten())


def write_responses(
    model: LlamaForCausalLM, prompts: np.ndarray, max_tokens: int, *, samples: int, greedy: bool, seed: int
) -> np.ndarray:
    """Let the model answer prompts of equal length.

    Args:
        model: the policy.
        prompts: [G, P] token ids.
        max_tokens: longest response.
        samples: responses to each prompt.
        greedy: take the likeliest token, else sample at temperature 1.
        seed: seed of the samples.

    Returns:
        [G, samples, up to max_tokens] token ids, padded after the end token.
    """
    rows = torch.from_numpy(prompts).repeat_interleave(samples, dim=0)
    with torch.inference_mode(), _one_thread(), _seeded("samples", seed):
        out = model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=max_tokens,
            do_sample=not greedy,
            **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        )
    return out[:, prompts.shape[1] :].view(len(prompts), samples, -1).numpy()


def pass_at_k(right: np.ndarray, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (arXiv 2107.03374, eq. 1), mean over prompts.

    Args:
        right: [G, n] bool, k <= n.
        k: how many samples one draws.
    """
    n = right.shape[1]
    wrong = n - right.sum(axis=1)
    return float(np.mean([1.0 - math.comb(int(w), k) / math.comb(n, k) for w in wrong]))


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model as config.json and model.safetensors, without a progress bar."""
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            bars.enable_progress_bar()


@contextmanager
def _seeded(what: str, seed: int) -> Iterator[None]:
    """Give torch's CPU generator a seed for this block and put its state back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hashed("word_problems", what, seed))
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: a second one waits more than it works here, and their number would change the result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
