"""The `transformers` rollout engine. On one device it samples from the policy's own weights, so that none are copied.
On one of several ranks it has a whole copy, which is given the policy's weights when it is behind them.

A loop over the model with a key/value cache. Each prompt is computed once and its cache repeated for its samples; rows
that are finished leave the batch.

The same seed gives the same tokens, whatever else is in the batch, up to rounding: matrix products of another shape can
differ in the last bit, which changes a token only where its random number lies that close to a border between two
tokens. In float32 a tiny model had 1 such token in 73,709; bfloat16 rounds more than a thousand times more coarsely.
The same call with the same rows is always the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.engines.protocol import Responses, Sampling, response_limits
from tasks.engines.sampling import Streams, choose
from tasks.workers.forward import added_to_scores, pad, seen_keys
from tasks.workers.mesh import Mesh
from tasks.workers.model import CausalModel, load_model

LEAVE_SHARE = 0.8
"""Finished rows leave when the rest is at most this share of the batch: leaving copies the cache once."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer: the end token, and texts where there are stop texts."""

    eos_token_id: int | None

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Texts of rows of token ids."""


class Weights(Protocol):
    """What is sampled from: a policy on one device, or a copy of one.

    Attributes:
        model: with the weights.
        policy_version: of them.
    """

    model: CausalModel
    policy_version: int

    @property
    def cfg(self) -> RunConfig:
        """The run's configuration."""

    def weights_digest(self) -> str:
        """Their digest."""


class OwnWeights:
    """A whole copy of the policy, apart from it: it is a policy once it has taken one."""

    def __init__(self, cfg: RunConfig, device: torch.device) -> None:
        self.cfg = cfg
        # What an idle engine holds on an accelerator, training cannot have.
        away = cfg.actor_rollout_ref.rollout.free_cache_engine and device.type == "cuda"
        fsdp, seed = cfg.actor_rollout_ref.actor.fsdp_config, cfg.trainer.seed
        self.model = load_model(cfg.actor_rollout_ref.model, fsdp, Mesh.alone(device), seed, away=away, frozen=True)
        self.policy_version, self._digest = -1, ""

    def weights_digest(self) -> str:
        """Digest of the policy that was taken last."""
        return self._digest

    def is_policy(self, version: int, digest: str) -> bool:
        """Whether that is what it has taken."""
        return (self.policy_version, self._digest) == (version, digest)

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, digest: str) -> None:
        """Become the policy of this version.

        Args:
            weights: all of the policy's, by name.
            version: of the policy.
            digest: of its weights.
        """
        self.policy_version, self._digest = -1, ""
        own = dict(self.model.module.named_parameters())
        for name, values in weights:
            own.pop(name).copy_(values)
        assert not own, f"the policy has no {sorted(own)[:3]}"
        self.policy_version, self._digest = version, digest


class TransformersEngine:
    """Samples from a policy's weights, its own or a copy; key/value caches live no longer than a call."""

    def __init__(self, weights: Weights, tokenizer: Tokenizer) -> None:
        self._weights, self._tokenizer = weights, tokenizer
        self._end_tokens = _end_tokens(weights.model, tokenizer)

    @property
    def policy_version(self) -> int:
        """Version of the weights it samples from."""
        return self._weights.policy_version

    @property
    def policy_digest(self) -> str:
        """Digest of those weights."""
        return self._weights.weights_digest()

    def generate(self, prompts: Ragged, group: np.ndarray, seeds: np.ndarray, sampling: Sampling) -> Responses:
        """Sample N responses; see the protocol. At most `rollout.max_num_seqs` are in the batch at a time."""
        limits = response_limits(prompts, group, sampling, self._weights.model.context_tokens)
        rollout, rows = self._weights.cfg.actor_rollout_ref.rollout, len(group)
        tokens = np.zeros((rows, int(limits.max(initial=0))), dtype=np.int32)
        log_probs = np.zeros(tokens.shape, dtype=np.float32)
        lengths, stopped = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)
        with torch.no_grad(), self._weights.model.computing():
            for chosen in self._waves(prompts, group):
                wave = _Wave(self._weights.model, prompts, group[chosen], seeds[chosen], limits[chosen], sampling)
                width = int(limits[chosen].max())
                done = wave.run(self._end_tokens, self._tokenizer, rollout.max_num_batched_tokens)
                tokens[chosen, :width], log_probs[chosen, :width], lengths[chosen], stopped[chosen] = done
        within = np.arange(tokens.shape[1]) < lengths[:, None]
        return Responses(
            response_ids=Ragged.from_lengths(tokens[within], lengths),
            log_probs=Ragged.from_lengths(log_probs[within], lengths) if sampling.log_probs else None,
            finish_reason=["stop" if stop else "length" for stop in stopped],
            notes=_notes(sampling),
        )

    def _waves(self, prompts: Ragged, group: np.ndarray) -> Iterator[np.ndarray]:
        """Row numbers of each wave: prompts of like length together, a prompt's samples side by side.

        A model that does not keep everything it has seen takes no padding: its waves have prompts of one length.
        """
        size = self._weights.cfg.actor_rollout_ref.rollout.max_num_seqs
        lengths = prompts.lengths[group]
        order = np.lexsort((group, lengths))
        changes = np.flatnonzero(np.diff(lengths[order])) + 1
        for part in [order] if self._weights.model.full_attention else np.split(order, changes):
            yield from (part[start : start + size] for start in range(0, len(part), size))


