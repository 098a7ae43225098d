"""Stages of a stored step made again from their stored inputs, in a scratch run, and compared with what is stored.

The step's flow is walked with an object in the place of `Stages`, as flows/stale.py does: each stage is given the
artifacts that are stored and hands on the stored one, so that one stage which differs does not spoil those after it.
The run is only read.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

import pyarrow as pa
import pyarrow.compute as pc

from flows.audit.compare import Comparison, Where, compare_tables
from flows.audit.replay.inputs import Inputs, as_it_was, selected
from flows.audit.replay.one_process import Device, Policy, for_one_process, on_cpu_for_certain
from flows.audit.replay.tolerances import SHARED_OUT, bounds_of, computes_in, in_words
from flows.run_folder import config_of
from flows.stale import Opened, Opening, differences, nobody
from flows.step import Stages, Workers, train_step, validate_policy
from storage import Artifact, Run, RunWriter, StorageError, read_table
from storage.artifacts import Manifest, check_parts, read_manifest
from storage.ledger import StepView
from storage.schema import without_round
from tasks.config import RunConfig
from tasks.stage import NonFiniteError, Stage, Step
from tasks.workers.rank import Role

Verdict = Literal["equal", "within tolerance", "differs", "cannot"]


@dataclass(frozen=True)
class Replayed:
    """What came of one artifact of a step.

    Attributes:
        step: number of the step.
        stage: name of the artifact.
        verdict: `equal`: every value, bit for bit; `cannot`: it could not be made again or compared.
        measured: largest difference of two numbers; None: nothing was compared.
        tolerance: what was allowed, in words.
        rows: rows that differ, beyond the tolerance if any does.
        first: the first of them, with the token; None: the rows are equal.
        why: what a reader must know: why it cannot be, or what is not as it was when the stage was made.
        seconds: it took, without loading a model.
        stored_seconds: the stage itself took.
    """

    step: int
    stage: str
    verdict: Verdict
    measured: float | None = None
    tolerance: str | None = None
    rows: int = 0
    first: Where | None = None
    why: str = ""
    seconds: float | None = None
    stored_seconds: float | None = None


def replay_step(run: Run, index: int, stages: Sequence[str] | None = None, **options: Any) -> list[Replayed]:
    """Make stages of a step again and compare them; see `Replayer`.

    Args:
        run: the run.
        index: number of the step; 0: the validation before training.
        stages: names of artifacts, or words for them as in `grpoflow replay --stage`; None: all that the step has.
        options: of `Replayer`.

    Raises:
        StorageError, ValueError: there is no such step or stage.
    """
    with Replayer(run, **options) as replayer:
        return replayer.step(index, stages)


class Replayer:
    """Replays steps of one run. Models, data and reward processes are opened when a stage first needs them, and stay.

    A stage of rewards or advantages alone loads no model.
    """

    def __init__(
        self,
        run: Run,
        *,
        device: Device = "cpu",
        overrides: Sequence[str] = (),
        bundled: bool = False,
        trusts_code: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """A replayer of a run.

        Args:
            run: the run.
            device: where to compute.
            overrides: key=value of the configuration that are other ones here, such as the model's path.
            bundled: the run is one that was unpacked from a bundle.
            trusts_code: code that came in the bundle may be run: its reward functions, and its model's.
            say: told how a policy was rebuilt.
        """
        self.run, self.overrides, self.device, self.bundled = run, tuple(overrides), device, bundled
        self._stack = ExitStack()
        self.policy = Policy(run, say)
        self.inputs = Inputs(self.policy, self._stack, run.root.parent if bundled and not trusts_code else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.policy.close()
        self._stack.close()

    def step(self, index: int, stages: Sequence[str] | None = None) -> list[Replayed]:
        """Replay a step; raises as `replay_step` does."""
        view = self.run.step(index)
        wanted = selected(view, stages)
        for stage in map(without_round, wanted):
            if stage.endswith("rollouts"):
                self.policy.needs(Role.ROLLOUT)
            if stage == "ref_log_probs":
                self.policy.needs(Role.REF)
        with _scratch_run() as scratch:
            walk = _Walk(self, view, wanted, scratch)
            if index and any(not stage.startswith("val_") for stage in wanted):
                walk.through(train_step)
            if any(stage.startswith("val_") for stage in wanted):
                walk.through(validate_policy)
        return [walk.found.get(stage, Replayed(index, stage, "cannot", why=walk.problem)) for stage in wanted]

    def config(self, lineage: int, manifest: Manifest | None = None) -> RunConfig:
        """The run's configuration, of a stored artifact as it was then, with what is another one here."""
        cfg = config_of(self.run, lineage if lineage in self.run.lineages else self.run.lineage)
        return as_it_was(cfg, manifest, self.overrides)


