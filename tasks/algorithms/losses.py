"""Policy losses: from log-probs and advantages to a loss per token.

A loss function sees one micro-batch and returns the loss of every token and, under its metrics' names, a value of every
token whose mean over the mini-batch's loss tokens is the metric (`actor/<name>` in tracking). Sums of both add up over
micro-batches and ranks. What depends on the whole mini-batch is worked out once per optimizer step:

    batch = mini-batch of M rows, log_probs from a forward pass without gradient if needs_current_log_probs(…)
    batch = prepare_mini_batch(batch, …)            # mask, weights, selection; then count_totals(batch.mask.sum(-1), …)
    why_skipped(batch)                              # None, or why there is no optimizer step to make
    policy_loss(…)(micro-batch of those rows, actor)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import torch

from storage.ragged import Ragged
from tasks.algorithms.advantages import EQUAL_WITHIN
from tasks.algorithms.aggregation import sequence_mean
from tasks.algorithms.correction import correct, mean_weight
from tasks.algorithms.correction_rules import loss_mode
from tasks.algorithms.token_masks import highest_entropy, near_the_sampler
from tasks.algorithms.variants import LOSSES, Variant, loss
from tasks.config import ActorConfig, LossAggregation, RolloutCorrectionConfig

MAX_LOG_RATIO = 20.0
"""Log ratios of new to old probability are held within this, so that the ratio stays finite in float32."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The same for the ratio of a whole sequence, where there is no lower bound."""


@dataclass(frozen=True, eq=False)
class LossBatch:
    """B sequences, right-padded to R response tokens.

    Attributes:
        log_probs: [B, R] of the policy that is trained, with gradient.
        old_log_probs: [B, R] of the policy that the ratio compares with.
        advantages: [B, R].
        mask: [B, R] bool, true: the token takes part in the loss. Padding must be finite in all tensors.
        rollout_is_weights: [B, R] importance weights for the gap between sampler and trainer; None: all 1.
        selected: [B, R] bool, the tokens that `prepare_mini_batch` chose; None: the loss chooses none.
        rollout_log_probs: [B, R] of the sampler, for `off_policy_mask_threshold`; None: the old ones stand for them.
        entropy: [B, R] of the policy at each token, nats; read by `prepare_mini_batch` where `needs_entropy` says so.
        high_entropy: [B, R] bool, the tokens that alone have a loss, as it chose them; None: all have.
        measured: `rollout_corr/*` of the whole mini-batch, where it was corrected in bypass mode.
        token: [B, R] int64 number of each token in the step's batch, by which selections break ties, so that they
            depend on no order of rows and no cut; None: tokens count as they stand here. Read by `prepare_mini_batch`.
        before_rejection: [B, R] bool, the mask with the tokens that rollout correction rejected before: weights are
            averaged over it; None: nothing was rejected before.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    rollout_is_weights: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    high_entropy: torch.Tensor | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    token: torch.Tensor | None = None
    before_rejection: torch.Tensor | None = None


TokenMetrics = dict[str, torch.Tensor]
PolicyLoss = Callable[[LossBatch, ActorConfig], tuple[torch.Tensor, TokenMetrics]]


# ------------------------------------------------------------------------------------------------------- one per mode


@loss("vanilla", reads=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
def vanilla(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 10) and
    the dual clip (arXiv 1912.09729): with a negative advantage, the ratio counts as `clip_ratio_c` at most."""
    ratio, log_ratio = probability_ratio(batch)
    free, held = clipped_surrogate(ratio, batch.advantages, actor)
    clipped = torch.maximum(free, held)
    ceiling = -batch.advantages * actor.clip_ratio_c
    negative = batch.advantages < 0
    loss = torch.where(negative, torch.minimum(ceiling, clipped), clipped)
    return weighted(loss, batch), token_metrics(-log_ratio, held > free, negative & (clipped > ceiling))


