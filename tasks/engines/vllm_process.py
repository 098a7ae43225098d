"""The process in which vLLM runs: a script of its own, which needs vLLM and what vLLM needs, and nothing of ours.

`vllm_process.py SPEC` reads calls as JSON lines from one pipe and answers on another; arrays lie beside as .npy files.
`vllm_process.py --watch GROUP FOLDER` ends a process group and removes a folder if its own parent goes without a word.
vllm_engine.py copies this file into a folder of its own and runs it there with the Python that `rollout.engine_python`
names, so that vLLM's worker processes find it by name and no other module of this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALIVE_EVERY_S = 1.0
"""How often a call says that it goes on."""


class PolicyWeights:
    """What vLLM's workers can do besides their own: `worker_extension_cls`, called on each of them by name."""

    model_runner: Any
    model_config: Any

    def load_policy(self, folder: str) -> list[str]:
        """Load the weights of a Hugging Face folder over the present ones.

        Returns:
            Names of parameters that were given none.
        """
        model = self.model_runner.get_model()
        names = {name for name, _ in model.named_parameters()}
        taken: set[str] = set()
        load = model.load_weights

        def noted(weights: Any) -> Any:
            done = load(weights)
            taken.update(done or names)
            return done

        model.load_weights = noted
        try:
            self.model_runner.reload_weights(weights_path=folder)
        finally:
            del model.load_weights
        tied = _pack_tied_heads(model)
        return sorted(names - taken - tied)


