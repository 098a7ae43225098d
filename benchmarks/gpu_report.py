"""What benchmarks/gpu_check.py has measured, as JSON and as Markdown tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MEAN_GAP, MAX_GAP = 0.15, 1.0
"""Most difference in nats of a token's log-prob in bfloat16 from that in float32. With every module's output rounded
to bfloat16, the random model of 24 layers differs by 0.06 in the mean and 0.17 at most (48 tokens, on a processor);
another first token of the prompt moves log-probs by 1.2 in the mean and 3.6 at most."""


@dataclass(frozen=True)
class Timing:
    """A stage's rate.

    Attributes:
        mode: types of weights and computation.
        stage: generate, log-prob or update.
        layout: how sequences lay in the forward pass; empty for generate.
        at_once: tokens of a micro-batch at most; for generate, rows sampled at a time.
        tokens: of one run: sampled ones in generate; else prompt and response of all sequences, in every layout.
        seconds: median of the runs.
        runs: how many.
        mfu: share of the device's greatest rate; None: that is not known, or the stage is not bound by it.
        peak_gib: most memory that torch held on the device; None: on the processor.
    """

    mode: str
    stage: str
    layout: str
    at_once: int
    tokens: int
    seconds: float
    runs: int
    mfu: float | None
    peak_gib: float | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Gap:
    """How far log-probs of the same tokens are from each other, nats.

    Attributes:
        mode: types of weights and computation.
        what: which from which.
        tokens: how many.
        mean: mean of absolute differences.
        max: the largest one.
    """

    mode: str
    what: str
    tokens: int
    mean: float
    max: float

    @property
    def fits(self) -> bool:
        """Whether it is within the bounds; a NaN is not."""
        return self.mean <= MEAN_GAP and self.max <= MAX_GAP


@dataclass
class Report:
    """Everything that is known so far.

    Attributes:
        out: folder of the two files.
        about: device, versions, settings.
        timings: rates.
        gaps: differences of log-probs.
        problems: sentences about what failed.
    """

    out: Path
    about: dict[str, Any]
    timings: list[Timing] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_gap(self, gap: Gap) -> None:
        """Note a difference, and as a problem where it is too large."""
        self.gaps.append(gap)
        if not gap.fits:
            self.problems.append(
                f"{gap.mode}, {gap.what}: log-probs differ by {gap.mean:.3g} nats in the mean, {gap.max:.3g} at most; "
                f"the bounds are {MEAN_GAP} and {MAX_GAP}"
            )

    def write(self, seconds: float) -> None:
        """Write both files anew.

        Args:
            seconds: time since the start.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        values = {
            **self.about,
            "seconds": round(seconds, 1),
            "bounds": {"mean": MEAN_GAP, "max": MAX_GAP},
            "timings": [{**asdict(one), "tokens_per_s": one.tokens_per_s} for one in self.timings],
            "gaps": [{**asdict(one), "fits": one.fits} for one in self.gaps],
            "problems": self.problems,
        }
        (self.out / "gpu_check.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        (self.out / "gpu_check.md").write_text(self.as_markdown(), encoding="utf-8")

    def as_markdown(self) -> str:
        """The tables."""
        about = self.about
        lines = [
            f"# GPU check: {about['device']}",
            "",
            f"torch {about['torch']}, transformers {about['transformers']}.",
            "",
        ]
        names = ("types", "stage", "layout", "tokens/s", "s", "runs", "tokens", "at once", "MFU", "peak GiB")
        lines += [_row(names), "|---|---|---" + "|--:" * 7 + "|"]
        for one in self.timings:
            mfu = "-" if one.mfu is None else f"{one.mfu:.1%}"
            held = "-" if one.peak_gib is None else f"{one.peak_gib:.1f}"
            rate, took, count = f"{one.tokens_per_s:,.0f}", f"{one.seconds:.3f}", f"{one.tokens:,}"
            lines.append(_row((one.mode, one.stage, one.layout, rate, took, one.runs, count, one.at_once, mfu, held)))
        lines += ["", _row(("types", "log-probs", "tokens", "mean gap", "max gap", "")), "|---|---|--:|--:|--:|---|"]
        for gap in self.gaps:
            word = "within the bounds" if gap.fits else "**too far**"
            lines.append(_row((gap.mode, gap.what, gap.tokens, f"{gap.mean:.2e}", f"{gap.max:.2e}", word)))
        lines += ["", *(f"- {problem}" for problem in self.problems)]
        return "\n".join(lines).rstrip() + "\n"


def _row(cells: tuple[Any, ...]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
