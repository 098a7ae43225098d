"""Ulysses sequence parallelism (arXiv 2309.14509): ranks that share one packed row, a chunk of its tokens each.

All layers but attention work on tokens one by one. Attention needs whole sequences but works on heads one by one: so a
rank hands its chunk's other heads to the other ranks, receives its own heads of all tokens, and after attention the
same the other way round. Every rank of the group takes part in each exchange, forward, recomputed and backward, in the
same order, whether it predicts any token or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tasks.workers.model import CausalModel

SP_KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def scatter_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From all heads of this rank's tokens to this rank's heads of all tokens, in one exchange.

    Rank r gets query heads r H/P to (r + 1) H/P and the key heads that they share. Fewer key heads K than ranks are
    copied P/K times first: each copy then serves the query heads of one rank, and their gradients add up.

    Args:
        query: [T/P, H, size] in a group of P ranks, which divides H.
        key: [T/P, K, size]; K divides P, or P divides K.
        value: as `key`.
        group: the ranks, in the order of their chunks.

    Returns:
        [T, H/P, size], [T, max(K/P, 1), size], the same.
    """
    ranks = dist.get_world_size(group)
    if key.shape[1] < ranks:
        copies = ranks // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    parts = [states.unflatten(1, (ranks, -1)) for states in (query, key, value)]
    sent = torch.cat(parts, dim=2).transpose(0, 1)
    received = _exchange(sent, group).flatten(0, 1)
    query, key, value = received.split([part.shape[2] for part in parts], dim=1)
    return query, key, value


def gather_heads(mixed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From this rank's heads of all tokens, [T, H/P, size], to all heads of this rank's tokens, [T/P, H, size]."""
    received = _exchange(mixed.unflatten(0, (dist.get_world_size(group), -1)), group)
    return received.transpose(0, 1).flatten(1, 2)


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    exchanged: torch.Tensor = _Exchange.apply(parts, group)
    return exchanged


class _Exchange(torch.autograd.Function):
    """[P, ...]: part i goes to rank i, and part i of the result came from rank i.

    All ranks together permute parts, and the permutation is its own inverse, so the gradient makes the same exchange.
    """

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, gradients[0], ctx.group), None


def numbers_of_all(own: torch.Tensor, places: torch.Tensor, tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Numbers that the group's ranks computed of some tokens each, put together on every rank.

    Backward, a rank's own numbers get the gradient that this rank computed of them, and nothing is sent. Every rank
    then computes the same loss L of the same n numbers x, so all have the same dL/dx. With one copy w_r of the weights
    on each rank r, dL/dw is the sum over r of dL/dw_r. Each x_i is one node of the joint graph, on the rank that
    predicts token i; there dL/dx_i enters, once, and the exchanges' backward carries it to the other ranks' tokens. So
    rank r ends with dL/dw_r, and the gradients' sum over ranks is the gradient. A reduction backward would count each
    number P times.

    Args:
        own: [k, m] k numbers of each of the m tokens that this rank predicts.
        places: [m] of these tokens among all n.
        tokens: n.
        group: the ranks; each token belongs to one of them.

    Returns:
        [k, n], bit for bit the same on all ranks.
    """
    numbers: torch.Tensor = _NumbersOfAll.apply(own, places, tokens, group)
    return numbers


class _NumbersOfAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, places: torch.Tensor, tokens: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        numbers = own.new_zeros(len(own), tokens).index_copy_(1, places, own)
        dist.all_reduce(numbers, group=group)
        return numbers

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(1, places), None, None, None


def require_sequence_parallel(model: CausalModel, ranks: int, *, packs: bool) -> None:
    """Refuse a model whose sequences so many ranks cannot share.

    Args:
        model: loaded.
        ranks: that share a row; 1: nothing is asked.
        packs: the model computes packed rows rightly, and `model.use_remove_padding` is set.

    Raises:
        ValueError: with the reason and a way out.
    """
    if ranks == 1:
        return
    config, way_out = model.config, f" Set {SP_KEY}=1."
    if not packs:
        raise ValueError(
            f"{SP_KEY}={ranks} cuts packed sequences, and this model ({config.model_type}, attention "
            f"{config._attn_implementation}) is not computed packed: that needs actor_rollout_ref.model."
            "use_remove_padding=true, full attention in every layer, and actor_rollout_ref.model.attn_implementation "
            f"sdpa, flash_attention_2 or not set.{way_out}"
        )
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or (key_heads % ranks and ranks % key_heads):
        raise ValueError(
            f"{SP_KEY}={ranks} must divide the model's {heads} attention heads, and divide its {key_heads} key-value "
            f"heads or be a multiple of them.{way_out}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
        raise ValueError(
            f"{SP_KEY}={ranks}: the model's rope_type={kind} chooses its frequencies by the longest position it sees, "
            f"which differs between the chunks of a row.{way_out}"
        )