@loss("gspo", reads=("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
def gspo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """PPO's clip on the geometric mean of a sequence's ratios, whose gradient each token carries (GSPO-token, arXiv
    2507.18071, section 4.3). Meant for narrow clip ranges, such as 3e-4 and 4e-4, and `seq-mean-token-mean`."""
    ratio, log_ratio = sequence_ratio(batch)
    free, held = clipped_surrogate(ratio, batch.advantages, actor)
    return weighted(torch.maximum(free, held), batch), token_metrics(-log_ratio, held > free)


@loss(
    "sapo",
    reads=("policy_loss.tau_pos", "policy_loss.tau_neg", "policy_loss.importance_sampling_level"),
    aggregation="seq-mean-token-mean",
)
def sapo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """A soft gate, 4 / tau * sigmoid(tau * (ratio - 1)), in place of the clip (SAPO, arXiv 2511.20347)."""
    ratio, log_ratio = _ratio_at_level(batch, actor)
    positive, others = (ratio.new_tensor(tau) for tau in (actor.policy_loss.tau_pos, actor.policy_loss.tau_neg))
    tau = torch.where(batch.advantages > 0, positive, others)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return weighted(-gate * batch.advantages, batch), token_metrics(-log_ratio)


@loss("cispo", reads=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "policy_loss.importance_sampling_level"))
def cispo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """REINFORCE weighted by the clipped ratio, which carries no gradient (CISPO, MiniMax-M1, arXiv 2506.13585)."""
    ratio, log_ratio = _ratio_at_level(batch, actor)
    held = ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high)
    loss = -held.detach() * batch.advantages * batch.log_probs
    return weighted(loss, batch), token_metrics(-log_ratio, held != ratio)


@loss("geo_mean", reads=("clip_ratio", "clip_ratio_low", "clip_ratio_high"), aggregation="seq-mean-token-mean")
def geo_mean(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """Geometric mean of a sequence's ratios, each clipped in log space on the side its advantage moves to (GMPO, arXiv
    2507.20673). The sequence has one loss, which each of its tokens holds: aggregation is the mean over sequences."""
    log_ratio = batch.log_probs - batch.old_log_probs
    held = log_ratio.clamp(-actor.clip_low, actor.clip_high)
    sign = batch.advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * held)
    ratio = sequence_mean(bounded, batch.mask).clamp(max=MAX_LOG_RATIO).exp()
    loss = -sequence_mean(batch.advantages, batch.mask) * ratio
    if batch.rollout_is_weights is not None:
        loss = loss * sequence_mean((batch.rollout_is_weights + 1e-10).log(), batch.mask).exp()
    outside = held != log_ratio
    metrics = token_metrics(-log_ratio, outside & (batch.advantages > 0), outside & (batch.advantages < 0))
    return loss.unsqueeze(-1).expand_as(log_ratio), metrics


