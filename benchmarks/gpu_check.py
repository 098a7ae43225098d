"""Generate, log-probs and update of a 0.5B-sized random Qwen2 on one device: rates, MFU, memory, and are they right?

    python benchmarks/gpu_check.py --out DIR          on a CUDA device, within 8 minutes
    python benchmarks/gpu_check.py --out DIR --tiny   on the processor, seconds

Needs torch, transformers, pyarrow, numpy, pydantic and safetensors alone, and no network. What is measured is the
project's own PolicyWorker and TransformersEngine, with float32 weights that compute in bfloat16, and with bfloat16
weights. Their log-probs are compared with float32's. A stage's time includes what it does on the host: log-probs are
copied there after each micro-batch, and the sampler asks after each token which rows go on.

DIR gets gpu_check.json and gpu_check.md, rewritten after every measurement. Exit code 0: measured and right; 1: a
log-prob is beyond the bounds, or a stage found no room in memory; 2: there is no such device; 3: time was up.

It has never run on a GPU; on a processor, --tiny has.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository instead of this folder, whose modules have common names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
import transformers

from benchmarks.gpu_clock import LIMIT_S, Clock, Options, Work
from benchmarks.gpu_model import TINY, Sizes, build_batch, build_model, forward_flops, peak_tflops
from benchmarks.gpu_report import Gap, Report, Timing
from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.engines.protocol import Sampling
from tasks.engines.transformers_engine import TransformersEngine
from tasks.tokenizer import load_tokenizer
from tasks.workers.layout import Layout
from tasks.workers.policy import PolicyWorker, Signals
from tasks.workers.sequences import MicroBatching, Sequences

LAYOUTS = {
    "shared": {"use_prefix_grouper": True, "use_remove_padding": True},
    "packed": {"use_prefix_grouper": False, "use_remove_padding": True},
    "padded": {"use_prefix_grouper": False, "use_remove_padding": False},
}
"""How sequences are to lie in a forward pass, by `actor.use_prefix_grouper` and `model.use_remove_padding`."""

MODES = {"float32 weights, bfloat16 compute": ("float32", "bfloat16"), "bfloat16 weights": ("bfloat16", "bfloat16")}
EXACT = ("float32", "float32")


class Check:
    """The whole measurement."""

    def __init__(self, options: Options, out: Path) -> None:
        self.options, self.sizes, self.device = options, options.sizes, options.device
        self.clock = Clock(options, len(MODES) * (1 + 2 * len(options.layouts)))
        self.seqs = build_batch(self.sizes)
        self.checked = self.seqs.take(np.arange(self.sizes.checked))
        self.micro_tokens, self.rows_at_a_time = self.sizes.micro_tokens, len(self.seqs.group)
        self.report = Report(out, _about(options))

    def run(self) -> None:
        """Measure everything; what is known is in the report at any time."""
        with tempfile.TemporaryDirectory() as place:
            self.folder = Path(place)
            build_model(self.folder, self.sizes)
            self.tokenizer = load_tokenizer(self.configuration(EXACT, "padded").actor_rollout_ref.model)
            exact = self.log_probs(self.worker(EXACT, "padded"), self.checked)
            for mode, types in MODES.items():
                self.free()
                try:
                    self.measure_mode(mode, types, exact)
                except torch.OutOfMemoryError as error:
                    self.no_room(mode, error)
        self.report.write(self.clock.elapsed_s)

    def measure_mode(self, mode: str, types: tuple[str, str], exact: np.ndarray) -> None:
        """All stages in one pair of types. Updates come last: they move the weights that are compared."""
        # Loaded so that sequences can be packed.
        worker = self.worker(types, "packed")
        engine = TransformersEngine(worker, self.tokenizer)
        self.compare_sampler(worker, engine, mode)
        longest = self.sizes.response_tokens
        self.stage(mode, "generate", "", partial(self.generate, worker, engine, types), longest)
        for layout in self.options.layouts:
            worker.follow(self.configuration(types, layout))
            name = self.layout_name(worker, training=False)
            self.compare(mode, f"log-prob, {name}, from float32", self.log_probs(worker, self.checked), exact)
            self.stage(mode, "log-prob", name, partial(self.log_prob, worker), self.sizes.prompts)
        for layout in self.options.layouts:
            worker.follow(self.configuration(types, layout))
            name, old = self.layout_name(worker, training=True), self.log_probs(worker, self.seqs)
            self.stage(mode, "update", name, partial(self.update, worker, old), self.sizes.prompts)

    def configuration(self, types: tuple[str, str], layout: str) -> RunConfig:
        """A run's configuration, as far as worker and engine read it."""
        flags = LAYOUTS[layout]
        model = {
            "path": str(self.folder),
            "dtype": types[0],
            "use_remove_padding": flags["use_remove_padding"],
            "enable_gradient_checkpointing": self.options.recompute,
        }
        actor = {
            "use_prefix_grouper": flags["use_prefix_grouper"],
            "optim": {"lr": 1e-6},
            "fsdp_config": {"mixed_precision": {"param_dtype": types[1]}},
        }
        rollout = {"n": self.sizes.n, "max_num_seqs": self.rows_at_a_time, "tensor_model_parallel_size": 1}
        policy = {"model": model, "actor": actor, "rollout": rollout}
        return RunConfig.model_validate({"actor_rollout_ref": policy, "trainer": {"device": self.device.type}})

    def worker(self, types: tuple[str, str], layout: str) -> PolicyWorker:
        """A policy worker on the device."""
        return PolicyWorker(self.configuration(types, layout), total_steps=1, with_reference=False)

    def layout_name(self, worker: PolicyWorker, *, training: bool) -> str:
        """How the worker really lays sequences: what is asked for may not be possible."""
        return worker.layout(training=training).value

    # ------------------------------------------------------------------------------------------------------ the stages

    @property
    def micro(self) -> MicroBatching:
        """The present limit of a micro-batch."""
        return MicroBatching(None, self.micro_tokens)

    def first(self, groups: int) -> Sequences:
        """The first groups of the batch."""
        return self.seqs.take(np.flatnonzero(self.seqs.group < groups))

    def log_probs(self, worker: PolicyWorker, seqs: Sequences) -> np.ndarray:
        """[response tokens] log-probs."""
        return worker.log_probs(seqs, self.micro, temperature=1.0).log_probs.values

    def generate(
        self, worker: PolicyWorker, engine: TransformersEngine, types: tuple[str, str], length: int
    ) -> tuple[int, float]:
        """Sample `length` tokens for every row; (tokens, no operations)."""
        # The engine reads the rows at a time from its worker's configuration.
        worker.follow(self.configuration(types, "packed"))
        sampling = Sampling(max_tokens=length, ignore_eos=True)
        made = engine.generate(self.seqs.prompts, self.seqs.group, np.arange(len(self.seqs.group)), sampling)
        return len(made.response_ids.values), 0.0

    def log_prob(self, worker: PolicyWorker, groups: int) -> tuple[int, float]:
        """Log-probs and entropy; (tokens, operations)."""
        seqs = self.first(groups)
        self.log_probs(worker, seqs)
        return int(seqs.lengths().sum()), self.flops(worker, seqs, training=False)

    def update(self, worker: PolicyWorker, old: np.ndarray, groups: int) -> tuple[int, float]:
        """One optimizer step over one mini-batch; (tokens, operations)."""
        seqs = self.first(groups)
        offsets, count = seqs.responses.offsets, len(seqs.responses.values)
        advantages = np.repeat(np.where(np.arange(len(seqs.group)) % 2, 1.0, -1.0), seqs.responses.lengths)
        signals = Signals(
            Ragged(advantages.astype(np.float32), offsets),
            Ragged(np.ones(count, dtype=bool), offsets),
            Ragged(old[:count], offsets),
            None,
            None,
            seqs.group,
        )
        worker.update(seqs, signals, [[np.arange(len(seqs.group))]], self.micro, step=1)
        return int(seqs.lengths().sum()), 3 * self.flops(worker, seqs, training=True)

    def flops(self, worker: PolicyWorker, seqs: Sequences, *, training: bool) -> float:
        """Operations of a forward pass in the worker's present layout."""
        shared = worker.layout(training=training) is Layout.SHARED_PROMPTS
        return forward_flops(self.sizes, seqs, self.micro, shared=shared)

    def stage(self, mode: str, stage: str, layout: str, work: Work, most: int) -> None:
        """Measure a stage and note it; where memory does not suffice, with less at once, as far as there is less."""
        while True:
            try:
                seconds, runs, tokens, flops = self.clock.measure(work, most)
            except torch.OutOfMemoryError as error:
                lack = str(error).splitlines()[0]
            else:
                mfu = flops / seconds / (self.options.peak * 1e12) if self.options.peak and flops else None
                at_once = self.rows_at_a_time if stage == "generate" else self.micro_tokens
                timing = Timing(mode, stage, layout, at_once, tokens, seconds, runs, mfu, self.peak_gib())
                self.report.timings.append(timing)
                break
            # Out of the handler, whose traceback holds tensors.
            self.free()
            if not self.shrink(stage):
                self.no_room(f"{mode}, {stage} {layout}", lack)
                break
            limits = f"{self.rows_at_a_time} rows sampled at a time, {self.micro_tokens} tokens in a micro-batch"
            print(f"{stage}: out of memory ({lack}). Again with {limits}.", flush=True)
        self.clock.stages_left -= 1
        self.free()
        self.report.write(self.clock.elapsed_s)

    def no_room(self, where: str, lack: object) -> None:
        """Note that memory does not suffice."""
        advice = "Try --gradient-checkpointing, or a device with more memory."
        self.report.problems.append(f"{where}: no room in memory: {lack} {advice}")

    def shrink(self, stage: str) -> bool:
        """Halve what the stage holds at a time; whether there was anything to halve."""
        if stage == "generate" and self.rows_at_a_time >= 2 * self.sizes.n:
            self.rows_at_a_time //= 2
            return True
        if stage != "generate" and self.micro_tokens >= 2 * (self.sizes.prompt_tokens + self.sizes.response_tokens):
            self.micro_tokens //= 2
            return True
        return False

    def free(self) -> None:
        """Give back what nothing refers to, so that a stage's memory is its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def peak_gib(self) -> float | None:
        """Most memory that torch held on the device since the stage's warm-up."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None

    # ------------------------------------------------------------------------------------------------------ comparing

    def compare_sampler(self, worker: PolicyWorker, engine: TransformersEngine, mode: str) -> None:
        """Log-probs of sampled tokens: the sampler's and the worker's."""
        seqs = self.first(max(self.sizes.checked // self.sizes.n, 1))
        sampling = Sampling(max_tokens=min(self.sizes.response_tokens, 64), ignore_eos=True)
        made = engine.generate(seqs.prompts, seqs.group, np.arange(len(seqs.group)), sampling)
        assert made.log_probs is not None
        ours = self.log_probs(worker, Sequences(seqs.prompts, seqs.group, made.response_ids))
        self.compare(mode, "sampler, from log-prob", made.log_probs.values, ours)

    def compare(self, mode: str, what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Note how far log-probs are from others."""
        gaps = np.abs(ours.astype(np.float64) - theirs)
        self.report.add_gap(Gap(mode, what, len(gaps), float(gaps.mean()), float(gaps.max())))


def _about(options: Options) -> dict[str, Any]:
    return {
        "device": device_name(options.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "float32_products": torch.get_float32_matmul_precision(),
        "peak_tflops": options.peak,
        "gradient_checkpointing": options.recompute,
        "sizes": asdict(options.sizes),
    }


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return platform.machine()


def options_of(arguments: argparse.Namespace) -> Options:
    """What the command line asks for.

    Raises:
        ValueError: torch sees no CUDA device.
    """
    device = torch.device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no CUDA device. --tiny runs on the processor.")
    return Options(
        TINY if arguments.tiny else Sizes(),
        device,
        arguments.layouts or Options.layouts,
        arguments.repeats,
        arguments.peak_tflops or peak_tflops(device_name(device)),
        arguments.gradient_checkpointing,
        arguments.limit_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the processor")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda, unless --tiny")
    for layout in LAYOUTS:
        words = f"measure {layout} sequences; without such a flag: {' and '.join(Options.layouts)}"
        parser.add_argument(f"--{layout}", dest="layouts", action="append_const", const=layout, help=words)
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bfloat16 rate; by default from its name")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again: less memory")
    parser.add_argument("--repeats", type=int, default=Options.repeats, help="most runs of a stage")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time for everything")
    given = parser.parse_args(arguments)
    try:
        check = Check(options_of(given), given.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    alarm = threading.Timer(given.limit_s, _time_is_up, [given.out])
    alarm.daemon = True
    alarm.start()
    try:
        check.run()
    finally:
        alarm.cancel()
    print((given.out / "gpu_check.md").read_text(encoding="utf-8"))
    return 1 if check.report.problems else 0


def _time_is_up(out: Path) -> None:
    print(f"error: time is up; {out} holds what was measured", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
