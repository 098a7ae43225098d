"""`grpoflow doctor`: what would keep a run from starting here, or from being what it should be.

Checks say what they find and never raise. They run on a few threads with a deadline, because a server, a network disk
or a driver that hangs is what a doctor is called for; what imports torch shares one thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.doctor.chat import check_tokenizer
from flows.doctor.finding import Finding, secrets_of, without_secrets
from flows.doctor.folder import check_folder, check_locks
from flows.doctor.machine import (
    check_cpu,
    check_devices,
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from flows.doctor.services import check_prefect, check_ray, check_store, check_tracking, prefect_url, tracking_uri
from flows.doctor.subject import Subject, subject_of
from flows.doctor.versions import check_python, check_versions, check_vllm
from storage import StorageError

Check = Callable[[Subject], Iterator[Finding]]

LANES: tuple[tuple[Check, ...], ...] = (
    (check_python, check_versions, check_vllm, check_cpu, check_memory, check_shared_memory, check_open_files),
    (check_devices, check_tokenizer),
    (check_disk, check_folder, check_locks),
    (check_ray,),
    (check_tracking,),
    (check_prefect,),
    (check_store,),
)
"""Checks of a lane run one after another, lanes side by side; the report has their order."""

DEADLINE_S = 60.0
"""Importing torch takes two seconds, and half a minute where many others work on the machine."""

DEEP_DEADLINE_S = 300.0

_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red", "skipped": "dim"}


def doctor_command(words: Sequence[str], *, as_json: bool = False, deep: bool = False) -> int:
    """Examine this machine, and a run or a configuration if one is given; print what is found.

    Args:
        words: a run's folder or a folder of runs, or recipe names and YAML files; then overrides.
        as_json: print a list of objects with `name`, `status`, `found`, `advice`.
        deep: also start a local Ray and a Prefect server, and fetch a tokenizer that is not here.

    Returns:
        0, or 2 where a check found an error.
    """
    findings = examine(subject_of(words, deep))
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        _print(findings)
    return 2 if any(finding.status == "error" for finding in findings) else 0


def examine(subject: Subject) -> list[Finding]:
    """Make every check; no secret of the configuration is in what they say."""
    secrets = secrets_of(_uris(subject))
    deadline = time.monotonic() + (DEEP_DEADLINE_S if subject.deep else DEADLINE_S)
    results: list[dict[str, list[Finding]]] = [{} for _ in LANES]
    threads = [
        threading.Thread(target=_run_lane, args=(lane, subject, result), daemon=True)
        for lane, result in zip(LANES, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    found = chain.from_iterable(_in_order(lane, result) for lane, result in zip(LANES, results, strict=True))
    return [without_secrets(finding, secrets) for finding in (*subject.findings, *found)]


def _uris(subject: Subject) -> Iterator[str | None]:
    """Addresses that may hold a login."""
    yield prefect_url(subject)
    yield subject.cfg.tracking.uri if subject.cfg else None
    # A damaged file is for the check to tell.
    with suppress(OSError, ValueError, LookupError, TypeError, StorageError):
        yield tracking_uri(subject)


def _run_lane(lane: tuple[Check, ...], subject: Subject, result: dict[str, list[Finding]]) -> None:
    for check in lane:
        findings: list[Finding] = []
        try:
            findings.extend(check(subject))
        # Whatever a machine in disorder raises, the other checks must still be made.
        except Exception as error:
            words = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(_name(check), "error", words, "Tell us; the other checks do not depend on it."))
        result[check.__name__] = findings


def _in_order(lane: tuple[Check, ...], result: dict[str, list[Finding]]) -> Iterator[Finding]:
    """What a lane has found; the first check without a result hangs, and those behind it were not made."""
    hangs = "it did not end in time: what it asks does not answer"
    for check in lane:
        if check.__name__ in result:
            yield from result[check.__name__]
        else:
            yield Finding(_name(check), "error", hangs, "A disk, a driver or a server hangs: try it by hand.")
            return


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def _print(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("status", "name"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        words = Text(finding.found)
        if finding.advice and finding.status != "ok":
            words.append(f"\n-> {finding.advice}", style="italic")
        elif finding.advice:
            words.append(f" {finding.advice}")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.name, words)
    console = Console()
    console.print(table)
    counts = {status: sum(one.status == status for one in findings) for status in _STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
