"""Verdicts: what the reward functions say of one response, and when a batch has too few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.config import RunConfig
from tasks.rewards.calls import RewardError
from tasks.rewards.functions import RewardFunction

Status = Literal["ok", "error", "timeout", "unparsed", "not_applicable"]

KINDS_SHOWN = 5
"""Different messages that an error about many samples shows."""


@dataclass(frozen=True)
class RewardRow:
    """One response to score.

    Attributes:
        prompt: messages or a text, as the data has it.
        solution_str: text of the response.
        ground_truth: the reference answer; any JSON value.
        group_id: the prompt it answers; a function of TRL's form is called once per run of rows with the same one.
    """

    sample_id: str
    data_source: str
    prompt: Any
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the reward functions said of one response.

    Attributes:
        score: weighted sum of the parts that are not null; None: no verdict.
        status: `ok`; `unparsed`: scored, but no answer was found in the response; `not_applicable`: every function
            returned None; `error` and `timeout`: a function failed, so that there is no score even if others have one.
        parts: score by function, before its weight; None: none for this sample.
        extracted: the answer that was found in the response.
        extra: what else the function returned; with several functions, by function.
        message: why there is no verdict.
        seconds: time in the functions.
    """

    score: float | None
    status: Status
    parts: dict[str, float | None]
    extracted: str | None
    extra: dict[str, Any]
    message: str | None
    seconds: float


def verdict_of(functions: Sequence[RewardFunction], outcomes: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """One row's verdict from its functions' outcomes (calls.score_sample); the rules stand at Verdict."""
    mine = [outcomes[function.name] for function in functions]
    parts = {function.name: outcome["score"] for function, outcome in zip(functions, mine, strict=True)}
    status = _status([outcome["status"] for outcome in mine])
    weighted = [
        f.weight * outcome["score"] for f, outcome in zip(functions, mine, strict=True) if parts[f.name] is not None
    ]
    messages = [outcome["message"] for outcome in mine if outcome["message"]]
    return Verdict(
        score=sum(weighted) if status in ("ok", "unparsed") else None,
        status=status,
        parts=parts,
        extracted=next((outcome["extracted"] for outcome in mine if outcome["extracted"] is not None), None),
        extra=mine[0]["extra"] if len(mine) == 1 else {name: outcomes[name]["extra"] for name in parts},
        message="; ".join(messages) or None,
        seconds=sum(outcome["seconds"] for outcome in mine),
    )


def check_error_share(verdicts: Sequence[Verdict], cfg: RunConfig) -> None:
    """Refuse a batch of which too many samples have no verdict through error or time limit.

    A batch without a single score is refused whatever the limit and the reason: a step on it would teach nothing.

    Raises:
        RewardError: with the number of samples by message.
    """
    if verdicts and all(verdict.score is None for verdict in verdicts) and not any(v.message for v in verdicts):
        raise RewardError(
            f"none of the {len(verdicts)} samples got a score: every reward function returned None for each of them. "
            "Is there a `return` missing? The rollouts are kept: mend the function and run the same command again."
        )
    failed = [verdict for verdict in verdicts if verdict.status in ("error", "timeout")]
    share = len(failed) / len(verdicts) if verdicts else 0.0
    if not failed or (share <= cfg.reward.max_error_share and share < 1.0):
        return
    kinds = Counter(verdict.message for verdict in failed)
    shown = "; ".join(f"{count} x {message}" for message, count in kinds.most_common(KINDS_SHOWN))
    more = f"; and {len(kinds) - KINDS_SHOWN} other messages" if len(kinds) > KINDS_SHOWN else ""
    raise RewardError(
        f"{len(failed)} of {len(verdicts)} samples have no verdict through error or time limit; "
        f"reward.max_error_share={cfg.reward.max_error_share:g}, and never all of them: {shown}{more}. The rollouts "
        "are kept: mend the reward function or what it calls and run the same command again, or raise "
        "reward.max_error_share."
    )


def _status(statuses: Sequence[str]) -> Status:
    if "timeout" in statuses:
        return "timeout"
    if "error" in statuses:
        return "error"
    if "ok" in statuses:
        return "ok"
    return "unparsed" if "unparsed" in statuses else "not_applicable"
