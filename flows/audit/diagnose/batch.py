"""Failure signs of the batch: no signal, lost diversity, long and cut responses, rewards for the wrong thing."""

from __future__ import annotations

import numpy as np

from flows.audit.diagnose.base import WINDOW, Found, History, TooLittle, ends, metric_query, since

HALF_SILENT = 0.5
"""Share of groups without a signal: from here on most of what is generated moves nothing."""

ENTROPY_LEFT = 0.1
"""Entropy of the end over that of the start: a policy that has lost nine tenths of it samples one answer, and what it
does not sample it cannot learn. Converging on right answers alone takes less than that."""

ENTROPY_GROWN = 3.0
"""Entropy of the end over that of the start, at which responses dissolve into noise."""

NOISY = 1.0
"""Nats a token below which grown entropy is still that of a sure policy."""

LENGTH_GROWN = 2.0
"""Response length of the end over that of the start."""

MANY_TRUNCATED = 0.2
"""Share of responses cut by their limit: their score is that of a half-said answer."""

ALIKE = 0.5
"""Share of groups that hold one response n times and are not all right: there is nothing to compare."""

DEAD = 0.3
"""Share of prompts seen at least twice that never carried a signal."""

FEWEST_PROMPTS = 10
"""Prompts seen at least twice that such a share is taken of."""

SCORE_ROSE = 0.05
"""Rise of the mean score that counts as one."""

TIED_TO_LENGTH = 0.5
"""Correlation of length and score within groups, at which length explains a quarter of the score."""

LENGTH_MOVED = 0.1
"""Change of the mean length, as a share, that goes along with it."""

FORM = ("format", "length", "repetition", "tag", "style", "overlong", "language")
"""Words in the names of reward functions that look at the form of a response."""

SHARE_OF_FORM = 0.9
"""Share of a rise that comes from such functions, at which the answers themselves have not got better."""

GAIN_LOST, PEAK_LOST = 0.5, 0.25
"""Shares of what a run has gained, and of its best score, that are gone when the reward has collapsed: a run that
settles swings by less."""


def no_signal(history: History) -> Found | None:
    """Groups whose responses are all scored alike teach nothing."""
    steps, shares = history.series(lambda one: one.no_signal)
    if not steps:
        raise TooLittle("no step has scores")
    shown = since(steps, [share >= HALF_SILENT for share in shares])
    if not shown:
        return None
    known = {one.step: one for one in history.steps}
    fail, right = (
        float(np.mean([getattr(known[step], name) or 0.0 for step in shown])) for name in ("all_fail", "all_pass")
    )
    mean = float(np.mean(shares[-len(shown) :]))
    return Found(
        f"since step {shown[0]}, {mean:.0%} of the groups carry no signal ({fail:.0%} all wrong, {right:.0%} all "
        "right): their samples are paid for and teach nothing. Use harder or easier prompts, more samples a prompt "
        "(rollout.n), or algorithm.filter_groups",
        shown,
        {"no_signal_share": mean, "all_fail_share": fail, "all_pass_share": right},
        "select step, avg((no_signal is not null)::int) as silent, avg(score) as score from samples group by step "
        "order by step",
    )


def entropy(history: History) -> Found | None:
    """A policy that has become sure of everything, or of nothing, no longer explores."""
    steps, numbers = history.series(lambda one: one.entropy)
    first, last = ends(numbers, "entropy")
    about = {"entropy_first": first, "entropy_last": last}
    query = metric_query("actor/entropy", "rollout/duplicate_share")
    if first > 0 and last <= ENTROPY_LEFT * first:
        shown = since(steps, [number <= ENTROPY_LEFT * first for number in numbers]) or [steps[-1]]
        says = (
            f"entropy collapsed: {first:.3g} nats a token at the start, {last:.3g} since step {shown[0]}. The policy "
        )
        says += "gives one answer whatever it is worth. Lower the learning rate, raise the temperature or "
        says += "actor.clip_ratio_high, or add actor.entropy_coeff or KL to the reference"
        return Found(says, shown, about, query)
    if last >= max(ENTROPY_GROWN * first, NOISY):
        shown = since(steps, [number >= max(ENTROPY_GROWN * first, NOISY) for number in numbers]) or [steps[-1]]
        says = f"entropy exploded: {first:.3g} nats a token at the start, {last:.3g} since step {shown[0]}. Responses "
        says += "dissolve into noise. Lower the learning rate or actor.entropy_coeff, or look at the sampler's gap"
        return Found(says, shown, about, query)
    return None


