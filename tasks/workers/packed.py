"""Sequences side by side in one row, without padding between them, and attention that stays within each of them.

The row and the borders of its sequences go through a transformers model as one more keyword, which its layers hand down
to the attention function. The functions that transformers knows as `sdpa` and `flash_attention_2`, and the grouped one,
are registered again under their names with a look at that keyword; without it they do what they did. No mask is made,
and no scores between two sequences are computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tasks.workers.attention import GROUPED
from tasks.workers.ulysses import gather_heads, scatter_heads

if TYPE_CHECKING:
    from tasks.workers.forward import MicroBatch
    from tasks.workers.mesh import Mesh
    from tasks.workers.model import CausalModel

_HARMLESS = {"position_ids", "use_cache", "output_attentions", "is_causal"}


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the sequences of a packed row begin and end.

    Attributes:
        lengths: tokens of each of S sequences, in their order; equal ones side by side are computed in one call.
        borders: [S + 1] int32 place of each sequence's first token, and the row's length.
        group: ranks that hold consecutive, equally long chunks of the row; None: the row is whole.
    """

    lengths: tuple[int, ...]
    borders: torch.Tensor
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, eq=False)
class PackedRow:
    """What one rank feeds of a micro-batch, and what it predicts.

    Attributes:
        ids: [1, T] token ids: the whole row, or this rank's chunk of it.
        position_ids: [1, T] place of each token in its sequence.
        packing: borders in the whole row.
        own: [m] which of the micro-batch's n response tokens are predicted here, ascending.
        places: [m] tokens of `ids` whose states predict them.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    packing: Packing
    own: torch.Tensor
    places: torch.Tensor

    def hidden(self, model: CausalModel) -> torch.Tensor:
        """[T, hidden] states of the row's tokens, after the last norm."""
        # A mask of four dimensions is taken as it is, so that none is made; attention with `packing` reads none.
        no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.ids.device)
        states = model.hidden(
            self.ids, position_ids=self.position_ids, attention_mask=no_mask, packing=self.packing, use_cache=False
        )
        return states.squeeze(0)


def pack(batch: MicroBatch, mesh: Mesh | None = None) -> PackedRow:
    """Lay a micro-batch's sequences side by side, shortest first; those without a response are left out.

    Args:
        batch: at least one response token.
        mesh: its `sp_size` ranks share the row. It is filled up to a multiple of them with a sequence of its own at the
            end, whose states nobody reads, so that no gradient passes through it.
    """
    parts, part, group = (1, 0, None) if mesh is None else (mesh.sp_size, mesh.sp_rank, mesh.sp_group)
    prompt_lengths = batch.prompt_lengths.index_select(0, batch.group)
    fed = (prompt_lengths + batch.response_lengths - 1).masked_fill(batch.response_lengths == 0, 0)
    order = fed.argsort(stable=True)
    sorted_lengths = fed.index_select(0, order)
    lengths = [length for length in sorted_lengths.tolist() if length]
    total = sum(lengths)
    row = order.repeat_interleave(sorted_lengths, output_size=total)
    begins = torch.zeros_like(fed).index_copy(0, order, sorted_lengths.cumsum(0) - sorted_lengths)
    positions = torch.arange(total, device=fed.device) - begins.index_select(0, row)
    ids = batch.whole_sequences()[row, positions]
    if more := -total % parts:
        lengths.append(more)
        ids = torch.cat([ids, ids[:1].expand(more)])
        positions = torch.cat([positions, torch.arange(more, device=fed.device)])
    width = batch.responses.shape[1]
    answered = batch.tokens // width
    places = (begins + prompt_lengths - 1).index_select(0, answered) + batch.tokens % width
    size = len(ids) // parts
    chunk = slice(part * size, (part + 1) * size)
    here = (places >= chunk.start) & (places < chunk.stop)
    own = torch.arange(len(places), device=fed.device) if parts == 1 else torch.nonzero(here).squeeze(1)
    packing = Packing(tuple(lengths), _borders(lengths, fed.device), group if parts > 1 else None)
    return PackedRow(
        ids[chunk].unsqueeze(0),
        positions[chunk].unsqueeze(0),
        packing,
        own,
        places.index_select(0, own) - chunk.start,
    )


def _borders(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)


