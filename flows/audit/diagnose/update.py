"""Failure signs of the update and the rewards: KL, ratios, the sampler, learning rate, gradients, errors."""

from __future__ import annotations

from collections import Counter
from statistics import median

import numpy as np

from flows.audit.diagnose.base import Found, History, TooLittle, ends, metric_query, since
from flows.audit.steps import in_words

KL_JUMP = 3.0
"""KL of a step over the largest of all steps before: it grows from 0, but not by leaps."""

KL_SMALL = 0.1
"""Nats a token below which a leap of the KL is one of small numbers."""

KL_LARGE = 1.0
"""Nats a token at which the policy has little in common with its reference."""

RATIO_LARGE = 10.0
"""Ratio of new to old probability within one step: a token ten times as likely after a few optimizer steps."""

MOSTLY_CLIPPED = 0.3
"""Share of clipped tokens: verl's and TRL's runs stay below a few hundredths."""

GAP_GROWN = 3.0
"""Difference of sampler and policy at the end over that of the start."""

GAP_SMALL = 1e-3
"""Mean difference of probabilities below which growth is that of rounding."""

SPIKE = 10.0
"""Gradient norm over the median of the steps before."""

STEPS_BEFORE = 5
"""Steps that such a median is taken of."""

ALL_CLIPPED = 0.95
"""Share of optimizer steps whose gradient is scaled down: the learning rate then means something else."""

FEWEST_UPDATES = 10
"""Optimizer steps that such a share is taken of."""

HALF_SKIPPED = 0.5
"""Share of optimizer steps that were not made, or had no gradient."""

FEW_ERRORS = 0.02
"""Share of samples without a verdict through error or time limit that still changes nothing."""

FEW_UNPARSED = 0.5
"""Share of samples in which no answer was found: half of the scores say nothing about answers."""


def kl(history: History) -> Found | None:
    """A policy that leaps away from its reference, or is far from it, has often left language too."""
    steps, numbers = history.series(lambda one: one.kl)
    if not steps:
        raise TooLittle("there is no reference policy")
    query = "select step, avg(ref_kl_k3) as kl, max(ref_kl_k3) as largest from tokens group by step order by step"
    leaps = [i for i in range(3, len(numbers)) if numbers[i] > KL_JUMP * max(numbers[:i]) and numbers[i] > KL_SMALL]
    if leaps:
        i = leaps[0]
        says = f"the KL to the reference leaps at step {steps[i]}: {numbers[i]:.3g} nats a token, at most "
        says += f"{max(numbers[:i]):.3g} before. Lower the learning rate, or raise actor.kl_loss_coef"
        return Found(says, [steps[one] for one in leaps], {"kl": numbers[i], "before": max(numbers[:i])}, query)
    far = since(steps, [number > KL_LARGE for number in numbers])
    if not far:
        return None
    says = (
        f"since step {far[0]} the KL to the reference is above {KL_LARGE:g} nat a token, {numbers[-1]:.3g} at the end"
    )
    return Found(f"{says}. Read responses of the last step", far, {"kl": numbers[-1]}, query)


def ratios(history: History) -> Found | None:
    """Ratios far from 1 mean that a step moves the policy further than its loss is meant for."""
    rows = [(one.step, row) for one in history.steps for row in one.updates if row["skipped"] is None]
    if not rows:
        raise TooLittle("no optimizer step is kept")
    query = "select step, update_index, ratio_max, pg_clipfrac, ppo_kl from updates order by step, update_index"
    first = [(step, row["log_ratio_max"]) for step, row in rows if row["update_index"] == 0]
    bound = history.cfg.trainer.alarms.first_update_log_ratio_max
    off = [(step, value) for step, value in first if bound is not None and value > bound]
    if off:
        worst = max(value for _, value in off)
        says = (
            f"at the first optimizer step of {in_words([s for s, _ in off])} the log ratio reaches {worst:.3g} though "
        )
        says += "the policy has not moved: the old log-probs are not those of the policy that is trained"
        return Found(says, [step for step, _ in off], {"first_log_ratio_max": worst}, query)
    large = [(step, row["ratio_max"]) for step, row in rows if row["ratio_max"] > RATIO_LARGE]
    if large:
        worst = max(value for _, value in large)
        steps = sorted({step for step, _ in large})
        says = (
            f"the ratio of new to old probability reaches {worst:.3g} (steps {in_words(steps)}). Fewer optimizer steps "
        )
        says += "a step, a lower learning rate, or smaller clip ranges keep it near 1"
        return Found(says, steps, {"ratio_max": worst}, query)
    share = float(np.mean([row["pg_clipfrac"] for _, row in rows]))
    if share >= MOSTLY_CLIPPED:
        says = f"{share:.0%} of the tokens are clipped: most of the batch does not move the policy. Lower the learning "
        return Found(f"{says}rate or make fewer optimizer steps", [s for s, _ in rows], {"clipped_share": share}, query)
    return None


