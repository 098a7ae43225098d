"""From sequences to the log-prob and entropy of every response token: one forward pass over one micro-batch.

A micro-batch lies in memory in one of three layouts. Where rows are padded, they are so on the right: attention is
causal, so padding behind a sequence cannot reach it. The last response token is predicted but never fed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from storage.ragged import Ragged
from tasks.workers.layout import Layout
from tasks.workers.model import CausalModel, recompute_in_backward
from tasks.workers.packed import pack
from tasks.workers.sequences import Sequences
from tasks.workers.ulysses import numbers_of_all, require_sequence_parallel

if TYPE_CHECKING:
    from tasks.workers.mesh import Mesh

CHUNK_LOGITS = 2**24
"""Logits that are held at a time: 64 MiB in float32."""


def choose_layout(model: CausalModel, *, share_prompts: bool, remove_padding: bool, sp_size: int = 1) -> Layout:
    """The layout that is least work among those that the model and the configuration allow.

    Args:
        model: loaded.
        share_prompts: `actor.use_prefix_grouper`, and no layer is recomputed: those take no key/value cache.
        remove_padding: `model.use_remove_padding`.
        sp_size: ranks that share a row, which is a packed one.

    Raises:
        ValueError: so many ranks cannot share this model's sequences.
    """
    packs = remove_padding and model.packs
    require_sequence_parallel(model, sp_size, packs=packs)
    if share_prompts and model.full_attention and sp_size == 1:
        return Layout.SHARED_PROMPTS
    return Layout.PACKED if packs else Layout.PADDED


class TokenNumbers(NamedTuple):
    """Numbers of n response tokens, float32, or float64 for a float64 model; None: not asked for.

    Attributes:
        log_probs: [n] of the tokens.
        entropy: [n] of the distribution at each of them, nats.
        sum_pi_squared: [n] sum over the vocabulary of squared probabilities.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    sum_pi_squared: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B rows on the device, and the distinct prompts they answer.

    Attributes:
        prompts: [G, P] token ids, right-padded.
        prompt_lengths: [G].
        group: [B] row of `prompts` of each response.
        responses: [B, R] token ids, right-padded.
        response_lengths: [B].
        tokens: [n] places of the response tokens in a flattened [B, R], row by row.
    """

    prompts: torch.Tensor
    prompt_lengths: torch.Tensor
    group: torch.Tensor
    responses: torch.Tensor
    response_lengths: torch.Tensor
    tokens: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        """[n] the response tokens."""
        return self.responses.flatten().index_select(0, self.tokens)

    def response_places(self) -> torch.Tensor:
        """[B, R] place of each response token in its sequence."""
        lengths = self.prompt_lengths.index_select(0, self.group)
        return lengths.unsqueeze(1) + torch.arange(self.responses.shape[1], device=lengths.device)

    def whole_sequences(self) -> torch.Tensor:
        """[B, P + R] prompts and behind them responses, right-padded."""
        prompts = self.prompts.index_select(0, self.group)
        prompts = torch.nn.functional.pad(prompts, (0, self.responses.shape[1]))
        return prompts.scatter(1, self.response_places(), self.responses)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """[n] values of the response tokens to [B, R], 0 at padding."""
        flat = values.new_zeros(self.responses.numel())
        return flat.index_copy(0, self.tokens, values).view(self.responses.shape)


def to_device(sequences: Sequences, rows: np.ndarray, device: torch.device) -> MicroBatch:
    """Pad the given rows and move them to the device."""
    groups, group = np.unique(sequences.group[rows], return_inverse=True)
    prompts, prompt_lengths = pad(sequences.prompts, groups, 0)
    responses, response_lengths = pad(sequences.responses, rows, 0)
    tokens = np.flatnonzero(np.arange(responses.shape[1]) < response_lengths[:, None])
    arrays = (prompts, prompt_lengths, group, responses, response_lengths, tokens)
    return MicroBatch(*(torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True) for array in arrays))


def pad(ragged: Ragged, rows: np.ndarray, fill: float) -> tuple[np.ndarray, np.ndarray]:
    """The given rows as one array, right-padded with `fill` to the longest of them, and their lengths."""
    lengths = ragged.lengths[rows]
    padded = np.full((len(rows), int(lengths.max(initial=0))), fill, dtype=ragged.values.dtype)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = ragged.take(rows).values
    return padded, lengths


def response_log_probs(
    model: CausalModel,
    batch: MicroBatch,
    *,
    temperature: float,
    layout: Layout,
    entropy: bool,
    squares: bool = False,
    mesh: Mesh | None = None,
) -> TokenNumbers:
    """Log-prob of every response token of a micro-batch, and of the distribution it was drawn from what is asked for.

    With sharded weights each call of the decoder is a collective. So in a mesh all ranks call this equally often,
    within `model.in_one_forward`, each with at least one response token. Decoder and head are then called equally often
    too, forward and backward, whatever the lengths are.

    Args:
        model: within its `computing()`.
        batch: B rows with n response tokens. Ranks that share sequences have the same one.
        temperature: logits are divided by it.
        layout: as `choose_layout` allows.
        entropy: also return the entropy.
        squares: also return the sum of squared probabilities.
        mesh: of several ranks; None: this process is alone. Ranks that share sequences all get the numbers of all n
            tokens, and each passes back the gradient of those it computed (see `numbers_of_all`).
    """
    if batch.tokens.numel() == 0:
        none = torch.zeros(0, dtype=torch.promote_types(model.dtype, torch.float32), device=batch.tokens.device)
        return TokenNumbers(none, none if entropy else None, none if squares else None)
    wanted = _Wanted(temperature, entropy, squares)
    if layout is Layout.PACKED:
        return _numbers_of_packed_sequences(model, batch, wanted, mesh)
    if layout is Layout.SHARED_PROMPTS:
        hidden = _hidden_with_shared_prompts(model, batch, always_two_calls=mesh is not None and mesh.world_size > 1)
    else:
        hidden = _hidden_of_whole_sequences(model, batch)
    return token_log_probs(model, hidden, batch.targets, **wanted._asdict())


class _Wanted(NamedTuple):
    """What `token_log_probs` is asked for."""

    temperature: float
    entropy: bool
    squares: bool


def _hidden_of_whole_sequences(model: CausalModel, batch: MicroBatch) -> torch.Tensor:
    """[n, hidden] states that predict the response tokens, each sequence computed as a whole."""
    lengths = batch.prompt_lengths.index_select(0, batch.group)
    ids, places = batch.whole_sequences(), batch.response_places()
    width = int((lengths + batch.response_lengths).max()) - 1
    hidden = model.hidden(ids[:, :width])
    rows = torch.arange(len(ids), device=lengths.device).unsqueeze(1) * width
    flat = (rows + places - 1).flatten().index_select(0, batch.tokens)
    return hidden.flatten(0, 1).index_select(0, flat)


def _numbers_of_packed_sequences(
    model: CausalModel, batch: MicroBatch, wanted: _Wanted, mesh: Mesh | None
) -> TokenNumbers:
    """The numbers from one packed row, or from this rank's chunk of it and the other ranks'."""
    row = pack(batch, mesh)
    places, targets, group = row.places, batch.targets.index_select(0, row.own), row.packing.group
    if len(places) == 0:
        # Nothing is predicted here, but the chunk's states feed the others' attention, and they wait for its backward.
        places = targets = torch.zeros(1, dtype=torch.int64, device=targets.device)
    hidden = row.hidden(model).index_select(0, places)
    numbers = token_log_probs(model, hidden, targets, **wanted._asdict())
    if group is None:
        return numbers
    own = torch.stack([column for column in numbers if column is not None])[:, : len(row.own)]
    everybodys = iter(numbers_of_all(own, row.own, batch.tokens.numel(), group))
    log_probs, *more = (None if column is None else next(everybodys) for column in numbers)
    assert log_probs is not None
    return TokenNumbers(log_probs, *more)


def _hidden_with_shared_prompts(model: CausalModel, batch: MicroBatch, *, always_two_calls: bool) -> torch.Tensor:
    """[n, hidden] states that predict the response tokens, each prompt computed once.

    The prompt's keys and values, with their gradient, are repeated for its rows. Its last state predicts the first
    response token.

    Args:
        model: within its `computing()`.
        batch: B rows.
        always_two_calls: of the decoder, also where every response is one token, which is predicted but not fed.
    """
    cache = model.new_cache()
    prompt = model.hidden(batch.prompts, past_key_values=cache)
    ends = torch.arange(len(batch.prompts), device=prompt.device) * prompt.shape[1] + batch.prompt_lengths - 1
    first = prompt.flatten(0, 1).index_select(0, ends).index_select(0, batch.group).unsqueeze(1)
    needed = batch.responses.shape[1] - 1
    fed = max(needed, 1) if always_two_calls else needed
    if fed == 0:
        return first.flatten(0, 1).index_select(0, batch.tokens)
    repeat_rows(cache, batch.group)
    lengths = batch.prompt_lengths.index_select(0, batch.group)
    steps = torch.arange(fed, device=lengths.device)
    rest = model.hidden(
        batch.responses[:, :fed],
        past_key_values=cache,
        position_ids=lengths.unsqueeze(1) + steps,
        attention_mask=mask_after_prompts(model, lengths, batch.prompts.shape[1], fed),
    )
    rest = rest if fed == needed else rest[:, :needed]
    return torch.cat([first, rest], dim=1).flatten(0, 1).index_select(0, batch.tokens)


def repeat_rows(cache: object, rows: torch.Tensor) -> None:
    """Make the cache's row i a copy of its former row rows[i], with gradient."""
    for layer in cache.layers:  # type: ignore[attr-defined]
        layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)


