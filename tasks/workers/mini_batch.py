"""Loss and gradient of one mini-batch, accumulated over its micro-batches.

    loss = policy loss + kl_loss_coef * KL(policy || reference) - entropy_coeff * entropy

Each term is aggregated over the whole mini-batch: the counts it is divided by are taken before the cut, so that the sum
over micro-batches and ranks is the mini-batch's loss, and its gradient, however it is cut. In a mesh every rank holds
the signals of the whole mini-batch and computes its own rows; the sums are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from storage.ragged import Ragged
from tasks.algorithms.aggregation import aggregate, count_totals, masked_sum, row_weights
from tasks.algorithms.kl import kl_clamped, kl_estimate
from tasks.algorithms.losses import (
    LossBatch,
    aggregation_mode,
    needs_current_log_probs,
    needs_entropy,
    policy_loss,
    prepare_mini_batch,
    probability_ratio,
    why_skipped,
)
from tasks.config import RunConfig
from tasks.stage import NonFiniteError
from tasks.workers.forward import Layout, MicroBatch, TokenNumbers, pad, response_log_probs, to_device
from tasks.workers.mesh import Mesh
from tasks.workers.model import CausalModel
from tasks.workers.sequences import MicroBatching, Sequences, Share, Turn, share_out
from tasks.workers.signals import Signals


@dataclass
class Sums:
    """What adds up over micro-batches to a mini-batch's numbers."""

    loss: float = 0.0
    pg_loss: float = 0.0
    kl_loss: float = 0.0
    entropy: float = 0.0
    kl_clamped: float = 0.0
    ratio_max: float = 0.0
    log_ratio_max: float = 0.0
    token_metrics: dict[str, float] = field(default_factory=dict)

    def over_ranks(self, mesh: Mesh) -> Sums:
        """The same of all data-parallel ranks together; each has the same metrics."""
        names = sorted(self.token_metrics)
        added = [self.loss, self.pg_loss, self.kl_loss, self.entropy, self.kl_clamped]
        summed = mesh.sum(np.asarray(added + [self.token_metrics[name] for name in names])).tolist()
        ratio_max, log_ratio_max = mesh.max(np.asarray([self.ratio_max, self.log_ratio_max])).tolist()
        loss, pg_loss, kl_loss, entropy, kl_clamped = summed[: len(added)]
        metrics = dict(zip(names, summed[len(added) :], strict=True))
        return Sums(loss, pg_loss, kl_loss, entropy, kl_clamped, ratio_max, log_ratio_max, metrics)


@dataclass(frozen=True)
class Accumulated:
    """A mini-batch whose gradient now lies in the weights' `grad`.

    Attributes:
        skipped: why there is no gradient; None: there is.
        sequences: rows.
        tokens: response tokens in the loss.
        micro_batches: forward/backward passes of each rank.
        sums: losses, and sums over loss tokens of the metrics.
        measured: further metrics of the mini-batch by their whole name.
    """

    skipped: str | None
    sequences: int
    tokens: int
    micro_batches: int
    sums: Sums
    measured: Mapping[str, float]

    def row(self) -> dict[str, float | int | str | None]:
        """The columns of an `updates` row that are known before the optimizer step; a skipped one has no losses."""
        counts = {
            "skipped": self.skipped,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
        }
        if self.skipped is not None:
            return {**counts, **dict.fromkeys(_LOSSES), **dict.fromkeys(_TOKEN_METRICS)}
        # A loss that does not clip has no tokens that were clipped.
        means = {name: self.sums.token_metrics.get(name, 0.0) / self.tokens for name in _TOKEN_METRICS}
        return {**counts, **{name: getattr(self.sums, name) for name in _LOSSES}, **means}

    def more(self) -> dict[str, float]:
        """Metrics that only some losses and settings have, by their whole name."""
        own = {name: total / self.tokens for name, total in self.sums.token_metrics.items() if self.tokens}
        others = {f"actor/{name}": value for name, value in own.items() if name not in _TOKEN_METRICS}
        return {**self.measured, **others}


_LOSSES = ("loss", "pg_loss", "ratio_max", "log_ratio_max")
_TOKEN_METRICS = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")


@dataclass(frozen=True, eq=False)
class Piece:
    """One micro-batch of a mini-batch.

    Attributes:
        numbers: [B] numbers of its sequences.
        rows: their tokens on the device.
        batch: what the policy loss needs, less the new log-probs.
        reference: [B, R] reference log-probs; None: there are none.
        policy_weights: [B] weights of the rows in the policy loss.
        weights: [B] weights of the rows in KL and entropy.
    """

    numbers: np.ndarray
    rows: MicroBatch
    batch: LossBatch
    reference: torch.Tensor | None
    policy_weights: torch.Tensor
    weights: torch.Tensor


def forward(model: CausalModel, rows: MicroBatch, mesh: Mesh, **how: Any) -> TokenNumbers:
    """`response_log_probs` as one forward pass of the whole model, sharded or not."""
    return model.in_one_forward(response_log_probs, model, rows, mesh=mesh, **how)