# ------------------------------------------------------------------------------------------------------------ attention


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a packed row, as transformers calls it.

    Args:
        module: the attention layer; not used.
        query: [1, heads, T, size].
        key: [1, key heads, T, size]; `heads` is a multiple of `key heads`, and neighbours share.
        value: as `key`.
        packing: borders. With a group, T is this rank's chunk, and the group exchanges heads for tokens and back.
        scaling: of the scores; None: size^-1/2.
        dropout: must be 0.
        others: what else the model passes.

    Returns:
        ([1, T, heads, size], None).

    Raises:
        NotImplementedError: the model asks for something that is not done here, such as a window, a soft cap or sinks.
    """
    asked = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if dropout or asked or others.get("is_causal") is False:
        raise NotImplementedError(f"packed attention knows nothing of {', '.join(asked) or 'dropout, nor both ways'}")
    kind, dtype = query.device.type, value.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        # Rotary embeddings leave queries and keys in float32 under autocast.
        dtype = torch.get_autocast_dtype(kind)
    query, key, value = (states.squeeze(0).transpose(0, 1).to(dtype) for states in (query, key, value))
    if packing.group is None:
        return attend_within(query, key, value, packing, scaling).unsqueeze(0), None
    mixed = attend_within(*scatter_heads(query, key, value, packing.group), packing, scaling)
    return gather_heads(mixed, packing.group).unsqueeze(0), None


def attend_within(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scaling: float | None
) -> torch.Tensor:
    """[T, heads, size] of a whole row; key and value [T, key heads, size].

    In half precision on CUDA one call of flash attention for sequences of any lengths; else one call of scaled dot
    product attention for each length that occurs.
    """
    shared = query.shape[1] != key.shape[1]
    if (flash := _flash_for(query)) is not None:
        longest = max(packing.lengths)
        borders = (packing.borders, packing.borders, longest, longest)
        mixed: torch.Tensor = flash(query, key, value, *borders, scale=scaling, window_size=(-1, 0), enable_gqa=shared)
        return mixed
    if shared and query.is_cuda:
        # The one kernel for float32 that holds no scores takes as many key heads as heads.
        copies = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), False
    runs = [(len(list(same)), length) for length, same in groupby(packing.lengths)]
    sizes = [count * length for count, length in runs]
    outputs = []
    for run, *parts in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (states.unflatten(0, run).transpose(1, 2) for states in parts)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _flash_for(query: torch.Tensor) -> Callable[..., Any] | None:
    """torch's flash attention over sequences of any lengths, where it takes such heads."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if not query.is_cuda or not half or size % 8 or size > 256:
        return None
    return _variable_length_attention() if torch.cuda.get_device_capability(query.device) >= (8, 0) else None


@functools.cache
def _variable_length_attention() -> Callable[..., Any] | None:
    """None in a torch that has none, or one without shared key heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys() else None


def _with_packing(usual: Callable[..., Any]) -> Callable[..., Any]:
    """The usual attention function; but packed attention where the model was called with `packing`."""

    @functools.wraps(usual)
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> Any:
        if packing is None:
            return usual(module, query, key, value, attention_mask, *args, **kwargs)
        return packed_attention(module, query, key, value, packing, *args, **kwargs)

    return attention


_EXTENDED = (GROUPED, "sdpa", "flash_attention_2")
for _name in _EXTENDED:
    AttentionInterface.register(_name, _with_packing(AttentionInterface()[_name]))


def can_pack(model: CausalModel) -> bool:
    """Whether the model computes a packed row as it computes its sequences one by one; tried on a few tokens.

    The attention of `attn_implementation=eager` is each model's own and knows nothing of packed rows.
    """
    if not model.full_attention or model.config._attn_implementation not in _EXTENDED:
        return False
    with torch.no_grad(), model.computing():
        try:
            packed, alone = model.in_one_forward(_both_ways, model)
        except (NotImplementedError, TypeError):
            return False
    bound = 0.05 if model.compute_dtype == torch.bfloat16 else 1e-3
    return bool((packed - alone).abs().max() <= bound * alone.abs().max().clamp(min=1.0))


def _both_ways(model: CausalModel) -> tuple[torch.Tensor, torch.Tensor]:
    """[8, hidden] states of two short sequences, packed and one by one."""
    lengths, device = [3, 5], model.device
    ids = ((torch.arange(8, device=device) * 7 + 1) % model.config.vocab_size).unsqueeze(0)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    row = PackedRow(ids, positions, Packing(tuple(lengths), _borders(lengths, device)), nothing, nothing)
    alone = torch.cat([model.hidden(part)[0] for part in ids.split(lengths, dim=1)])
    return row.hidden(model), alone