def mask_after_prompts(model: CausalModel, prompt_lengths: torch.Tensor, width: int, fed: int) -> torch.Tensor | None:
    """Which keys the `fed` tokens behind right-padded prompts see: their own prompt, and each other causally.

    Args:
        model: decides the mask's form: numbers to add to the scores in eager attention, else one flag per key.
        prompt_lengths: [B].
        width: padded length of the prompts.
        fed: tokens behind them.

    Returns:
        [B or 1, 1, fed, width + fed] 0 or the type's lowest number; or [B, width + fed] bool, None without padding.
    """
    seen = seen_keys(prompt_lengths, width, fed)
    if not model.adds_mask:
        return None if len(seen) < len(prompt_lengths) else seen
    causal = torch.ones(fed, width + fed, dtype=torch.bool, device=seen.device).tril(width)
    return added_to_scores(model, causal & seen.unsqueeze(1))


def seen_keys(prompt_lengths: torch.Tensor, width: int, more: int) -> torch.Tensor:
    """[B, width + more] bool, false at the prompts' padding; one row for all where there is none."""
    if bool((prompt_lengths == width).all()):
        return torch.ones(1, width + more, dtype=torch.bool, device=prompt_lengths.device)
    key = torch.arange(width + more, device=prompt_lengths.device)
    return (key < prompt_lengths.unsqueeze(1)) | (key >= width)