@loss("gpg")
def gpg(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """The plain policy gradient, -advantage * log-prob, without a ratio (GPG, arXiv 2504.02546)."""
    return weighted(-batch.log_probs * batch.advantages, batch), {}


@loss("reinforce")
def reinforce(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """The policy gradient with importance weights, which carry no gradient, in place of a ratio (Williams 1992)."""
    loss = weighted(-batch.log_probs * batch.advantages, batch)
    return loss, {"ppo_kl": (batch.old_log_probs - batch.log_probs).detach()}


@loss("dro", reads=("policy_loss.dro_beta",))
def dro(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """The policy gradient with a quadratic pull to the old policy, beta / 2 * (log ratio)^2 (DRO, arXiv 2405.19107)."""
    beta = actor.policy_loss.dro_beta
    if beta is None:
        raise ValueError(
            "actor_rollout_ref.actor.policy_loss.loss_mode=dro needs actor.policy_loss.dro_beta, such as 0.1"
        )
    log_ratio = batch.log_probs - batch.old_log_probs
    loss = -batch.advantages * batch.log_probs + 0.5 * beta * log_ratio.square()
    return weighted(loss, batch), {"ppo_kl": -log_ratio.detach()}


@loss("dppo_tv", reads=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
def dppo_tv(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """Drop a token that has moved too far the way its advantage points, by total variation between "this token" and
    "another one" (DPPO, arXiv 2602.04879). The clip ranges are bounds on |p_new - p_old|."""
    gap = batch.log_probs.exp() - batch.old_log_probs.exp()
    return _divergence_masked(batch, actor, gap <= actor.clip_high, gap >= -actor.clip_low)


@loss("dppo_kl", reads=("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
def dppo_kl(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """As dppo_tv, by the binary KL(old || new) (DPPO, arXiv 2602.04879). The clip ranges are bounds in nats."""
    new, old = batch.log_probs.exp(), batch.old_log_probs.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    kl = old * (batch.old_log_probs - batch.log_probs) + (1 - old) * others
    return _divergence_masked(
        batch, actor, (kl <= actor.clip_high) | (new <= old), (kl <= actor.clip_low) | (new >= old)
    )


def _divergence_masked(
    batch: LossBatch, actor: ActorConfig, keep_positive: torch.Tensor, keep_others: torch.Tensor
) -> tuple[torch.Tensor, TokenMetrics]:
    """REINFORCE over the kept tokens, weighted by the ratio up to `clip_ratio_c`, which carries no gradient."""
    ratio, log_ratio = probability_ratio(batch)
    keep = torch.where(batch.advantages > 0, keep_positive, keep_others)
    held = ratio.clamp(max=actor.clip_ratio_c).detach()
    loss = torch.where(keep, -batch.advantages * held * batch.log_probs, torch.zeros_like(ratio))
    return weighted(loss, batch), token_metrics(-log_ratio, ~keep, keep & (ratio > actor.clip_ratio_c))


@loss(
    "clip_cov",
    reads=(
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "policy_loss.clip_cov_ratio",
        "policy_loss.clip_cov_lb",
        "policy_loss.clip_cov_ub",
    ),
    selects="select_clip_cov",
)
def clip_cov(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """PPO's clip, less the selected tokens, whose covariance of advantage and log-prob drives the entropy down
    (Clip-Cov, arXiv 2505.22617). `pg_clipfrac` is the selected share."""
    assert batch.selected is not None, "clip_cov needs prepare_mini_batch"
    ratio, log_ratio = probability_ratio(batch)
    loss = torch.maximum(*clipped_surrogate(ratio, batch.advantages, actor)) * ~batch.selected
    return weighted(loss, batch), {
        "pg_clipfrac": batch.selected.float(),
        "ppo_kl": -log_ratio.detach(),
    }


@loss("kl_cov", reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"), selects="select_kl_cov")
def kl_cov(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """The unclipped surrogate, with |log ratio| as a penalty on the selected tokens (KL-Cov, arXiv 2505.22617).
    `ppo_kl` is the mean absolute log ratio."""
    assert batch.selected is not None, "kl_cov needs prepare_mini_batch"
    log_ratio = (batch.log_probs - batch.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    penalty = actor.policy_loss.ppo_kl_coef * log_ratio.abs() * batch.selected
    return weighted(-batch.advantages * log_ratio.exp() + penalty, batch), {"ppo_kl": log_ratio.detach().abs()}


# ----------------------------------------------------------------------------------- what the whole mini-batch decides


def select_clip_cov(batch: LossBatch, actor: ActorConfig) -> torch.Tensor:
    """[M, R] bool: up to `clip_cov_ratio` of the tokens, at least one, among those whose covariance lies within the
    band and which PPO's clip does not hold already (arXiv 2505.22617, Clip-Cov); a share of 0 selects none.

    The paper draws them at random. Here the key of each token's number stands in for the draw, so that the choice
    depends on no random state, no order of rows and no cut, and identical siblings are drawn independently.
    """
    ratio, _ = probability_ratio(batch)
    free, held = clipped_surrogate(ratio, batch.advantages, actor)
    covariance, cfg = _covariance(batch), actor.policy_loss
    candidates = batch.mask & (held <= free) & (covariance > cfg.clip_cov_lb) & (covariance < cfg.clip_cov_ub)
    wanted = _number_of(cfg.clip_cov_ratio, batch.mask)
    return _largest(candidates.double(), min(wanted, int(candidates.sum())), _keys(batch))


def select_kl_cov(batch: LossBatch, actor: ActorConfig) -> torch.Tensor:
    """[M, R] bool: the `kl_cov_ratio` of the tokens, at least one, with the largest covariance (arXiv 2505.22617); a
    share of 0 selects none, and so does a mini-batch whose covariances are all 0, in which no token stands out."""
    covariance = torch.where(batch.mask, _covariance(batch), 0.0)
    if not covariance.any():
        return torch.zeros_like(batch.mask)
    values = torch.where(batch.mask, covariance, -torch.inf)
    return _largest(values, _number_of(actor.policy_loss.kl_cov_ratio, batch.mask), _keys(batch))


def _number_of(share: float, mask: torch.Tensor) -> int:
    """How many tokens a share of them is: rounded down, at least one; 0 for a share of 0."""
    tokens = int(mask.sum())
    return max(int(tokens * share), 1) if share > 0 and tokens else 0


def _covariance(batch: LossBatch) -> torch.Tensor:
    """[M, R] float64 (advantage - mean) * (log-prob - mean), means over all tokens of the mini-batch.

    Log-probs are taken to the nearest `NATS_APART`, so that tokens of one probability, such as all those of which the
    policy is certain, have one covariance however their rounding came out.
    """
    log_probs = (batch.log_probs.double() / NATS_APART).round() * NATS_APART
    return _centred(batch.advantages, batch.mask) * _centred(log_probs, batch.mask)


def _centred(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[M, R] float64 values less their mean over the mask; exactly 0 where that is rounding, which differs by order."""
    wide = values.double()
    inside = wide[mask]
    if not inside.numel():
        return torch.zeros_like(wide)
    centred = wide - inside.mean()
    return torch.where(centred.abs() <= EQUAL_WITHIN * inside.abs().max(), 0.0, centred)


NATS_APART = 2.0**-12
"""Log-probs that differ by less may differ by rounding alone, which the cut into micro-batches changes."""
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, odd, as int64: multiples of it, modulo 2^64, differ for all integers and lie evenly."""


def _keys(batch: LossBatch) -> torch.Tensor:
    """[M, R] int64 key of each token, different for all, in which neighbours are far apart."""
    places = torch.arange(batch.mask.numel(), device=batch.mask.device).view_as(batch.mask)
    return (places if batch.token is None else batch.token) * _SPREAD


def _largest(values: torch.Tensor, number: int, keys: torch.Tensor) -> torch.Tensor:
    """True at the `number` largest values; of equals, at those with the largest keys."""
    chosen = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    order = keys.flatten().argsort(descending=True)
    order = order[values.flatten()[order].sort(descending=True, stable=True).indices]
    chosen[order[:number]] = True
    return chosen.view_as(values)


def policy_loss(actor: ActorConfig, correction: RolloutCorrectionConfig) -> PolicyLoss:
    """The loss in force: `loss_mode`, or in bypass mode the one of `rollout_correction.loss_type`.

    With `policy_loss.off_policy_mask_threshold` or `top_entropy_quantile`, tokens that they leave out have loss 0.

    Raises:
        ValueError: no such loss.
    """
    function: PolicyLoss = _variant(actor, correction).load()
    masks = needs_entropy(actor) or actor.policy_loss.off_policy_mask_threshold is not None
    return partial(_masked, function) if masks else function


def _masked(function: PolicyLoss, batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """A loss without the tokens that two options leave out: `off_policy_masked` is the share of the first."""
    loss, metrics = function(batch, actor)
    threshold = actor.policy_loss.off_policy_mask_threshold
    if threshold is not None:
        sampler = batch.old_log_probs if batch.rollout_log_probs is None else batch.rollout_log_probs
        near = near_the_sampler(batch.log_probs, sampler, batch.advantages, batch.mask, threshold)
        loss, metrics = torch.where(near, loss, 0.0), {**metrics, "off_policy_masked": (~near).float()}
    if needs_entropy(actor):
        assert batch.high_entropy is not None, "top_entropy_quantile needs prepare_mini_batch"
        loss = torch.where(batch.high_entropy, loss, 0.0)
    return loss, metrics


def _variant(actor: ActorConfig, correction: RolloutCorrectionConfig) -> Variant:
    mode = loss_mode(actor, correction)
    if mode not in LOSSES:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={mode!r} is unknown; there are {', '.join(LOSSES)}"
        )
    return LOSSES[mode]


def aggregation_mode(actor: ActorConfig, correction: RolloutCorrectionConfig) -> LossAggregation:
    """How the policy loss in force is aggregated: by its own rule, else by `actor.loss_agg_mode`."""
    own = _variant(actor, correction).aggregation
    return actor.loss_agg_mode if own is None else cast(LossAggregation, own)


def needs_current_log_probs(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether `prepare_mini_batch` needs the log-probs of the policy as it is at this optimizer step, which costs a
    forward pass over the mini-batch; otherwise it may get the old ones."""
    corrected = correction.rollout_is is not None or correction.rollout_rs is not None
    return _variant(actor, correction).selects is not None or (correction.bypass_mode and corrected)


def needs_entropy(actor: ActorConfig) -> bool:
    """Whether `prepare_mini_batch` needs the entropy of the policy as it is at this optimizer step, at each token of
    the mini-batch, which costs the same forward pass."""
    return actor.policy_loss.top_entropy_quantile < 1


def prepare_mini_batch(batch: LossBatch, actor: ActorConfig, correction: RolloutCorrectionConfig) -> LossBatch:
    """Settle what depends on the whole mini-batch; its rows are then cut into micro-batches.

    In bypass mode the old log-probs are the sampler's: weights and rejection come from the current policy here, and the
    weights reach the loss with `loss_type=reinforce` alone, for PPO's ratio holds them already. Where
    `rollout_is_batch_normalize` asks for it, weights are divided by their mean over the tokens before rejection, those
    that are rejected here or were before (`LossBatch.before_rejection`) included, as in verl.

    Args:
        batch: all M rows of the global mini-batch; see `needs_current_log_probs` and `needs_entropy`.
        actor: `actor_rollout_ref.actor`.
        correction: `algorithm.rollout_correction`.

    Returns:
        The batch with its final mask, weights and selections.
    """
    with torch.no_grad():
        batch = _corrected(batch, actor, correction)
        if needs_entropy(actor):
            assert batch.entropy is not None, "top_entropy_quantile needs the entropy of the mini-batch's tokens"
            kept = highest_entropy(batch.entropy, batch.mask, actor.policy_loss.top_entropy_quantile)
            batch = replace(batch, high_entropy=kept)
        select = _variant(actor, correction).load_selection()
        selected = None if select is None else select(batch, actor)
        return replace(batch, entropy=None, token=None, before_rejection=None, selected=selected)


def _corrected(batch: LossBatch, actor: ActorConfig, correction: RolloutCorrectionConfig) -> LossBatch:
    """The batch with its final mask and weights."""
    weights, mask = batch.rollout_is_weights, batch.mask
    if correction.bypass_mode and needs_current_log_probs(actor, correction) and bool(mask.any()):
        weights, mask, measured = _correct_in_bypass(batch, correction)
        batch = replace(batch, measured=measured)
    if weights is not None and correction.rollout_is is not None and correction.rollout_is_batch_normalize:
        # `batch.mask` is the one that came in: in bypass mode the rejected tokens are still in it.
        counted = batch.mask if batch.before_rejection is None else batch.before_rejection
        if counted.any():
            weights = weights / mean_weight(_flat(weights), _ragged(counted), correction.rollout_is)
    if correction.bypass_mode and correction.loss_type == "ppo_clip":
        weights = None
    if weights is not None and correction.rollout_is == "sequence" and _variant(actor, correction).multiplies_weights:
        # A sequence's weight is that of each of its tokens: their product must be the weight, not a power of it.
        weights = weights.pow(1 / mask.sum(dim=-1, keepdim=True).clamp(min=1))
    return replace(batch, mask=mask, rollout_is_weights=weights)


def _correct_in_bypass(
    batch: LossBatch, correction: RolloutCorrectionConfig
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    mask = _ragged(batch.mask)
    sampled, current = (Ragged(_flat(rows), mask.offsets) for rows in (batch.old_log_probs, batch.log_probs))
    result = correct(sampled, current, mask, correction)
    kept = torch.from_numpy(result.mask.values).view_as(batch.mask).to(batch.mask.device)
    if result.weights is None:
        return None, kept, result.metrics
    return torch.from_numpy(result.weights.values).view_as(batch.mask).to(batch.log_probs), kept, result.metrics


def _flat(rows: torch.Tensor) -> np.ndarray:
    return rows.detach().double().cpu().numpy().reshape(-1)


def _ragged(mask: torch.Tensor) -> Ragged:
    return Ragged.from_lengths(mask.cpu().numpy().reshape(-1), np.full(mask.shape[0], mask.shape[1]))


def why_skipped(batch: LossBatch) -> str | None:
    """Why a prepared mini-batch has nothing to learn from, so that no optimizer step is made; None: it has."""
    if not batch.mask.any():
        return "no token is in the loss"
    if batch.rollout_is_weights is not None and not batch.rollout_is_weights[batch.mask].any():
        return "all importance weights are 0"
    return None


# ---------------------------------------------------------------------------------------------------------- the pieces


def probability_ratio(batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, R] (ratio of new to old probability of each token, its logarithm), the latter within +-20."""
    log_ratio = (batch.log_probs - batch.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp(), log_ratio


def sequence_ratio(batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, R] (geometric mean of the ratios of each token's sequence, with the gradient of the token's own; the log
    ratio of each token). The logarithm of the mean is at most 10."""
    log_ratio = batch.log_probs - batch.old_log_probs
    sequence = sequence_mean(log_ratio, batch.mask).unsqueeze(-1)
    held = (batch.log_probs - batch.log_probs.detach() + sequence.detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return held.exp(), log_ratio


def _ratio_at_level(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    at_sequence = actor.policy_loss.importance_sampling_level == "sequence"
    return sequence_ratio(batch) if at_sequence else probability_ratio(batch)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, actor: ActorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, R] (PPO's loss with the ratio as it is, with the clipped one); the larger of the two is the loss."""
    return -advantages * ratio, -advantages * ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high)


def weighted(loss: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    """[B, R] loss times the rollout-correction weights, where there are any."""
    return loss if batch.rollout_is_weights is None else loss * batch.rollout_is_weights


def token_metrics(
    kl: torch.Tensor, clipped: torch.Tensor | None = None, clipped_lower: torch.Tensor | None = None
) -> TokenMetrics:
    """verl's three metrics as [B, R] values without gradient; None: no token is clipped."""
    none = torch.zeros_like(kl, dtype=torch.bool)
    return {
        "pg_clipfrac": (none if clipped is None else clipped).float(),
        "pg_clipfrac_lower": (none if clipped_lower is None else clipped_lower).float(),
        "ppo_kl": kl.detach(),
    }