def length(history: History) -> Found | None:
    """Responses that grow without end cost time and end at their limit."""
    steps, numbers = history.series(lambda one: one.length)
    first, last = ends(numbers, "response length")
    if last < LENGTH_GROWN * first:
        return None
    shown = since(steps, [number >= LENGTH_GROWN * first for number in numbers]) or [steps[-1]]
    score = history.series(lambda one: one.score)[1]
    gain = score[-1] - score[0] if len(score) > 1 else 0.0
    return Found(
        f"responses have grown from {first:.0f} to {last:.0f} tokens since step {shown[0]}, the mean score by "
        f"{gain:+.3g}. Look whether the end of long ones says anything new; reward_model.overlong_buffer takes from "
        "them, and loss_agg_mode decides whether long wrong answers are cheap",
        shown,
        {"length_first": first, "length_last": last, "score_gain": gain},
        "select step, avg(len(response_ids)) as tokens, avg(score) as score from samples group by step order by step",
    )


def truncation(history: History) -> Found | None:
    """A response cut by its limit is scored for half an answer."""
    steps, shares = history.series(lambda one: one.truncated)
    shown = since(steps, [share >= MANY_TRUNCATED for share in shares])
    if not shown:
        return None
    share = float(np.mean(shares[-len(shown) :]))
    return Found(
        f"since step {shown[0]}, {share:.0%} of the responses are cut by data.max_response_length. Raise it, shape the "
        "reward (reward_model.overlong_buffer), or leave them out of the loss (actor.mask_truncated_responses)",
        shown,
        {"truncated_share": share},
        "select step, finish_reason, count(*) as n, avg(score) as score from samples group by all order by all",
    )


def duplicates(history: History) -> Found | None:
    """Groups of one wrong response n times have nothing to compare."""
    steps, shares = history.series(lambda one: one.same)
    shown = since(steps, [share >= ALIKE for share in shares])
    if not shown:
        return None
    share = float(np.mean(shares[-len(shown) :]))
    return Found(
        f"since step {shown[0]}, {share:.0%} of the groups hold the same wrong response rollout.n times. The policy "
        "has collapsed, or the engine ignores its seeds; look at entropy and at rollout.temperature",
        shown,
        {"identical_group_share": share},
        "select step, group_id, count(distinct response_text) as different, avg(score) as score from samples group by "
        "all having different = 1 order by all",
    )


def dead_prompts(history: History) -> Found | None:
    """Prompts that are never, or always, solved over several visits teach nothing at any visit."""
    often = {name: seen for name, seen in history.prompts.items() if len(seen) > 1}
    if len(often) < FEWEST_PROMPTS:
        raise TooLittle(f"{len(often)} prompts were seen more than once, a share needs {FEWEST_PROMPTS}")
    dead = [seen for seen in often.values() if not any(one.signal for one in seen)]
    if len(dead) < DEAD * len(often):
        return None
    always = sum(all(one.passed for one in seen) for seen in dead)
    return Found(
        f"{len(dead)} of {len(often)} prompts that were seen more than once never carried a signal: {always} always "
        f"solved, {len(dead) - always} never. Take them out of the data, or sort by difficulty",
        [one.step for one in history.steps],
        {"dead": float(len(dead)), "seen_twice": float(len(often)), "always_solved": float(always)},
        "select prompt_index, count(distinct step) as visits, min(score) as lowest, max(score) as highest from samples "
        "group by prompt_index having visits > 1 and lowest = highest order by highest, prompt_index",
    )