def _pack_tied_heads(model: Any) -> set[str]:
    """Prepare output heads again that share the embedding's weights, of which some platforms keep a packed copy.

    A reload leaves that copy as it was: it prepares only modules that the files hold weights for.

    Returns:
        The names of their parameters.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    embedded = {id(weight) for name, weight in model.named_parameters(remove_duplicate=False) if "embed" in name}
    tied = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelLMHead) and id(module.weight) in embedded:
            module.quant_method.process_weights_after_loading(module)
            tied.add(f"{name}.weight")
    return tied


class Engine:
    """vLLM, and the calls that it answers."""

    def __init__(self, spec: dict[str, Any], say: Callable[..., None]) -> None:
        import vllm
        from vllm.platforms import current_platform

        kind = current_platform.device_type
        if kind != spec["device"]:
            raise RuntimeError(
                f"the vLLM of {sys.executable} is built for {kind or 'a device that is not here'}, but the policy is "
                f"on {spec['device']}"
            )
        self.say, self.llm = say, vllm.LLM(**spec["arguments"])
        self.about = {"version": vllm.__version__, "device": kind, "python": sys.executable}
        self._said_at = time.monotonic()

    def load(self, policy: str) -> dict[str, Any]:
        """Take the weights of a folder, forget the prompts that were computed with others."""
        missed = self.llm.collective_rpc("load_policy", args=(policy,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        return {"missed": sorted({name for names in missed for name in names})}

    def score(self, folder: str) -> dict[str, Any]:
        """Log-probs of a row of token ids, from its second one on, as the model stands.

        Returns:
            `cached`: the last one, with whatever the prefix cache has. All are written, computed without it.
        """
        import numpy as np
        from vllm import SamplingParams

        place = Path(folder)
        ids = np.load(place / "ids.npy", allow_pickle=False).tolist()
        one = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        last = SamplingParams(**one, logprobs=1, logprob_token_ids=[ids[-1]])
        whole = SamplingParams(**one, prompt_logprobs=0)
        (before,) = self._run([ids[:-1]], [last])
        (after,) = self._run([ids], [whole])
        chosen = [row[token].logprob for row, token in zip(after.prompt_logprobs[1:], ids[1:], strict=True)]
        np.save(place / "log_probs.npy", np.asarray(chosen, dtype=np.float64), allow_pickle=False)
        return {"cached": float(before.outputs[0].logprobs[0][ids[-1]].logprob)}

    def generate(self, folder: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """Sample one response for each row: a request of its own, with a seed of its own."""
        import numpy as np
        from vllm import SamplingParams

        place, log_probs = Path(folder), sampling.pop("log_probs")
        read = {name: np.load(place / f"{name}.npy", allow_pickle=False) for name in INPUTS}
        prompts = [part.tolist() for part in np.split(read["prompts"], read["offsets"][1:-1])]
        params = [
            SamplingParams(n=1, max_tokens=int(limit), seed=int(seed), logprobs=0 if log_probs else None, **sampling)
            for limit, seed in zip(read["limits"], read["seeds"], strict=True)
        ]
        outputs = [output.outputs[0] for output in self._run([prompts[g] for g in read["group"]], params)]
        lengths = np.asarray([len(output.token_ids) for output in outputs], dtype=np.int64)
        tokens = np.asarray([token for output in outputs for token in output.token_ids], dtype=np.int32)
        np.save(place / "lengths.npy", lengths, allow_pickle=False)
        np.save(place / "tokens.npy", tokens, allow_pickle=False)
        np.save(place / "stopped.npy", np.asarray([o.finish_reason == "stop" for o in outputs]), allow_pickle=False)
        if log_probs:
            said = [o.logprobs[i][token].logprob for o in outputs for i, token in enumerate(o.token_ids)]
            np.save(place / "log_probs.npy", np.asarray(said, dtype=np.float32), allow_pickle=False)
        return {"rows": len(outputs)}

    def decode(self, ids: list[int]) -> dict[str, Any]:
        """The text that vLLM's tokenizer makes of token ids."""
        return {"text": self.llm.get_tokenizer().decode(ids, skip_special_tokens=False)}

    def sleep(self) -> dict[str, Any]:
        """Give the device's memory back: weights to the host, caches away."""
        self.llm.sleep(level=1)
        return {}

    def wake(self) -> dict[str, Any]:
        """Take the memory again."""
        self.llm.wake_up()
        return {}

    def _run(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """Run requests to their end, in their order; every iteration of the engine is a sign of life."""
        self.llm.enqueue([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        finished: list[Any] = []
        while self.llm.llm_engine.has_unfinished_requests():
            finished += [output for output in self.llm.llm_engine.step() if output.finished]
            if time.monotonic() - self._said_at > ALIVE_EVERY_S:
                self.say(alive=len(finished))
                self._said_at = time.monotonic()
        return sorted(finished, key=lambda output: int(output.request_id))


INPUTS = ("prompts", "offsets", "group", "seeds", "limits")
CALLS = ("load", "score", "generate", "decode", "sleep", "wake")


def serve(spec: dict[str, Any]) -> None:
    """Start vLLM and answer calls until the pipe is closed. A call that fails is the last: vLLM does not recover."""
    replies = os.fdopen(spec["replies"], "w", encoding="utf-8")

    def say(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = Engine(spec, say)
        say(done=engine.about)
        with os.fdopen(spec["requests"], encoding="utf-8") as requests:
            for line in requests:
                request = json.loads(line)
                if (name := request.pop("call")) not in CALLS:
                    raise ValueError(f"there is no call {name}")
                say(done=getattr(engine, name)(**request))
    except BaseException as error:
        traceback.print_exc()
        say(failed=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


def end_group(group: int) -> None:
    """Kill a process group, and remove the shared memory and semaphores that its processes can no longer give back."""
    left = {path for pid in _group(group) for path in shared_files(pid)}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for path in left:
        path.unlink(missing_ok=True)


LEFT_BEHIND = ("psm_", "sem.mp-", "torch_")
"""How Python's multiprocessing and torch begin the names of what processes share."""


def _group(group: int) -> list[int]:
    """Processes of a group, also those whose parent is gone."""
    found = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(ValueError, ProcessLookupError):
            if os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found


def shared_files(pid: int) -> set[Path]:
    """Shared memory and semaphores that a process has in its memory."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return {path for path in paths if path.name.startswith(LEFT_BEHIND)}


def watch(group: int, folder: Path) -> None:
    """Wait for a byte at standard input, which is leave to go. When the parent is gone instead, leave nothing of it."""
    parent = os.getppid()
    while os.getppid() == parent:
        ready, _, _ = select.select([sys.stdin], [], [], 0.5)
        if ready and sys.stdin.buffer.read(1):
            return
        if ready:
            break
    end_group(group)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    if sys.argv[1] == "--watch":
        watch(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        # vLLM ends its workers by SIGTERM, which a rank does not take and its children would not either.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