def sampler_gap(history: History) -> Found | None:
    """An engine that drifts from the policy makes every step a bit off-policy."""
    steps, numbers = history.series(lambda one: one.sampler_gap)
    if not steps:
        raise TooLittle("the sampler's log-probs are not there, or of another distribution")
    query = "select step, avg(abs(sampler_gap)) as nats, max(abs(sampler_gap)) as most from tokens group by step "
    query += "order by step"
    bound = history.cfg.trainer.alarms.rollout_probs_diff_mean
    above = [step for step, number in zip(steps, numbers, strict=True) if bound is not None and number > bound]
    if above:
        worst = max(numbers)
        says = f"sampler and policy differ by {worst:.3g} in the mean probability of a sampled token (steps "
        says += (
            f"{in_words(above)}), above trainer.alarms.rollout_probs_diff_mean. Look at dtype and attention of both; "
        )
        return Found(f"{says}algorithm.rollout_correction corrects for it", above, {"gap": worst}, query)
    first, last = ends(numbers, "sampler gap")
    if last < GAP_GROWN * first or last < GAP_SMALL:
        return None
    says = (
        f"the gap between sampler and policy grew from {first:.3g} to {last:.3g} (mean difference of probabilities): "
    )
    return Found(f"{says}the engine falls behind the policy", steps, {"gap_first": first, "gap_last": last}, query)


def learning_rate(history: History) -> Found | None:
    """A learning rate of 0 behind the warm-up trains nothing."""
    rates = [(one.step, row["lr"]) for one in history.steps for row in one.updates]
    if not rates:
        raise TooLittle("no optimizer step is kept")
    still = sorted({step for step, rate in rates if rate == 0})
    # A schedule begins at 0, and may end there.
    if len(still) < 2:
        return None
    says = (
        f"the learning rate is 0 in {len(still)} of {len({step for step, _ in rates})} steps ({in_words(still)}): they "
    )
    says += "train nothing. Look at actor.optim.lr, lr_warmup_steps and the length of the schedule"
    return Found(says, still, {"steps_at_0": float(len(still))}, metric_query("actor/lr", "actor/grad_norm"))


def gradients(history: History) -> Found | None:
    """Gradients that spike, are always clipped, or are not there."""
    rows = [(one.step, row) for one in history.steps for row in one.updates]
    if not rows:
        raise TooLittle("no optimizer step is kept")
    query = "select step, update_index, grad_norm, loss, skipped from updates order by step, update_index"
    idle = [step for step, row in rows if row["skipped"] is not None or row["grad_norm"] == 0]
    if len(idle) >= HALF_SKIPPED * len(rows):
        why = Counter(row["skipped"] or "gradient 0" for _, row in rows if row["skipped"] or row["grad_norm"] == 0)
        says = f"{len(idle)} of {len(rows)} optimizer steps moved nothing ({why.most_common(1)[0][0]})"
        return Found(says, sorted(set(idle)), {"idle_share": len(idle) / len(rows)}, query)
    norms = [(step, row["grad_norm"]) for step, row in rows if row["grad_norm"] is not None]
    spikes = _spikes(norms)
    if spikes:
        worst = max(size for _, size in spikes)
        steps = sorted({step for step, _ in spikes})
        says = (
            f"the gradient norm spikes at step {in_words(steps)}, to {worst:.3g} times the steps before. Look at that "
        )
        says += "step's longest responses and largest advantages, and whether actor.grad_clip holds it"
        return Found(says, steps, {"times_the_median": worst}, query)
    limit = history.cfg.actor_rollout_ref.actor.grad_clip
    clipped = float(np.mean([norm > limit for _, norm in norms])) if norms else 0.0
    if len(norms) >= FEWEST_UPDATES and clipped >= ALL_CLIPPED:
        says = f"{clipped:.0%} of the gradients are above actor.grad_clip={limit:g} (median "
        says += f"{median(norm for _, norm in norms):.3g}): every step has the same size whatever the batch says"
        return Found(says, sorted({step for step, _ in norms}), {"clipped_share": clipped}, query)
    return None


def _spikes(norms: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Step and size, in medians of the ones before, of each norm that stands out."""
    found = []
    for i in range(STEPS_BEFORE, len(norms)):
        usual = median(norm for _, norm in norms[i - STEPS_BEFORE : i])
        if usual > 0 and norms[i][1] > SPIKE * usual:
            found.append((norms[i][0], norms[i][1] / usual))
    return found


def reward_errors(history: History) -> Found | None:
    """Samples without a verdict leave the batch; many of them bend it."""
    total = Counter[str]()
    kinds = Counter[str]()
    for one in history.steps:
        total.update(one.statuses)
        kinds.update(one.errors)
    samples = sum(total.values())
    if not samples:
        raise TooLittle("no step has verdicts")
    bad = total["error"] + total["timeout"]
    steps = [one.step for one in history.steps if one.statuses["error"] + one.statuses["timeout"]]
    query = (
        "select step, status, message, count(*) as n from rewards where status in ('error', 'timeout') group by all "
    )
    if bad > FEW_ERRORS * samples:
        listed = "; ".join(f"{number} x {kind}" for kind, number in kinds.most_common(3))
        says = f"{bad} of {samples} samples have no verdict ({total['error']} errors, {total['timeout']} over "
        says += f"reward.timeout_s) since step {steps[0]}: {listed}"
        return Found(says, steps, {"no_verdict_share": bad / samples}, f"{query}order by n desc")
    lost = total["unparsed"] / samples
    if lost < FEW_UNPARSED:
        return None
    says = (
        f"in {lost:.0%} of the responses no answer was found: the reward function may look for another form than the "
    )
    says += "prompt asks for"
    shown = [one.step for one in history.steps if one.statuses["unparsed"]]
    query = "select step, status, avg(score) as score, any_value(response_text) as example from samples group by all "
    query += "order by all"
    return Found(says, shown, {"unparsed_share": lost}, query)