class _Wave:
    """B responses that are sampled together. A batch row is a wave row that goes on; `self.alive` maps them."""

    def __init__(
        self,
        model: CausalModel,
        prompts: Ragged,
        group: np.ndarray,
        seeds: np.ndarray,
        limits: np.ndarray,
        sampling: Sampling,
    ) -> None:
        self.model, self.sampling, device = model, sampling, model.device
        groups, places = np.unique(group, return_inverse=True)
        ids, lengths = pad(prompts, groups, 0)
        self.prompts, self.prompt_lengths = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (ids, lengths))
        self.places = torch.from_numpy(places).to(device)
        self.limits = torch.from_numpy(limits).to(device)
        self.streams = None if sampling.is_greedy else Streams(seeds, device)
        self.tokens = torch.zeros(len(group), int(limits.max()), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.lengths, self.stopped = self.limits.clone(), torch.zeros(len(group), dtype=torch.bool, device=device)
        self.alive = torch.arange(len(group), device=device)

    def run(self, end_tokens: list[int], tokenizer: Tokenizer, prefill_tokens: int) -> tuple[np.ndarray, ...]:
        """Sample until every row has ended.

        Returns:
            ([B, T] tokens, [B, T] log-probs, [B] lengths, [B] whether a row ended by itself); what lies beyond a row's
            length means nothing.
        """
        ends = torch.tensor([] if self.sampling.ignore_eos else end_tokens, dtype=torch.int64, device=self.alive.device)
        logits = self._prefill(prefill_tokens)
        going = torch.ones_like(self.stopped)
        for position in range(self.tokens.shape[1]):
            chosen = self._record(position, logits)
            ended = (chosen.unsqueeze(1) == ends).any(dim=1) | self._at_stop_text(position, tokenizer)
            last = self.alive[going[self.alive] & ended]
            self.stopped[last], self.lengths[last] = True, position + 1
            going[self.alive] &= ~ended & (self.limits[self.alive] > position + 1)
            left = int(going.sum())
            if left == 0:
                break
            if left <= LEAVE_SHARE * len(self.alive):
                chosen = self._let_go(going, chosen)
            logits = self._decode(chosen, position)
        results = (self.tokens, self.log_probs, self.lengths, self.stopped)
        return tuple(result.cpu().numpy() for result in results)

    def _prefill(self, prefill_tokens: int) -> torch.Tensor:
        """Compute every prompt once and repeat its cache for its rows; [B, V] logits of the first token."""
        model, width = self.model, self.prompts.shape[1]
        size = max(prefill_tokens // width, 1) if model.full_attention else len(self.prompts)
        caches, last = [], []
        for ids, lengths in zip(self.prompts.split(size), self.prompt_lengths.split(size), strict=True):
            caches.append(model.new_cache())
            hidden = model.hidden(ids, past_key_values=caches[-1])
            last.append(hidden[torch.arange(len(ids), device=ids.device), lengths - 1])
        if model.full_attention:
            self.cache = _slab(model.new_cache(), caches, self.places, self.tokens.shape[1])
        else:
            self.cache = caches[0]
            self.cache.reorder_cache(self.places)
        self.lengths_before = self.prompt_lengths.index_select(0, self.places)
        seen = seen_keys(self.lengths_before, width, self.tokens.shape[1])
        self.padded = len(seen) == len(self.lengths_before)
        self.seen = added_to_scores(model, seen.unsqueeze(1)) if model.adds_mask and model.full_attention else seen
        return model.logits(torch.cat(last)).index_select(0, self.places)

    def _record(self, position: int, logits: torch.Tensor) -> torch.Tensor:
        """Choose and note one token for every row of the batch."""
        uniform = None if self.streams is None else self.streams.at(position, self.alive)
        chosen, log_probs = choose(logits, uniform, self.sampling)
        self.tokens[self.alive, position] = chosen
        self.log_probs[self.alive, position] = log_probs.float()
        return chosen

    def _at_stop_text(self, position: int, tokenizer: Tokenizer) -> torch.Tensor:
        """[batch rows] whether the newest token completes a stop text.

        Nearly every token is one byte of text at least, so a stop text lies within as many last tokens as it has bytes,
        and some to spare for those that are none.
        """
        stop = self.sampling.stop
        if not stop:
            return torch.zeros(len(self.alive), dtype=torch.bool, device=self.alive.device)
        first = max(position - max(len(text.encode()) for text in stop) - 3, 0)
        newest = self.tokens[self.alive, first : position + 1].tolist()
        texts = tokenizer.batch_decode(newest, skip_special_tokens=False)
        return torch.tensor([any(part in text for part in stop) for text in texts], device=self.alive.device)

    def _let_go(self, going: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Drop the batch rows that have ended; return the newest tokens of those that stay."""
        rows = going[self.alive].nonzero().squeeze(1)
        self.alive, self.lengths_before = self.alive[rows], self.lengths_before[rows]
        self.cache.reorder_cache(rows)
        if self.padded:
            self.seen = self.seen[rows]
        return chosen[rows]

    def _decode(self, newest: torch.Tensor, position: int) -> torch.Tensor:
        """[batch rows, V] logits of the next token. A row that has ended stays at its last position."""
        keys = self.prompts.shape[1] + position + 1
        mask = self.seen[..., :keys] if self.padded or self.seen.dim() == 4 else None
        places = self.lengths_before + self.limits[self.alive].sub(1).clamp(max=position)
        hidden = self.model.hidden(
            newest.unsqueeze(1), past_key_values=self.cache, position_ids=places.unsqueeze(1), attention_mask=mask
        )
        return self.model.logits(hidden[:, -1])


class _SlabLayer(DynamicLayer):
    """Keys and values of one layer in memory that is taken once; transformers' own layer copies all at each token.

    `keys` and `values` are views of the part that is filled.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._memory = [_with_room(tensor, room) for tensor in (keys, values)]
        self._show(keys.shape[-2])

    def _show(self, length: int) -> None:
        self.keys, self.values = (memory[:, :, :length] for memory in self._memory)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return all."""
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor | torch.Tensor) -> None:
        """Keep the given rows."""
        length = self.keys.shape[-2]
        self._memory = [memory.index_select(0, beam_idx) for memory in self._memory]
        self._show(length)


def _slab(cache: Any, parts: list[Any], rows: torch.Tensor, room: int) -> Any:
    """A cache whose row i is row rows[i] of the given caches taken together, with room for more tokens."""
    cache.layers = [
        _SlabLayer(
            torch.cat([layer.keys for layer in layers]).index_select(0, rows),
            torch.cat([layer.values for layer in layers]).index_select(0, rows),
            room,
        )
        for layers in zip(*(part.layers for part in parts), strict=True)
    ]
    return cache


def _with_room(tensor: torch.Tensor, room: int) -> torch.Tensor:
    rows, heads, length, size = tensor.shape
    memory = tensor.new_empty(rows, heads, length + room, size)
    memory[:, :, :length] = tensor
    return memory


def _end_tokens(model: CausalModel, tokenizer: Tokenizer) -> list[int]:
    """Ids that end a response: the generation settings' (the model's where there are none) and the tokenizer's."""
    ids: set[int] = set()
    generation = getattr(model.network, "generation_config", None)
    for source in (getattr(generation, "eos_token_id", None) or model.config.eos_token_id, tokenizer.eos_token_id):
        ids.update(source if isinstance(source, list | tuple) else [] if source is None else [source])
    return sorted(ids)


def _notes(sampling: Sampling) -> dict[str, Any]:
    """What a reader of the log-probs must know."""
    filters = [f"top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    filters += [f"top_p={sampling.top_p}"] if sampling.top_p < 1 else []
    return {
        "log_probs": "processed",
        "temperature": 1.0 if sampling.is_greedy else sampling.temperature,
        "filters": "none",
        "sampled_with": "greedy" if sampling.is_greedy else ", ".join(filters) or "no filter",
    }
