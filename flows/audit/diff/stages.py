"""One step of two runs, stage by stage: which outputs differ, which of them from equal inputs, and what else differed.

Outputs are compared by their values (`content_digest`), because two makings of the same rewards or updates differ in
measured seconds. What a stage is made from is what its manifest says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.audit.compare import Where, compare_tables
from storage.artifacts import Manifest
from storage.ledger import STAGES, StepView
from storage.samples import UNMEASURED, content_digest
from storage.schema import without_round

OF_THE_POLICY = {"rollouts", "greedy_rollouts", "old_log_probs", "updates", "val_rollouts"}
"""Artifacts that depend on the policy's weights as well as on the artifacts they are made from."""

OF_THE_STEP = ("seed", "policy_version", "policy_version_in", "policy_version_out")
"""Columns that two steps never have in common, left out when two steps are compared."""


@dataclass(frozen=True)
class StageDiff:
    """How a stage of A and the same of B compare.

    Attributes:
        stage: the artifact's name.
        output: `equal`, `differs`, `only in A`, `only in B`, or `unknown` where rows were dropped.
        inputs_equal: the artifacts and the policy it was made from are equal in both.
        because: what else it was made from that differs: configuration, code, data, reward functions.
        first: the first place that differs, of an output that differs from equal inputs.
    """

    stage: str
    output: str
    inputs_equal: bool
    because: tuple[str, ...] = ()
    first: Where | None = None


def compare_stages(a: StepView, b: StepView) -> list[StageDiff]:
    """All stages of one step in the order in which they are made; where the first difference lies is looked up.

    Raises:
        StorageError: an artifact is damaged.
    """
    there = [set(view.stages()) for view in (a, b)]
    found: dict[str, StageDiff] = {}
    for stage in sorted(there[0] | there[1], key=_order):
        if stage not in there[0] or stage not in there[1]:
            found[stage] = StageDiff(stage, f"only in {'A' if stage in there[0] else 'B'}", True)
            continue
        one, other = a.manifest(stage), b.manifest(stage)
        if one is None or other is None:
            raise AssertionError(f"{stage} is listed and has no manifest")
        parents = {*one.parents, *other.parents}
        lacking = any(name in one.parents or name in other.parents for name in there[0] ^ there[1])
        inputs_equal = not lacking and all(
            found[name].output == "equal" if name in found else one.parents.get(name) == other.parents.get(name)
            for name in parents
        )
        inputs_equal = inputs_equal and (without_round(stage) not in OF_THE_POLICY or _same_policy(a, b, stage))
        because = tuple(_because(one, other, same_step=a.index == b.index))
        made = StageDiff(stage, _output(a, b, stage, one, other), inputs_equal, because)
        if made.output == "differs" and inputs_equal:
            made = replace(made, first=_first_place(a, b, stage))
        found[stage] = made
    return list(found.values())


def _order(stage: str) -> tuple[int, str, int]:
    """Generate calls come before what is chosen from them."""
    whole = without_round(stage)
    number = stage.removeprefix(whole)
    return (0 if number else 1, number, STAGES.index(whole))


def _output(a: StepView, b: StepView, stage: str, one: Manifest, other: Manifest) -> str:
    if one.digest == other.digest:
        return "equal"
    if a.is_dropped(stage) or b.is_dropped(stage):
        return "unknown"
    left, right = (content_digest(_plain(view, stage, a.index != b.index)) for view in (a, b))
    return "equal" if left == right else "differs"


def _plain(view: StepView, stage: str, other_step: bool) -> pa.Table:
    """A stage's rows; where they are compared with another step's, without what names the step."""
    table = view.table(stage)
    if other_step:
        table = table.drop_columns([name for name in OF_THE_STEP if name in table.column_names])
        for name in ("sample_id", "group_id"):
            if name in table.column_names:
                place = table.column_names.index(name)
                table = table.set_column(place, table.schema.field(name), pc.utf8_slice_codeunits(table[name], 6))
    return table


def _first_place(a: StepView, b: StepView, stage: str) -> Where | None:
    one, other = (_plain(view, stage, a.index != b.index) for view in (a, b))
    return compare_tables(one, other, bounds={}, leave_out=UNMEASURED).first


def _same_policy(a: StepView, b: StepView, stage: str) -> bool:
    """Whether both begin with the same weights, as far as the rollouts say which they were sampled from."""
    sampled = "val_rollouts" if stage == "val_rollouts" else "rollouts"
    digests = [_policy_digest(view, sampled) for view in (a, b)]
    return digests[0] == digests[1]


def _policy_digest(view: StepView, stage: str) -> Any:
    manifest = view.manifest(stage)
    return manifest.notes.get("policy_digest") if manifest else None


def _because(one: Manifest, other: Manifest, same_step: bool) -> Iterator[str]:
    """What two artifacts were made from that differs, apart from other artifacts and the policy."""
    if not same_step:
        yield f"A is step {one.step}, B step {other.step}"
    if one.made_from is None or other.made_from is None:
        yield "what it was made from was not written down"
        return
    for key, mine, yours in differences(one.made_from["config"], other.made_from["config"]):
        yield f"{key}: A {mine!r}, B {yours!r}"
    for module in module_differences(one, other):
        yield f"the code of {module} differs"
    words = {"data": "the prompts' data differ", "functions": "the source of the reward functions differs"}
    for key, mine, yours in differences(one.made_from["also"], other.made_from["also"]):
        if key in words:
            yield words[key]
        elif key != "policy" and same_step:
            yield f"{key}: A {mine!r}, B {yours!r}"


def module_differences(one: Manifest, other: Manifest) -> list[str]:
    """Modules behind two artifacts whose source differs."""
    mine, yours = ((each.made_from or {}).get("modules", {}) for each in (one, other))
    return [name for name in sorted({*mine, *yours}) if mine.get(name) != yours.get(name)]


def differences(mine: Any, yours: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both; a key that one has not stands with None."""
    if isinstance(mine, Mapping) and isinstance(yours, Mapping):
        for name in sorted({*mine, *yours}):
            yield from differences(mine.get(name), yours.get(name), f"{key}.{name}" if key else name)
    elif mine != yours:
        yield key, mine, yours
