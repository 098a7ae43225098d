"""`grpoflow show … --tokens`: response tokens in the terminal, coloured by one of their values.

Without colour (NO_COLOR, a pipe) each value stands beside its token. Never colour alone: tokens below the middle are
underlined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.audit.pieces import Pieces, pieces_of
from flows.audit.sources import open_lineage
from flows.audit.token_columns import TokenColumns, kl_k3
from storage import StorageError
from storage.ledger import StepView

_COLUMNS = (
    "sample_id",
    "group_id",
    "response_ids",
    "score",
    "finish_reason",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "entropy",
    "advantages",
    "loss_mask",
)
_CUT = 200
"""Tokens of each sample that are shown when a whole step is."""


@dataclass(frozen=True)
class By:
    """A value to colour tokens by.

    Attributes:
        about: what it is, in words.
        kind: `signed` around 0, `amount` from 0 up, `low` from 0 down, `flag`.
        stages: the artifacts it is computed from.
    """

    about: str
    kind: str
    stages: str


BY = {
    "advantage": By("what the loss multiplies the token's ratio by", "signed", "advantages"),
    "gap": By("rollout minus old log-prob, nats", "signed", "rollout_log_probs and old_log_probs"),
    "entropy": By("of the policy at this token, nats", "amount", "entropy in old_log_probs"),
    "kl": By("k3 estimate of the KL to the reference, nats", "amount", "old_log_probs and ref_log_probs"),
    "log_prob": By("of the policy before the step, nats", "low", "old_log_probs"),
    "mask": By("whether the token takes part in the loss", "flag", "loss_mask in advantages"),
}


@dataclass(frozen=True)
class Sample:
    """One sample's tokens and their values, NaN where a token has none."""

    sample_id: str
    score: float | None
    finish_reason: str
    ids: np.ndarray
    values: np.ndarray


def show_tokens(
    path: Path,
    step: int | None,
    sample: str | None,
    by: str,
    *,
    top: int,
    limit: int,
    as_json: bool,
    console: Console,
    tokenizer: Path | None = None,
) -> None:
    """Print a sample's tokens, or those of the first samples of a step, and the tokens whose value is largest.

    Args:
        path: the run's folder, or `RUN#LINEAGE`.
        step: the step; None: the sample's, or the last one that has rollouts.
        sample: the sample's id; None: the step's first ones.
        by: a name in `BY`.
        top: how many of the largest values are listed.
        limit: how many samples are shown.
        as_json: print values as JSON instead.
        console: where to print.
        tokenizer: a folder with a tokenizer.json instead of the run's own.

    Raises:
        ValueError: no such value.
        StorageError: the step or the sample is not there, or the step has no such value.
    """
    if by not in BY:
        raise ValueError(f"--by {by}: there are {', '.join(BY)}")
    run = open_lineage(path)
    view = run.step(_step(run.steps(), sample) if step is None else step)
    samples = _samples(view, sample, by)
    pieces = pieces_of(run, sorted({int(number) for one in samples for number in np.unique(one.ids)}), tokenizer)
    if as_json:
        console.out(json.dumps([_as_json(one, by, pieces) for one in samples[:limit]]), highlight=False)
        return
    if pieces.why_none:
        console.print(Text(f"token ids instead of texts: {pieces.why_none}", style="yellow"), soft_wrap=True)
    scale = _scale(samples, by)
    console.print(_legend(view.index, by, scale, console))
    for one in samples[:limit]:
        console.print()
        console.print(_head(one))
        console.print(_tokens(one, by, scale, pieces, console, None if sample else _CUT))
    if sample is None and len(samples) > limit:
        console.print(f"\n… {len(samples) - limit} more samples; --limit shows more, --sample shows one to its end")
    if BY[by].kind != "flag":
        console.print()
        console.print(_largest(samples, by, pieces, top))


def _step(steps: Sequence[int], sample: str | None) -> int:
    """Number of the step that a sample's id names, else of the newest one."""
    found = re.match(r"^(\d{6})-", sample or "")
    if found:
        return int(found[1])
    return max(steps, default=0)