@contextmanager
def _scratch_run() -> Iterator[RunWriter]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpoflow-replay-"))
        yield stack.enter_context(RunWriter.create(Path(folder) / "run", "replay"))


class _Finished(Exception):
    """All that was asked for has been made again, or nothing more can be."""


class _Walk:
    """Makes the stages of a step that are asked for again, and hands on the stored artifacts. In place of `Stages`."""

    def __init__(self, replayer: Replayer, view: StepView, wanted: Sequence[str], scratch: RunWriter) -> None:
        self.found: dict[str, Replayed] = {}
        self.problem = "a step of this configuration has no such stage"
        self._replayer, self._view, self._wanted, self._scratch = replayer, view, set(wanted), scratch
        self._cfg = replayer.config(replayer.run.lineage_of(view.index))
        self._nobody = nobody(replayer.run, self._cfg, view)[0]

    def through(self, flow: Callable[[Step, Workers, Stages], object]) -> None:
        """Go through the stages of a flow as far as is asked for."""
        # The walk itself only reads the run; what is made again is written into the scratch run.
        step = Step(self._view.index, cast(RunWriter, self._replayer.run), self._cfg)
        try:
            flow(step, self._nobody, self)
        except _Finished as finished:
            self.problem = str(finished) or self.problem
        except (StorageError, OSError, ValueError) as error:
            self.problem = str(error)

    def run(self, stage: Callable[..., Artifact], *args: Any) -> Artifact:
        """Make a stage's artifact again, if it is asked for, and return the stored one."""
        opened = self._open(stage, args, self._cfg)
        name = opened.name
        stored = self._view.artifact(name)
        if stored is None:
            raise _Finished(f"step {self._view.index} has no {name}, from which it is made")
        if name in self._wanted and name not in self.found:
            self.found[name] = self._judged(stage, args, opened, stored)
        if self._wanted <= self.found.keys() or name in ("updates", "val_rewards"):
            raise _Finished
        return stored

    def start(self, stage: Callable[..., Artifact], *args: Any) -> Callable[[], Artifact]:
        """The same; nothing goes on beside anything here."""
        artifact = self.run(stage, *args)
        return lambda: artifact

    def _open(self, stage: Callable[..., Artifact], args: Sequence[Any], cfg: RunConfig) -> Stage:
        try:
            stage(Opening(self._view.index, cast(RunWriter, self._replayer.run), cfg), *args[1:])
        except Opened as opened:
            return opened.stage
        raise AssertionError("a stage opens its artifact")

    def _judged(self, stage: Callable[..., Artifact], args: Sequence[Any], opened: Stage, stored: Artifact) -> Replayed:
        """Make one artifact again and compare it."""
        result = Replayed(self._view.index, opened.name, "cannot")
        told: list[str] = []
        try:
            manifest = read_manifest(stored.folder)
            for artifact in (stored, *opened.parents):
                check_parts(artifact.folder, read_manifest(artifact.folder))
            again = _Again(self._replayer, self._scratch, self._nobody, manifest, opened.policy_version)
            real = again.real_arguments(args)
            told = again.told(self._open(stage, real, again.cfg), opened.parents)
            result = again.make(stage, real, stored)
            told += again.doubts(real)
        except NonFiniteError as error:
            result = replace(result, verdict="differs", why=str(error))
        except (StorageError, OSError, ValueError, RuntimeError) as error:
            result = replace(result, why=str(error) or type(error).__name__)
        return replace(result, why="; ".join(filter(None, [result.why, *told])))


