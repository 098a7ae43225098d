"""The process of a scheduled run: what it is told, how it is waited for, and what its end means."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flows.child import child_command
from flows.config_layers import read_yaml
from flows.last_process import death_of_last_process
from flows.prefect_runs import PARENT, current_flow_run
from flows.run_folder import run_folder, short
from flows.schedules.spec import Served, configuration, run_overrides
from flows.slots import Slot, visible_devices
from storage import StorageError, open_run

LAST_WORDS_BYTES = 4000
POLL_S = 0.2


def command_words(one: Served, name: str, overrides: Sequence[str], files: Path) -> list[str]:
    """What to tell `grpoflow` for one run of a schedule.

    Args:
        one: the schedule.
        name: of the run.
        overrides: of this run alone, after the schedule's own.
        files: where a sweep's file for this time is written to.
    """
    schedule = one.schedule
    whole = run_overrides(one, name, tuple(overrides))
    if schedule.sweep is None:
        return [schedule.kind, *(schedule.train or schedule.preflight or ()), *whole]
    files.mkdir(parents=True, exist_ok=True)
    path = files / f"{name}.yaml"
    path.write_text(yaml.safe_dump(_sweep_of(Path(schedule.sweep), name, whole), sort_keys=False))
    return ["sweep", str(path)]


def _sweep_of(path: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A sweep's file under another name and with more overrides; files that it names from its folder in full."""
    tree = read_yaml(path)
    sweep = {**tree.get("sweep", tree), "name": name}
    base = sweep.get("base", ())
    near = [(path.parent / word, word) for word in ([base] if isinstance(base, str) else base)]
    sweep["base"] = [str(file.absolute()) if file.is_file() else word for file, word in near]
    # A sweep names its runs itself.
    own = [text for text in overrides if not text.startswith("trainer.experiment_name=")]
    return {**sweep, "overrides": [*sweep.get("overrides", ()), *own]}


def start(one: Served, words: Sequence[str], log: Path, slots: Sequence[Slot]) -> subprocess.Popen[Any]:
    """Start the process of a run. It holds the slots from now on; the last of them is one of this machine's."""
    environment = {name: value for name, value in os.environ.items() if not _is_of_the_flow_run(name, one)}
    if one.slots is not None and one.devices_per_slot and len(slots) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(os.environ, slots[-1].number, one.devices_per_slot)
    if (here := current_flow_run()) is not None:
        environment[PARENT] = str(here)
    with log.open("ab") as output:
        return slots[0].start(
            child_command(*words),
            also=slots[1:],
            cwd=one.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal of `serve` reaches it through its flow run alone, once.
            start_new_session=True,
        )


def _is_of_the_flow_run(name: str, one: Served) -> bool:
    """Whether a variable is about the flow run around the process, or about a server that the process finds itself."""
    return name.startswith("PREFECT__") or (one.api_url is None and name.startswith("PREFECT_"))


def wait(process: subprocess.Popen[Any], check: Callable[[], None], told: tuple[type[BaseException], ...]) -> bool:
    """Wait for a process's end; whether it was told to end.

    Args:
        process: it gets one SIGTERM when `check` raises, or a signal handler does.
        check: called often.
        told: what says that the process is to end. Told again, the process is waited for all the same.
    """
    asked = False
    while True:
        try:
            if not asked:
                check()
            process.wait(POLL_S)
            return asked
        except subprocess.TimeoutExpired:
            continue
        except told:
            if not asked:
                asked = True
                process.send_signal(signal.SIGTERM)


def last_words(log: Path) -> str:
    """The last line that says `error:`, with what follows it, or else the last line of all."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    begin = max((place for place, line in enumerate(lines) if line.startswith("error:")), default=len(lines) - 1)
    return "\n".join(lines[begin:]) or "it printed nothing"


def folder_of_run(one: Served, name: str, overrides: Sequence[str]) -> Path | None:
    """Where the run with this name lies; None: what is run is no training, or it has no folder yet."""
    if one.schedule.train is None:
        return None
    folder = run_folder(configuration(one, name, tuple(overrides)))
    return folder if (folder / "run.json").exists() else None


def how_to_go_on(one: Served, folder: Path | None) -> str:
    """What a run of a schedule left, and what goes on with it."""
    if folder is None:
        again = "begins again" if one.schedule.sweep is None else "goes on with it"
        return f"it left no run; the next start {again}" if one.schedule.train else f"the same command {again}"
    return left_by(folder)


def left_by(folder: Path) -> str:
    """How the run's last process ended, where that is known, and the command that goes on with it."""
    try:
        death = death_of_last_process(open_run(folder))
    except (StorageError, OSError) as error:
        return f"{folder}: {error}"
    how = f"{death.words}; " if death else ""
    return f"{how}go on with: grpoflow resume {short(folder)}"