def _samples(view: StepView, sample: str | None, by: str) -> list[Sample]:
    try:
        table = view.samples(list(_COLUMNS))
    except FileNotFoundError as error:
        raise StorageError(str(error)) from error
    if sample is not None:
        table = table.filter(pc.equal(table["sample_id"], pa.scalar(sample, pa.large_string())))
        if not table.num_rows:
            raise StorageError(f"step {view.index} has no sample {sample!r}; `show --stage rollouts` lists them")
    there = {name: table[name] for name in table.column_names if table[name].null_count < table.num_rows}
    tokens = TokenColumns.of(there)
    values = _values(tokens, by)
    if values is None:
        raise StorageError(f"step {view.index} has no {by}: it needs {BY[by].stages}, which is missing")
    ends = np.cumsum(tokens.lengths)
    spans = [slice(end - length, end) for end, length in zip(ends, tokens.lengths, strict=True)]
    rows = table.select(["sample_id", "score", "finish_reason"]).to_pylist()
    return [
        Sample(row["sample_id"], row["score"], row["finish_reason"], tokens.ids[span], values[span])
        for row, span in zip(rows, spans, strict=True)
    ]


def _values(tokens: TokenColumns, by: str) -> np.ndarray | None:
    if by == "mask":
        return None if tokens.mask is None else tokens.mask.astype(np.float64)
    if by == "kl":
        return kl_k3(tokens.floats["ref_gap"]) if "ref_gap" in tokens.floats else None
    return tokens.floats.get(by)


# ------------------------------------------------------------------------------------------------------------- printing


def visible(text: str | bytes | None, number: int) -> str:
    """A token's text in which nothing is hidden and nothing steers the terminal: white space and control as signs."""
    if isinstance(text, bytes):
        return f"⟨{text.hex(' ')}⟩"
    if not text:
        return f"⟨{number}⟩"
    return "".join(map(_visible_letter, text))


_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\x7f": "␡"}


