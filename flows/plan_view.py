"""Shows a plan: tables with units, JSON, or words. Loads no model, and pyarrow only to count rows of Parquet files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.config import ConfigError, load_config
from flows.config_layers import LayerError
from flows.launch_script import LaunchScript, LaunchScriptError, config_of, read_launch_script
from flows.memory_view import (
    Estimates,
    device_memory_here,
    disk_table,
    estimates,
    memory_table,
    model_limits,
    moved_table,
    not_trained,
)
from flows.plan_words import memory_in_words, plan_in_words
from tasks.config import RunConfig
from tasks.geometry import Mesh, Plan, PlanWarning, StageShape, plan

_WIDTH_WITHOUT_TERMINAL = 150


def plan_command(
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    verl: Path | None = None,
    as_json: bool = False,
    explain: bool = False,
    train_prompts: int | None = None,
    device_memory_gb: float | None = None,
) -> int:
    """Print the plan of a configuration, or of a verl launch script.

    Args:
        files: YAML files, later ones on top.
        overrides: `key.path=value` settings on top of them, and of the script's.
        verl: launch script to explain.
        as_json: print one JSON object.
        explain: print words beside the tables.
        train_prompts: size of the training set; None: counted where its files are here.
        device_memory_gb: memory of one device, GB of 10^9 bytes; None: that of a GPU of this machine.

    Returns:
        0, or 2 where the configuration cannot be loaded or has problems.
    """
    try:
        cfg, script = _loaded(files, overrides, verl)
        answer = plan_of(cfg, train_prompts=train_prompts)
        if train_prompts is None:
            answer = replace(answer, warnings=(*answer.warnings, *_not_counted(cfg)))
        known = device_memory_here() if device_memory_gb is None else int(device_memory_gb * 1e9)
        more = estimates(cfg, answer, model_limits(cfg), known)
        answer = replace(answer, warnings=(*answer.warnings, *more.warnings, *not_trained(cfg, answer)))
    except (ConfigError, LayerError, LaunchScriptError) as error:
        _print_error(error, as_json)
        return 2
    problems = bool(answer.problems or (script and script.problems))
    if as_json:
        print(json.dumps(_as_json(answer, more, script), indent=1))
    else:
        _print_plan(answer, more, script, explain)
    return 2 if problems else 0


def plan_of(cfg: RunConfig, *, train_prompts: int | None = None, val_prompts: int | None = None) -> Plan:
    """The plan of a configuration with the sizes of its data and the limits of its model, where they are here."""
    data = cfg.data
    return plan(
        cfg,
        train_prompts=count_rows(data.train_files) if train_prompts is None else train_prompts,
        val_prompts=count_rows(data.val_files) if val_prompts is None else val_prompts,
        model=model_limits(cfg),
    )


def _loaded(
    files: Sequence[Path], overrides: Sequence[str], verl: Path | None
) -> tuple[RunConfig, LaunchScript | None]:
    if verl is None:
        return load_config(files, overrides), None
    known = {name: os.environ[name] for name in ("HOME", "PWD", "USER") if name in os.environ}
    return config_of(read_launch_script(verl, known), files, overrides)


# ------------------------------------------------------------------------------------------------ facts on this disk


def _not_counted(cfg: RunConfig) -> Iterable[PlanWarning]:
    """That training files are not on this disk, where they are named."""
    missing = [name for name in cfg.data.train_files if not Path(name).expanduser().is_file()]
    if missing:
        yield PlanWarning(
            "TRAIN_FILES_MISSING",
            ("data.train_files",),
            f"no file {', '.join(missing)} here, so the steps of an epoch are not known: mend data.train_files, or say "
            "the number of prompts with --train-prompts.",
        )


def count_rows(files: Sequence[str]) -> int | None:
    """Rows of data files before any filtering; None where one is not on this disk or of a kind that is not counted."""
    counts = [_count_rows(Path(name).expanduser()) for name in files]
    return sum(count for count in counts if count is not None) if counts and None not in counts else None


def _count_rows(path: Path) -> int | None:
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise LayerError(f"{path}: is not a Parquet file: {error}") from None
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        with path.open("rb") as lines:
            if lines.read(1) == b"[":  # one list of rows; tasks/data.py counts it when it reads it
                return None
            lines.seek(0)
            return sum(1 for line in lines if line.strip())
    return None


# --------------------------------------------------------------------------------------------------------------- output


def _print_error(error: Exception, as_json: bool) -> None:
    if as_json:
        problems = getattr(error, "problems", None)
        print(
            json.dumps(
                {"errors": [asdict(one) for one in problems] if problems else [{"message": str(error)}]}, indent=1
            )
        )
    else:
        print(f"error: {error}", file=sys.stderr)


def _as_json(answer: Plan, more: Estimates, script: LaunchScript | None) -> dict[str, Any]:
    result = answer.as_dict() | more.as_dict()
    if script is not None:
        result["launch_script"] = asdict(script) | {"problems": [asdict(one) for one in script.problems]}
    return result


def _print_plan(answer: Plan, more: Estimates, script: LaunchScript | None, explain: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    if script is not None:
        _print_script(console, script)
    console.print(numbers_table(answer))
    console.print(stages_table(answer))
    console.print(disk_table(more.disk))
    if more.memory is not None and more.moved is not None:
        console.print(memory_table(more.memory))
        console.print(moved_table(more.moved))
    if explain:
        _print_lines(console, "In words", [*plan_in_words(answer), *memory_in_words(more.memory)])
    _print_lines(console, "Refused", (str(problem) for problem in answer.problems))
    _print_lines(console, "To know", (f"{warning.level}: {warning}" for warning in answer.warnings))


def _print_lines(console: Console, title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        console.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        console.print(Text(f"- {line}"), soft_wrap=True)


def _print_script(console: Console, script: LaunchScript) -> None:
    console.print(Text(f"{len(script.overrides)} settings of {script.module or 'the script'} are read."))
    _print_lines(console, "Warnings of the script", script.warnings)
    _print_lines(console, "Refused values (the default stands in)", map(str, script.refused))
    _print_lines(console, "Unknown keys", map(str, script.unknown))
    _print_lines(console, "Not resolved (the default stands in)", map(str, script.unresolved))
    _print_lines(console, "Called otherwise here", map(str, script.renamed))
    _print_lines(console, "Of verl's, not supported here", map(str, script.unsupported))


def numbers_table(answer: Plan) -> Table:
    """The counts of a step with their units."""
    table = Table(title="One training step", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("unit")
    table.add_column("how it comes about")
    for what, value, unit, how in _number_rows(answer):
        table.add_row(what, _shown(value), unit, Text(how))
    return table


def _number_rows(answer: Plan) -> list[tuple[str, object, str, str]]:
    n, ranks = answer.samples_per_prompt, _plain(answer.dp_size)
    rows: list[tuple[str, object, str, str]] = [
        (
            "devices",
            answer.world_size,
            "devices",
            f"policy {_mesh(answer.fsdp_mesh)}, rollout {_mesh(answer.rollout_mesh)}",
        ),
        (
            "data-parallel ranks",
            answer.dp_size,
            "ranks",
            f"{answer.world_size} devices / {answer.sp_size} that share a sequence",
        ),
        (
            "rollout replicas",
            answer.rollout_replicas,
            "replicas",
            f"{answer.world_size} / {answer.devices_per_rollout_replica} devices each",
        ),
        ("step", answer.prompts_per_step, "prompts", "all devices"),
        ("generate call", answer.gen_batch_prompts, "prompts", "all devices"),
        (
            "generate, per replica",
            answer.prompts_per_rollout_replica,
            "prompts",
            f"{_plain(answer.sequences_per_rollout_replica)} sequences",
        ),
        ("step", answer.sequences_per_step, "sequences", f"{answer.prompts_per_step} prompts x {n} samples"),
        ("per rank", answer.sequences_per_rank, "sequences", f"{answer.sequences_per_step} / {ranks} ranks"),
        ("mini-batch", answer.prompts_per_mini_batch, "prompts", "all devices"),
        (
            "mini-batch",
            answer.sequences_per_mini_batch,
            "sequences",
            f"{answer.prompts_per_mini_batch} x {n}, all devices",
        ),
        (
            "mini-batch, per rank",
            answer.sequences_per_mini_batch_per_rank,
            "sequences",
            f"{answer.sequences_per_mini_batch} / {ranks} ranks",
        ),
        (
            "mini-batches",
            len(answer.prompts_of_mini_batches),
            "per PPO epoch",
            f"sequences per rank: {_listed(answer.mini_batches)}",
        ),
        *_micro_rows(answer),
        (
            "old log-prob",
            answer.old_log_prob_forwards_per_rank,
            "forwards per rank",
            _cut_in_words(answer.old_log_prob_cut),
        ),
        (
            "reference log-prob",
            answer.ref_log_prob_forwards_per_rank,
            "forwards per rank",
            _cut_in_words(answer.ref_log_prob_cut),
        ),
        (
            "optimizer steps",
            answer.optimizer_steps_per_step,
            "per step",
            f"{len(answer.prompts_of_mini_batches)} per epoch x {answer.ppo_epochs} ppo_epochs",
        ),
        (
            "sequence",
            answer.padded_sequence_tokens,
            "tokens",
            f"prompt {answer.prompt_length} + response {answer.response_length}, at most",
        ),
        (
            "epoch",
            answer.steps_per_epoch,
            "steps",
            f"{_plain(answer.train_prompts)} prompts / {answer.prompts_per_step}",
        ),
        ("run", answer.total_steps, "steps", f"at most {answer.total_epochs} epochs"),
    ]
    return rows


def _micro_rows(answer: Plan) -> list[tuple[str, object, str, str]]:
    counts, fewer = answer.micro_batches_per_mini_batch, answer.micro_batches_per_mini_batch_by_token_count
    cut = answer.update_cut
    per_mini = f"{_listed(counts)} at full length" if cut.by_tokens else _listed(counts)
    lower = f"; by token count {_listed(fewer)}" if cut.by_tokens else ""
    return [
        ("micro-batch", answer.sequences_per_micro_batch, "sequences", _cut_in_words(cut)),
        ("micro-batches", counts[0] if counts else None, "per mini-batch", per_mini + lower),
        (
            "gradient accumulation",
            answer.grad_accumulation_steps,
            "micro-batches",
            "behind one optimizer step, per rank",
        ),
    ]


def stages_table(answer: Plan) -> Table:
    """The shapes of every stage: padded over all devices, on one part, and the size on disk."""
    table = Table(title="Stage by stage: padded to the longest, and stored without padding", title_justify="left")
    for name, justify in (
        ("stage", "left"),
        ("column", "left"),
        ("type", "left"),
        ("all devices", "right"),
        ("one part", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for name in ("padded MB", "stored MB at most"):
        table.add_column(name, justify="right")
    table.add_column("note")
    last = ""
    for row in answer.stages:
        table.add_row(*_stage_cells(row, row.stage if row.stage != last else ""))
        last = row.stage
    return table


def _stage_cells(row: StageShape, stage: str) -> tuple[str | Text, ...]:
    local = f"{list(row.local_shape)} {row.local_unit}" if row.local_shape else ""
    stored = "" if row.stored_bytes is None else _megabytes(row.stored_bytes)
    return (
        stage,
        row.column,
        row.dtype,
        Text(str(list(row.global_shape))),
        Text(local),
        _megabytes(row.padded_bytes),
        stored,
        row.note,
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f}" if size_bytes < 1e6 else f"{size_bytes / 1e6:.1f}"


def _cut_in_words(cut: Any) -> str:
    if cut is None:
        return "no such pass"
    if cut.by_tokens:
        return f"at most {cut.token_budget} tokens, a real cap"
    return f"{_plain(cut.sequences_per_micro_batch)} sequences each"


def _mesh(mesh: Mesh | None) -> str:
    if mesh is None:
        return "undefined"
    return " x ".join(f"{size} {name}" for size, name in zip(mesh.shape, mesh.names, strict=True))


def _listed(sizes: Sequence[int]) -> str:
    """Sizes, with equal neighbours drawn together."""
    parts: list[tuple[int, int]] = []
    for size in sizes:
        if parts and parts[-1][0] == size:
            parts[-1] = (size, parts[-1][1] + 1)
        else:
            parts.append((size, 1))
    return ", ".join(str(size) if times == 1 else f"{times} x {size}" for size, times in parts) or "undefined"


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


def _plain(value: float | None) -> str:
    return "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