def reward_by_length(history: History) -> Found | None:
    """A reward that rises along with the length alone pays for length."""
    first, last = ends(history.series(lambda one: one.score)[1], "score")
    steps, ties = history.series(lambda one: one.length_and_score)
    tie = ends(ties, "correlation of length and score")[1]
    shorter, longer = ends(history.series(lambda one: one.length)[1], "response length")
    moved = (longer - shorter) / max(shorter, 1e-9)
    if last - first < SCORE_ROSE or abs(tie) < TIED_TO_LENGTH or moved * np.sign(tie) < LENGTH_MOVED:
        return None
    return Found(
        f"the mean score rose from {first:.3g} to {last:.3g} while responses went from {shorter:.0f} to {longer:.0f} "
        f"tokens, and within groups the score follows the length (correlation {tie:+.2f}). The reward may be paying "
        "for length: read the best-scored responses of the last step",
        steps,
        {"score_first": first, "score_last": last, "correlation": tie, "length_first": shorter, "length_last": longer},
        "select step, corr(len(response_ids), score) as correlation from samples group by step order by step",
    )


def reward_by_form(history: History) -> Found | None:
    """A reward that rises through its parts for form alone does not mean better answers."""
    names = sorted({name for one in history.steps for name in one.parts})
    if len(names) < 2:
        raise TooLittle("the reward has one part")
    weights = _weights(history)
    rises: dict[str, float] = {}
    for name in names:
        first, last = ends(history.series(lambda one, name=name: one.parts.get(name))[1], name)  # type: ignore[misc]
        rises[name] = weights.get(name, 1.0) * (last - first)
    total = sum(rises.values())
    form = sum(rise for name, rise in rises.items() if any(word in name.lower() for word in FORM))
    if total < SCORE_ROSE or form < SHARE_OF_FORM * total:
        return None
    listed = ", ".join(f"{name} {rise:+.3g}" for name, rise in rises.items())
    return Found(
        f"the score rose by {total:.3g}, and {min(form / total, 1):.0%} of it is form ({listed}). Answers have not got "
        "better: lower the weight of the parts for form, or give them only where the answer is right",
        [one.step for one in history.steps],
        {"rise": total, "rise_of_form": form, **{f"rise of {name}": rise for name, rise in rises.items()}},
        metric_query(*(f"reward/{name}/mean" for name in names)),
    )


def _weights(history: History) -> dict[str, float]:
    """Weight of each reward function in the score; a custom one has weight 1."""
    return {entry.name.rpartition(":")[2]: entry.weight for entry in history.cfg.reward.functions}


def reward_collapse(history: History) -> Found | None:
    """A score that had been reached and is lost again."""
    steps, scores = history.series(lambda one: one.score)
    _, last = ends(scores, "score")
    width = min(WINDOW, len(scores) // 2)
    smooth = [float(np.median(scores[i : i + width])) for i in range(len(scores) - width + 1)]
    best = int(np.argmax(smooth))
    peak, gain = smooth[best], smooth[best] - min(smooth[: best + 1])
    least = max(SCORE_ROSE, GAIN_LOST * gain, PEAK_LOST * abs(peak))
    if peak - last < least:
        return None
    behind = zip(steps[best:], scores[best:], strict=True)
    shown = [step for step, score in behind if score <= peak - least] or [steps[-1]]
    over = f"steps {steps[best]} to {steps[best + width - 1]}, the median of which is {peak:.3g}"
    return Found(
        f"the mean score was best over {over}; the median of the last {width} is {last:.3g}. It fell first at step "
        f"{shown[0]}, whose policy the update of the step before has made: look at that one's learning rate, ratios "
        "and gradients",
        shown,
        {"best": peak, "last": last, "gain": gain},
        metric_query("critic/score/mean", "actor/grad_norm", "actor/entropy", "response_length/mean"),
    )
