"""The checks of `verify` as rows of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flows.audit.report.private import public_text
from storage import Run

_ROWS_SHOWN = 3


def checks_of(run: Run, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Make the checks of some steps and put each into a row: name, verdict, what was compared, what was found."""
    # Loads tensor libraries, which no other part of a report needs.
    from flows.audit.verify import CHECKS, verify

    made = verify(run, steps)
    return [
        {
            "name": check.name,
            "look": {"ok": "good", "failed": "flag"}.get(made.result(check), "quiet"),
            "verdict": {"ok": "✓ passed", "failed": "! failed"}.get(made.result(check), "– not applicable"),
            "compared": made.accounts[check.name].compared,
            "worst": "" if (worst := made.accounts[check.name].measured) is None else f"{worst:.3g}",
            "tolerance": check.tolerance,
            "about": check.about,
            "found": _found(made.accounts[check.name]),
        }
        for check in CHECKS
    ]


def _found(account: Any) -> list[str]:
    """The first rows that offend, with their places."""
    rows = account.rows[:_ROWS_SHOWN]
    lines = [public_text(f"{_where(row)}{row.what}") for row in rows]
    if account.failures > len(rows):
        lines.append(f"… {account.failures - len(rows):,} more")
    return lines


def _where(row: Any) -> str:
    places = [
        f"step {row.step}" if row.step is not None else None,
        row.stage,
        row.sample_id,
        f"token {row.token}" if row.token is not None else None,
    ]
    told = ", ".join(place for place in places if place)
    return f"{told}: " if told else ""