def added_to_scores(model: CausalModel, visible: torch.Tensor) -> torch.Tensor:
    """[B, queries, keys] bool to [B, 1, queries, keys] numbers: 0 where visible, else the type's lowest."""
    dtype = model.autocast or model.dtype
    numbers = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return numbers.masked_fill(~visible, torch.finfo(dtype).min).unsqueeze(1)


def token_log_probs(
    model: CausalModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    entropy: bool,
    squares: bool = False,
) -> TokenNumbers:
    """Log-softmax of logits / temperature at the targets, a chunk of tokens at a time.

    With gradient and several chunks, a chunk's logits are computed again in the backward pass, so that no more than one
    chunk's are held.

    Args:
        model: has the head.
        hidden: [n, hidden].
        targets: [n].
        temperature: logits are divided by it.
        entropy: also return the entropy.
        squares: also return the sum of squared probabilities.
    """
    size = max(CHUNK_LOGITS // model.config.vocab_size, 1)
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    if len(chunks) == 1:
        return TokenNumbers(*_chunk_numbers(model, *chunks[0], temperature, entropy, squares))
    options = (temperature, entropy, squares)
    results = [recompute_in_backward(model.dtype, _chunk_numbers, model, *chunk, *options) for chunk in chunks]
    log_probs, entropies, squared = zip(*results, strict=True)
    return TokenNumbers(
        torch.cat(log_probs), torch.cat(entropies) if entropy else None, torch.cat(squared) if squares else None
    )


def _chunk_numbers(
    model: CausalModel, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool, squares: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Softmax in float32 whatever the model's type; float64 stays float64."""
    logits = model.logits(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_norm = logits.logsumexp(dim=-1)
    log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_norm
    squared = sum_pi_squared(logits) if squares else None
    if not entropy:
        return log_probs, None, squared
    every_log_prob = logits - log_norm.unsqueeze(-1)
    return log_probs, -(every_log_prob.exp() * every_log_prob).sum(dim=-1), squared


def sum_pi_squared(logits: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary of squared probabilities: exp(logsumexp(2 x) - 2 logsumexp(x)) of logits x.

    Args:
        logits: [..., V], divided by the temperature; a chunk of tokens at a time, as a copy is made.

    Returns:
        [...] in [1 / V, 1]; float32, or float64 for float64 logits.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ((2 * logits).logsumexp(dim=-1) - 2 * logits.logsumexp(dim=-1)).exp()