class MiniBatch:
    """One mini-batch of M rows: prepared as a whole, then differentiated micro-batch by micro-batch."""

    def __init__(
        self,
        cfg: RunConfig,
        model: CausalModel,
        sequences: Sequences,
        signals: Signals,
        *,
        layout: Layout,
        mesh: Mesh | None = None,
    ) -> None:
        """Nothing is computed yet.

        Args:
            cfg: the run's configuration.
            model: the policy.
            sequences: N sequences.
            signals: N rows each.
            layout: of a micro-batch in the forward pass.
            mesh: this rank's; None: one process.
        """
        self._cfg, self._model, self._mesh = cfg, model, mesh or Mesh.alone(model.device)
        self._sequences, self._signals = sequences, signals
        self._actor, self._correction = cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction
        self._layout = layout
        rollout = cfg.actor_rollout_ref.rollout
        self._temperature = rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0

    def accumulate(self, rows: np.ndarray, micro: MicroBatching, where: str) -> Accumulated:
        """Add the mini-batch's gradient to the weights' `grad`; collective.

        A rank whose loss is not finite goes on until all have computed their rows; then all raise.

        Args:
            rows: [M] numbers of its sequences.
            micro: how a rank's rows are cut; tokens of one device.
            where: names the optimizer step in messages.

        Raises:
            NonFiniteError: a log-prob or the loss is not finite.
        """
        share = share_out(
            self._sequences,
            rows,
            micro.shared_by(self._mesh.sp_size),
            self._mesh.dp_size,
            balance=self._cfg.trainer.balance_batch,
            layout=self._layout,
        )
        rows, turns = share.order, share.turns(self._mesh.dp_rank)
        batch, reference = self._whole(rows, share, turns)
        tokens = int(batch.mask.sum())
        if (reason := why_skipped(batch)) is not None:
            return Accumulated(reason, len(rows), tokens, 0, Sums(), batch.measured)
        totals = count_totals(batch.mask.sum(dim=-1).cpu().numpy(), self._signals.group[rows])
        scale = float(self._actor.loss_scale_factor or self._cfg.response_length)
        policy_mode, mode = aggregation_mode(self._actor, self._correction), self._actor.loss_agg_mode
        weights = [torch.from_numpy(row_weights(totals, m, scale=scale)) for m in (policy_mode, mode)]
        sums, problems = Sums(), []
        for turn in turns:
            piece = self._piece(turn, batch, reference, [w[turn.places] for w in weights])
            problems.append(self._differentiate(piece, sums, where))
        self._mesh.agree(next((problem for problem in problems if problem is not None), None))
        return Accumulated(None, len(rows), tokens, share.micro_batches, sums.over_ranks(self._mesh), batch.measured)

    def _piece(
        self, turn: Turn, batch: LossBatch, reference: torch.Tensor | None, weights: list[torch.Tensor]
    ) -> Piece:
        """Some rows of the mini-batch, cut to the longest response among them; of an idle turn none is in the loss."""
        rows = to_device(self._sequences, turn.rows, self._model.device)
        chosen, width = turn.places, rows.responses.shape[1]
        tensors = {f.name: getattr(batch, f.name) for f in fields(LossBatch)}
        part: dict[str, Any] = {
            name: value[chosen, :width] if isinstance(value, torch.Tensor) else value for name, value in tensors.items()
        }
        if turn.idle:
            part["mask"], weights = torch.zeros_like(part["mask"]), [torch.zeros_like(w) for w in weights]
        reference = None if reference is None else reference[chosen, :width]
        return Piece(turn.rows, rows, LossBatch(**part), reference, weights[0], weights[1])

    def _whole(self, rows: np.ndarray, share: Share, turns: list[Turn]) -> tuple[LossBatch, torch.Tensor | None]:
        """The mini-batch without its new log-probs, settled as a whole; and its reference log-probs."""
        signals, device = self._signals, self._model.device
        padded = {
            f.name: torch.from_numpy(pad(getattr(signals, f.name), rows, 0)[0]).to(device)
            for f in fields(Signals)
            if isinstance(getattr(signals, f.name), Ragged)
        }
        current, entropy = padded["old_log_probs"], None
        if needs_current_log_probs(self._actor, self._correction) or needs_entropy(self._actor):
            current, entropy = self._current(share, turns, current.shape[1])
        batch = LossBatch(
            log_probs=current,
            old_log_probs=padded["old_log_probs"],
            advantages=padded["advantages"],
            mask=padded["loss_mask"],
            rollout_is_weights=padded.get("rollout_is_weights"),
            rollout_log_probs=padded.get("rollout_log_probs"),
            entropy=entropy,
            token=self._token_numbers(rows, current.shape[1]),
            before_rejection=self._before_rejection(rows, current.shape[1]),
        )
        return prepare_mini_batch(batch, self._actor, self._correction), padded.get("ref_log_probs")

    def _token_numbers(self, rows: np.ndarray, width: int) -> torch.Tensor:
        """[M, width] number of each token in the step's batch; what stands for padding is not read."""
        starts = self._signals.loss_mask.offsets[rows].astype(np.int64)
        return torch.from_numpy(starts[:, None] + np.arange(width)).to(self._model.device)

    def _before_rejection(self, rows: np.ndarray, width: int) -> torch.Tensor | None:
        """[M, width] bool: the loss mask before rollout correction rejected tokens; None: it is not known."""
        if self._signals.in_loss is None:
            return None
        lengths = self._signals.loss_mask.lengths[rows] * self._signals.in_loss[rows]
        return torch.from_numpy(np.arange(width) < lengths[:, None]).to(self._model.device)

    def _current(self, share: Share, turns: list[Turn], width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[M, width] log-probs, and entropies where they are needed, of the policy as it is now, from all ranks."""
        wanted, device = needs_entropy(self._actor), self._model.device
        wide = torch.promote_types(self._model.compute_dtype, torch.float32)
        columns: tuple[list[torch.Tensor], ...] = tuple([torch.empty(0, dtype=wide, device=device)] for _ in "12")
        with torch.no_grad():
            for turn in turns:
                numbers = self._forward(to_device(self._sequences, turn.rows, device), entropy=wanted)
                for column, values in zip(columns, numbers, strict=False):
                    if values is not None and not turn.idle:
                        column.append(values)
        lengths = share.lengths[share.order]
        inside = torch.from_numpy(np.arange(width) < lengths[:, None]).to(device)
        padded = []
        for column in columns[: 1 + wanted]:
            values = self._mesh.gather(torch.cat(column), share.tokens)
            padded.append(torch.zeros(inside.shape, dtype=wide, device=device).masked_scatter(inside, values))
        # Casts made without gradient must not serve the pass with gradient, as autocast of some torch versions has it.
        torch.clear_autocast_cache()
        return padded[0], padded[1] if wanted else None

    def _forward(self, rows: MicroBatch, *, entropy: bool) -> TokenNumbers:
        how = {"layout": self._layout, "temperature": self._temperature, "entropy": entropy}
        return forward(self._model, rows, self._mesh, **how)

    def _differentiate(self, piece: Piece, sums: Sums, where: str) -> NonFiniteError | None:
        """Forward and backward of one micro-batch; adds its share to `sums`, and returns what is wrong with it."""
        actor, mask = self._actor, piece.batch.mask
        log_probs, entropy, _ = self._forward(piece.rows, entropy=actor.entropy_coeff != 0)
        batch = replace(piece.batch, log_probs=piece.rows.padded(log_probs))
        per_token, metrics = policy_loss(actor, self._correction)(batch, actor)
        loss = pg_loss = aggregate(per_token, mask, piece.policy_weights)
        if actor.use_kl_loss and piece.reference is not None:
            ratio = probability_ratio(batch)[0] if actor.use_unbiased_kl else None
            kl = kl_estimate(batch.log_probs, piece.reference, actor.kl_loss_type, ratio)
            kl_loss = aggregate(kl, mask, piece.weights)
            loss = loss + actor.kl_loss_coef * kl_loss
            sums.kl_loss += float(kl_loss.detach())
            clamped = kl_clamped(batch.log_probs, piece.reference, actor.kl_loss_type, ratio)
            sums.kl_clamped += float(masked_sum(clamped, mask))
        if entropy is not None:
            padded = piece.rows.padded(entropy)
            loss = loss - actor.entropy_coeff * aggregate(padded, mask, piece.weights)
            sums.entropy += float(masked_sum(padded.detach(), mask))
        problem = None
        if not torch.isfinite(loss):
            what = f"{where}: the loss is {float(loss.detach())}. {_culprit(piece, batch, per_token)}"
            problem = NonFiniteError(what)
        loss.backward()
        sums.loss += float(loss.detach())
        sums.pg_loss += float(pg_loss.detach())
        for name, values in metrics.items():
            sums.token_metrics[name] = sums.token_metrics.get(name, 0.0) + float(masked_sum(values, mask))
        gap = (batch.log_probs.detach() - batch.old_log_probs)[mask]
        if gap.numel():
            sums.ratio_max = max(sums.ratio_max, float(gap.max().exp()))
            sums.log_ratio_max = max(sums.log_ratio_max, float(gap.abs().max()))
        return problem


def _culprit(piece: Piece, batch: LossBatch, per_token: torch.Tensor) -> str:
    """Which sample and token is at fault, as far as one can see it."""
    for name, values in (("log-prob of the policy", batch.log_probs), ("policy loss", per_token)):
        bad = (~torch.isfinite(values) & batch.mask).nonzero()
        if len(bad):
            row, token = bad[0].tolist()
            value = float(values[row, token].detach())
            return f"The {name} of sample {piece.numbers[row]}, token {token}, is {value}."
    return "The policy loss of every token is finite: the KL, the entropy or a sum overflows."
