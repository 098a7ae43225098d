"""The `vllm` rollout engine: samples with vLLM in a process of its own, from weights that are handed to it in a folder.

vLLM changes threads and random numbers of the process it is in, and is of no use after an exception: so it has its own,
which is watched, replaced when it dies, and never outlives this one. Prompts, seeds and responses travel as .npy files.

A version of the policy counts as loaded when vLLM's log-probs of a fixed row of tokens, long enough to fill a block of
its prefix cache, are those that the trainer computed when it wrote the folder (tasks/engines/hand_over.py).

In float32 a seed gives the same tokens whatever else is in the batch; in bfloat16 nearly always.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.engines import vllm_process
from tasks.engines.engine_process import EngineDied, EngineFailed, EngineProcess, WeightsNotTaken
from tasks.engines.policy_folder import CHECK_IDS, MEAN_GAP, Held, end_tokens, fault_of, read_policy
from tasks.engines.protocol import Responses, Sampling, response_limits
from tasks.engines.scratch import own_folder
from tasks.engines.vllm_settings import (
    arguments,
    check_supported,
    compute_dtype,
    context_tokens,
    environment,
    log_probs_mode,
    model_sizes,
)

__all__ = ["EngineDied", "EngineFailed", "VllmEngine", "WeightsNotTaken"]

STARTUP, SILENCE = (f"actor_rollout_ref.rollout.{name}" for name in ("engine_startup_s", "engine_silence_s"))
SHARED_MEMORY = Path("/dev/shm")


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer: the end token, and the rest where there are stop texts."""

    eos_token_id: int | None

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Texts of rows of token ids."""

    def save_pretrained(self, folder: Path) -> Any:
        """Write it to a folder."""

    def __len__(self) -> int:
        """How many tokens it knows."""


class VllmEngine:
    """Samples from the policy version that was loaded last."""

    def __init__(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        *,
        device: str = "cpu",
        devices: Sequence[str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Nothing is started before the first `load`.

        Args:
            cfg: the run's configuration.
            tokenizer: that of the run.
            device: cpu | cuda.
            devices: the replica's, as CUDA_VISIBLE_DEVICES names them; None: those that this process sees.
            log: file for vLLM's output, which is appended to; None: in a folder that goes with the engine.

        Raises:
            ValueError: the configuration asks for what vLLM cannot do.
        """
        check_supported(cfg)
        self._cfg, self._tokenizer, self._device, self._devices, self._log = cfg, tokenizer, device, devices, log
        wanted = cfg.actor_rollout_ref.rollout.engine_python or sys.executable
        found = shutil.which(wanted)
        if found is None:
            raise ValueError(
                f"actor_rollout_ref.rollout.engine_python={wanted} is no program. Name the bin/python of an "
                "environment with vLLM (docs/engines.md), or leave it out."
            )
        # In full, since the process starts in another folder; links stay, by which a Python knows its environment.
        self._python = str(Path(found).absolute())
        self._with_texts = bool(cfg.actor_rollout_ref.rollout.stop)
        self._scratch: Path | None = None
        self._process: EngineProcess | None = None
        self._held: Held | None = None
        self._asleep, self._started = False, 0

    # ---------------------------------------------------------------------------------------------------------- weights

    @property
    def policy_version(self) -> int:
        """Version of the loaded policy; -1: none."""
        return -1 if self._held is None else self._held.version

    @property
    def policy_digest(self) -> str:
        """Digest of the loaded weights."""
        return "" if self._held is None else self._held.digest

    @property
    def process(self) -> EngineProcess | None:
        """The process vLLM runs in; None: none is running."""
        return self._process

    def holds(self, policy_version: int, policy_digest: str) -> bool:
        """Whether these weights are loaded, and could be again."""
        held = self._held
        return (
            held is not None and (held.version, held.digest) == (policy_version, policy_digest) and held.folder.exists()
        )

    def new_folder(self, policy_version: int, needed_bytes: int) -> Path:
        """An empty folder for the next policy; that of the one before is gone. In shared memory where there is room."""
        place = self.scratch(needed_bytes) / "policy"
        shutil.rmtree(place, ignore_errors=True)
        folder = place / f"{policy_version:06d}"
        folder.mkdir(parents=True)
        return folder

    def scratch(self, needed_bytes: int = 0) -> Path:
        """The engine's own folder, which goes with it."""
        if self._scratch is None:
            room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed_bytes + 2**28
            self._scratch = own_folder(SHARED_MEMORY if room else Path(tempfile.gettempdir()), "grpoflow-vllm")
        return self._scratch

    def load(self, folder: Path, policy_version: int, policy_digest: str) -> None:
        """Load the policy that `write_policy` has written, and prove it.

        Args:
            folder: in Hugging Face format, adapters merged; it must stay as it is until another one is loaded.
            policy_version: that it must be of.
            policy_digest: that its weights must have.

        Raises:
            ValueError: the folder is not of this policy, or not complete.
            WeightsNotTaken: vLLM computes other log-probs than the policy.
            EngineDied: the process died or hangs; calling again starts another one.
        """
        wanted = read_policy(folder, policy_version, policy_digest)
        before, self._held = self._held, None
        if self._running() is None:
            self._start(folder)
            before = None
        else:
            missed = self._call("load", STARTUP, policy=str(folder))["missed"]
            if missed:
                self._end()
                raise WeightsNotTaken(f"vLLM found no weights for {', '.join(missed[:5])} ({len(missed)}) in {folder}")
        self._prove(wanted, before)
        self._held = wanted

    def _prove(self, wanted: Held, before: Held | None) -> None:
        place = self._call_folder()
        shutil.copy(wanted.folder / CHECK_IDS, place / "ids.npy")
        cached = self._call("score", STARTUP, folder=str(place))["cached"]
        got = np.load(place / "log_probs.npy", allow_pickle=False)
        largest = MEAN_GAP.get(compute_dtype(self._cfg, self._device), MEAN_GAP["bfloat16"])
        fault = fault_of(wanted.log_probs, got, cached, None if before is None else before.log_probs, largest)
        if fault:
            self._end()
            raise WeightsNotTaken(
                f"vLLM was given policy {wanted.version} (digest {wanted.digest[:12]}) from {wanted.folder}, but "
                f"{fault}. Nothing was sampled. Set actor_rollout_ref.rollout.name=transformers if vLLM computes this "
                "model otherwise than transformers does."
            )

    # --------------------------------------------------------------------------------------------------------- sampling

    def generate(self, prompts: Ragged, group: np.ndarray, seeds: np.ndarray, sampling: Sampling) -> Responses:
        """Sample N responses; see the protocol. Each is a request of its own.

        Raises:
            ValueError: a prompt is empty or longer than the context, or no policy is loaded.
            EngineDied: the process died or hangs; calling again starts another one with the same weights.
        """
        if self._held is None:
            raise ValueError("no policy is loaded into vLLM; load one, or hand_over the trainer's")
        context = context_tokens(self._cfg, model_sizes(self._held.folder))
        limits = response_limits(prompts, group, sampling, context)
        if len(group) == 0:
            return Responses(Ragged.from_rows([], np.int32), None, [], self._notes(sampling, ""))
        self._be_ready(self._held, sampling)
        place = self._call_folder()
        arrays = {
            "prompts": prompts.values,
            "offsets": prompts.offsets,
            "group": group,
            "seeds": seeds,
            "limits": limits,
        }
        for name, array in arrays.items():
            np.save(place / f"{name}.npy", array, allow_pickle=False)
        self._call("generate", SILENCE, folder=str(place), sampling=self._sampling(sampling))
        return self._read(place, limits, sampling)

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        """The arguments of vLLM's SamplingParams that all requests share."""
        assert self._held is not None
        ends = [] if sampling.ignore_eos else end_tokens(self._held.folder, self._tokenizer.eos_token_id)
        filters = {} if sampling.is_greedy else {"top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
        texts = {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
        return {
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "stop_token_ids": ends,
            "ignore_eos": sampling.ignore_eos,
            "log_probs": sampling.log_probs,
            "detokenize": bool(sampling.stop),
            **filters,
            **(texts if sampling.stop else {}),
        }

    def _read(self, place: Path, limits: np.ndarray, sampling: Sampling) -> Responses:
        names = ("tokens", "lengths", "stopped", *(["log_probs"] if sampling.log_probs else []))
        tokens, lengths, stopped, *log_probs = (np.load(place / f"{name}.npy", allow_pickle=False) for name in names)
        odd = (
            len(lengths) != len(limits)
            or lengths.sum() != len(tokens)
            or (lengths < 1).any()
            or (lengths > limits).any()
        )
        if odd or any(len(row) != len(tokens) or not np.isfinite(row).all() for row in log_probs):
            self._end()
            raise EngineFailed(f"vLLM's responses are not what was asked for; they lie in {place}")
        assert self._process is not None
        return Responses(
            response_ids=Ragged.from_lengths(tokens, lengths),
            log_probs=Ragged.from_lengths(log_probs[0], lengths) if log_probs else None,
            finish_reason=["stop" if stop else "length" for stop in stopped],
            notes=self._notes(sampling, self._process.about["version"]),
        )

    def _notes(self, sampling: Sampling, version: str) -> dict[str, Any]:
        """What a reader of the log-probs must know."""
        chosen = [f"top_k={sampling.top_k}"] if sampling.top_k > 0 else []
        chosen += [f"top_p={sampling.top_p}"] if sampling.top_p < 1 else []
        filters = "no filter" if not chosen else ", ".join(chosen)
        raw, greedy = log_probs_mode(self._cfg) == "raw_logprobs", sampling.is_greedy
        at_one = greedy or raw or sampling.temperature == 1
        return {
            "log_probs": "raw" if raw and not greedy and sampling.temperature != 1 else "processed",
            "temperature": 1.0 if at_one else sampling.temperature,
            "filters": "none" if greedy or raw or not chosen else filters,
            "sampled_with": "greedy" if greedy else filters,
            "engine": f"vllm {version} on {self._device}".replace("  ", " "),
        }

    # ------------------------------------------------------------------------------------------------------ the process

    def log_to(self, log: Path) -> None:
        """Append what vLLM prints to another file, from the next start of its process on."""
        self._log = log

    def sleep(self) -> None:
        """Give the device's memory back until the next call, where the platform can and `free_cache_engine` is set."""
        wanted = self._device == "cuda" and self._cfg.actor_rollout_ref.rollout.free_cache_engine
        if wanted and not self._asleep and self._running() is not None:
            self._call("sleep", STARTUP)
            self._asleep = True

    def wake(self) -> None:
        """Take the memory again. `load` and `generate` do so themselves."""
        if self._asleep and self._process is not None:
            self._asleep = False
            self._call("wake", STARTUP)

    def close(self) -> None:
        """End the process and remove the engine's folder. The engine can be loaded anew."""
        if self._process is not None:
            self._process.close()
        self._process, self._held, self._asleep = None, None, False
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = None

    def _be_ready(self, held: Held, sampling: Sampling) -> None:
        """Have a running process with the held weights, and with a tokenizer where texts are to be seen."""
        if sampling.stop and not self._with_texts:
            self._with_texts = True
            self._end()
        if self._running() is None:
            self._start(held.folder)
            self._prove(held, None)
        self.wake()

    def _running(self) -> EngineProcess | None:
        if self._process is not None and not self._process.alive:
            self._end()
        return self._process

    def _start(self, folder: Path) -> None:
        self._started += 1
        place = self.scratch() / f"process-{self._started}"
        place.mkdir()
        script = Path(shutil.copy(str(vllm_process.__file__), place / "vllm_process.py"))
        tokenizer = self._save_tokenizer() if self._with_texts else None
        own = Path(self._python) != Path(sys.executable)
        self._asleep = False
        self._process = EngineProcess(
            self._python,
            script,
            {"device": self._device, "arguments": arguments(self._cfg, self._device, folder, tokenizer)},
            environment(self._cfg, self._device, self._devices, own),
            self._log or self.scratch() / "vllm.log",
            self.scratch(),
            self._cfg.actor_rollout_ref.rollout.engine_startup_s,
        )
        if tokenizer is not None:
            self._check_texts()

    def _save_tokenizer(self) -> Path:
        folder = self.scratch() / "tokenizer"
        if not folder.exists():
            self._tokenizer.save_pretrained(folder)
        return folder

    def _check_texts(self) -> None:
        """Refuse to look for stop texts in other texts than the run's tokenizer makes."""
        size = len(self._tokenizer)
        ids = list(range(0, size, max(size // 64, 1)))
        theirs = self._call("decode", SILENCE, ids=ids)["text"]
        ours = self._tokenizer.batch_decode([ids], skip_special_tokens=False)[0]
        if theirs != ours:
            self._end()
            raise ValueError(
                f"vLLM's tokenizer makes {theirs[:80]!r} of token ids that are {ours[:80]!r} here, so it cannot look "
                "for stop texts. Leave actor_rollout_ref.rollout.stop out, or set actor_rollout_ref.rollout.name="
                "transformers."
            )

    def _call(self, name: str, key: str, **arguments: Any) -> dict[str, Any]:
        """Call the process; one that fails is gone."""
        assert self._process is not None
        if name != "wake":
            self.wake()
        seconds = getattr(self._cfg.actor_rollout_ref.rollout, key.rsplit(".", 1)[1])
        try:
            return self._process.call(name, seconds, key, **arguments)
        except BaseException:
            self._process = None
            raise

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process, self._asleep = None, False

    def _call_folder(self) -> Path:
        place = self.scratch() / "call"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place