class _Again:
    """One stored artifact, and the stage function that makes it again.

    Attributes:
        cfg: the configuration of its stage as it was, for one process.
    """

    def __init__(
        self, replayer: Replayer, scratch: RunWriter, nobody: Workers, manifest: Manifest, policy_version: int
    ) -> None:
        self._replayer, self._manifest, self._nobody = replayer, manifest, nobody
        self._then = replayer.config(manifest.lineage, manifest)
        self.cfg = for_one_process(self._then, replayer.device)
        self._step = Step(manifest.step, scratch, self.cfg)
        self._kind = without_round(manifest.stage)
        # The reference is the same whatever the policy.
        version = None if self._kind == "ref_log_probs" else policy_version
        lineage = manifest.lineage if manifest.lineage in replayer.run.lineages else replayer.run.lineage
        replayer.policy.expect(self.cfg, version, lineage)
        replayer.policy.sampling_ranks = manifest.shapes.get("ranks", 1)

    def real_arguments(self, args: Sequence[Any]) -> list[Any]:
        """A stage's arguments with what it works with in the place of what it was opened with."""
        return [self._step, *(self._replayer.inputs.real(arg, self._nobody, self.cfg) for arg in args[1:])]

    def told(self, now: Stage, parents: Sequence[Artifact]) -> list[str]:
        """What is not as it was when the artifact was made, in sentences."""
        then, given = self._manifest.made_from, self._manifest.parents
        told = [
            f"it was made from another {parent.stage} (SHA-256 {given[parent.stage][:12]}) than the stored one"
            for parent in parents
            if given.get(parent.stage, parent.digest) != parent.digest
        ]
        if then is None:
            return told
        same = {key: then[key] for key in ("config", "parents")}
        return [*told, *differences(then, {**now.made_from, **same, "also": self._also(then, now)})]

    def _also(self, then: dict[str, Any], now: Stage) -> dict[str, Any]:
        # The digest of functions is over their path too; what came in a bundle was checked file by file.
        also = now.made_from["also"]
        if self._replayer.bundled and "functions" in also:
            return {**also, "functions": then["also"]["functions"]}
        return also

    def make(self, stage: Callable[..., Artifact], args: Sequence[Any], stored: Artifact) -> Replayed:
        """Run the stage and compare what it makes."""
        samples = self._kind.endswith("rollouts") and self._needs_policy(args)
        if samples and self.cfg.actor_rollout_ref.rollout.name != "transformers":
            return self._by_log_probs(args, "its engine is not the one here: the tokens cannot be sampled again")
        policy, started = self._replayer.policy, time.perf_counter()
        loading = policy.seconds
        made = stage(*args)
        seconds = time.perf_counter() - started - (policy.seconds - loading)
        result = replace(self._compared(stored, made, args), seconds=seconds)
        if samples and result.verdict == "differs" and not self._same_place(args):
            where = f"sampled again in another place, {result.rows} responses come out otherwise (first {result.first})"
            return replace(self._by_log_probs(args, where, stored), seconds=seconds)
        return result

    def doubts(self, args: Sequence[Any]) -> list[str]:
        """What is known against the policy that it was made with."""
        doubt = self._replayer.policy.doubt
        return [doubt] if doubt and self._needs_policy(args) and self._kind != "ref_log_probs" else []

    def _needs_policy(self, args: Sequence[Any]) -> bool:
        return any(arg is self._replayer.policy for arg in args)

    def _same_place(self, args: Sequence[Any]) -> bool:
        """Whether the artifact was made by one rank on a CPU; and, where it is known, on this machine."""
        if not self._needs_policy(args):
            return True
        one = self._manifest.shapes.get("ranks", 1) == 1
        return one and on_cpu_for_certain(self._then, [self._manifest])

    def _compared(self, stored: Artifact, made: Artifact, args: Sequence[Any]) -> Replayed:
        same_place = self._same_place(args)
        on_cpu = not self._needs_policy(args) or on_cpu_for_certain(self._then, [self._manifest])
        dtype = computes_in(self._then, on_cpu=on_cpu)
        tables, note = _without_timeouts(read_table(stored), read_table(made))
        left_out = ["seconds", "weights_digest", *(() if same_place else SHARED_OUT)]
        found = compare_tables(*tables, bounds_of(self._kind, dtype), left_out)
        if found.equal and same_place and self._kind == "updates":
            found = compare_tables(*tables, {}, ["seconds"])
        elif found.allowed and self._kind == "updates":
            note = "; ".join(filter(None, [note, self._other_weights(*tables, made)]))
        # Metrics are of all rows.
        if found.equal and not note:
            found = self._of_manifest(made, found, same_place)
        return self._result(found, in_words(self._kind, dtype), note)

    def _result(self, found: Comparison, tolerance: str, why: str) -> Replayed:
        about = (found.measured, tolerance, found.rows, found.first, why)
        verdict: Verdict = "equal" if found.equal else "within tolerance" if found.allowed else "differs"
        manifest = self._manifest
        return Replayed(manifest.step, manifest.stage, verdict, *about, stored_seconds=manifest.seconds)

    def _other_weights(self, stored: pa.Table, made_table: pa.Table, made: Artifact) -> str:
        """Which weights come out otherwise, where they do."""
        digests = [table["weights_digest"][-1].as_py() for table in (stored, made_table)]
        if digests[0] == digests[1]:
            return ""
        known, now = self._manifest.notes.get("tensors", {}), read_manifest(made.folder).notes["tensors"]
        moved = [name for name in now if known.get(name) != now[name]]
        first = f", first {moved[0]} ({len(moved)} of {len(now)} tensors)" if moved else ""
        return f"the weights come out otherwise: SHA-256 {digests[0][:12]} stored, {digests[1][:12]} made again{first}"

    def _of_manifest(self, made: Artifact, found: Comparison, same_place: bool) -> Comparison:
        """The metrics that were kept with rows that are equal, against those of the rows; and the policy's digest."""
        then, now = self._manifest, read_manifest(made.folder)
        pairs = [
            (f"metric {name}", then.metrics[name], now.metrics[name]) for name in then.metrics if name in now.metrics
        ]
        if same_place and "policy_digest" in then.notes:
            pairs.append(("notes.policy_digest", then.notes["policy_digest"], now.notes.get("policy_digest")))
        odd = [Where("manifest", name, None, old, new) for name, old, new in pairs if not _same_metric(old, new)]
        return replace(found, equal=False, allowed=False, rows=len(odd), first=odd[0]) if odd else found

    def _by_log_probs(self, args: Sequence[Any], why: str, stored: Artifact | None = None) -> Replayed:
        """Judge sampled tokens by the policy's log-probs of them, which the engine's must be near."""
        from flows.audit.replay.sampled import judge_by_log_probs

        prompts = next(arg for arg in args if isinstance(arg, Artifact))
        rollouts = stored or self._replayer.run.step(self._manifest.step).artifact(self._manifest.stage)
        assert rollouts is not None
        on_cpu = on_cpu_for_certain(self._then, [self._manifest])
        dtype = computes_in(self._then, on_cpu=on_cpu)
        found, tolerance = judge_by_log_probs(self._step, prompts, rollouts, self._replayer.policy, dtype)
        return self._result(found, tolerance, f"{why}; judged by the policy's log-probs of the stored tokens")


def _same_metric(old: float | str | None, new: float | str | None) -> bool:
    """Sums over ranks' rows may be in another order."""
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= max(1e-9 * max(abs(old), abs(new)), 1e-12)
    return old == new


def _without_timeouts(stored: pa.Table, made: pa.Table) -> tuple[tuple[pa.Table, pa.Table], str]:
    """Rewards without samples that timed out on either side: whether one does is measured, not computed."""
    if "status" not in stored.column_names:
        return (stored, made), ""
    late = [table.filter(pc.equal(table["status"], "timeout"))["sample_id"] for table in (stored, made)]
    names = pa.chunked_array([*late[0].chunks, *late[1].chunks], type=late[0].type).unique()
    if not len(names):
        return (stored, made), ""
    kept = [table.filter(pc.invert(pc.is_in(table["sample_id"], names))) for table in (stored, made)]
    return (kept[0], kept[1]), f"{len(names)} samples that timed out are not compared"