def _visible_letter(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    if letter < " ":
        return chr(0x2400 + ord(letter))
    return letter if letter.isprintable() else f"⟨U+{ord(letter):04X}⟩"


def _scale(samples: Sequence[Sample], by: str) -> float:
    """What full colour stands for: the 99.5th percentile of the sizes, so that one outlier does not hide the rest."""
    values = np.abs(np.concatenate([one.values for one in samples]))
    values = values[np.isfinite(values)]
    return float(np.quantile(values, 0.995)) if len(values) else 0.0


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _legend(step: int, by: str, scale: float, console: Console) -> Text:
    what = BY[by]
    text = Text(f"step {step}, tokens by {by}", style="bold").append(f": {what.about}\n", style="not bold")
    if what.kind == "flag":
        return text.append(
            "tokens that are left out of the loss are struck through" if _has_colour(console) else "0: out"
        )
    if not scale:
        return text.append("0 at every token")
    if not _has_colour(console):
        return text.append("the value stands behind each token")
    shares = (-1.0, -0.5, 0.0, 0.5, 1.0) if what.kind == "signed" else (0.0, 0.25, 0.5, 0.75, 1.0)
    for share in shares:
        value = -share * scale if what.kind == "low" else share * scale
        text.append(f" {value:+.3g} " if what.kind == "signed" else f" {value:.3g} ", style=_style(by, value, scale))
    return text.append("  underlined: below 0") if what.kind == "signed" else text


def _head(one: Sample) -> Text:
    text = Text(one.sample_id, style="bold")
    score = "no score" if one.score is None else f"score {one.score:.4g}"
    return text.append(f"  {score}, {len(one.ids)} tokens, {one.finish_reason}", style="not bold")


def _tokens(one: Sample, by: str, scale: float, pieces: Pieces, console: Console, cut: int | None) -> Text:
    line = Text(overflow="fold")
    colour = _has_colour(console)
    if not len(one.ids):
        return Text("empty response", style="dim")
    for number, value in zip(one.ids[:cut].tolist(), one.values[:cut].tolist(), strict=True):
        text = visible(pieces.texts.get(number), number)
        line.append(text, style=_style(by, value, scale) if colour else "")
        if not colour:
            line.append(f"({_number(value, by)}) ")
        if "⏎" in text:
            line.append("\n")
    if cut is not None and len(one.ids) > cut:
        line.append(f" … {len(one.ids) - cut} more tokens", style="dim")
    line.rstrip()
    return line


_BELOW, _ABOVE = (176, 84, 4), (27, 98, 178)
_AMOUNT = ((68, 24, 96), (49, 80, 140), (38, 130, 142), (92, 190, 100), (240, 225, 60))
"""Dark to light with the value, as viridis: read by all eyes and on grey screens."""


def _style(by: str, value: float, scale: float) -> str:
    kind = BY[by].kind
    if not np.isfinite(value) or not scale:
        return ""
    if kind == "flag":
        return "" if value else "strike dim"
    share = float(np.clip(value / scale, -1, 1))
    if abs(share) < 0.02:
        return ""
    if kind == "signed":
        strong = _BELOW if share < 0 else _ABOVE
        red, green, blue = (round(235 + (one - 235) * abs(share)) for one in strong)
        return f"{'underline ' if share < 0 else ''}{_ink(red, green, blue)} on rgb({red},{green},{blue})"
    place = abs(share) * (len(_AMOUNT) - 1)
    low = _AMOUNT[int(place)]
    high = _AMOUNT[min(int(place) + 1, len(_AMOUNT) - 1)]
    red, green, blue = (round(a + (b - a) * (place % 1)) for a, b in zip(low, high, strict=True))
    return f"{_ink(red, green, blue)} on rgb({red},{green},{blue})"


def _ink(red: int, green: int, blue: int) -> str:
    """The text colour that is read on a ground (weights of luma, ITU-R BT.601)."""
    return "rgb(0,0,0)" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "rgb(255,255,255)"


def _number(value: float, by: str) -> str:
    if not np.isfinite(value):
        return "–"
    if BY[by].kind == "flag":
        return f"{value:.0f}"
    return f"{value:+.3g}" if BY[by].kind == "signed" else f"{value:.3g}"


def _places(samples: Sequence[Sample], by: str) -> Iterator[tuple[float, Sample, int]]:
    """Tokens with how far each is from the usual, in their order."""
    for one in samples:
        sizes = -one.values if BY[by].kind == "low" else np.abs(one.values)
        for place in np.flatnonzero(np.isfinite(sizes)):
            yield float(sizes[place]), one, int(place)


def _largest(samples: Sequence[Sample], by: str, pieces: Pieces, top: int) -> Table | Text:
    found = sorted(_places(samples, by), key=lambda entry: -entry[0])
    if found and all(entry[1].values[entry[2]] == found[0][1].values[found[0][2]] for entry in found):
        return Text(f"{_number(float(found[0][1].values[found[0][2]]), by)} at every token")
    kind = BY[by].kind
    name = "lowest" if kind == "low" else "farthest from 0" if kind == "signed" else "largest"
    table = Table(title=f"{min(top, len(found))} {name}", title_justify="left", box=None)
    for column in ("sample", "token", "text"):
        table.add_column(column, no_wrap=True)
    table.add_column(by, justify="right", no_wrap=True)
    for _, one, place in found[:top]:
        number = int(one.ids[place])
        text = visible(pieces.texts.get(number), number)
        table.add_row(one.sample_id, str(place), Text(text), _number(float(one.values[place]), by))
    return table


def _as_json(one: Sample, by: str, pieces: Pieces) -> Mapping[str, Any]:
    texts = [pieces.texts.get(number) for number in one.ids.tolist()]
    return {
        "sample_id": one.sample_id,
        "score": one.score,
        "finish_reason": one.finish_reason,
        "ids": one.ids.tolist(),
        "texts": [visible(text, 0) if isinstance(text, bytes) else text for text in texts],
        by: [value if np.isfinite(value) else None for value in one.values.tolist()],
    }
