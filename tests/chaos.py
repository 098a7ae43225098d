"""Kills a run at chosen moments, gives the same command again until it ends, and compares with a run left alone.

    python tests/chaos.py                    every moment, one after the other; prints a table
    python tests/chaos.py --one-in 10        every tenth of them
    python tests/chaos.py --only SIGTERM     those whose description contains this
    python tests/chaos.py --folder DIR       keep everything below DIR instead of a temporary folder

The run: 8 steps over two shuffled epochs, two mini-batches per step, a warm-up, the adaptive KL weight in the reward, a
checkpoint every 3 steps of which 2 are kept, a validation every 4, tracking in a local MLflow store, no Prefect.

A moment is a commit point (a rename, a sync or a removal below the folder of runs, before or after it) or the middle of
a stage. Which moments there are is read from a run that writes all of them down. At a commit point the process ends
without another instruction; in the middle of a stage it gets SIGKILL or SIGTERM.

A fork server imports everything once, with no thread of its own, and forks for each attempt.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STEPS = 8
CRASHED = 99
"""Exit code of a process that ended at a commit point."""
ATTEMPT_LIMIT_S = 240.0
ENDED_BY = {"crash": CRASHED, "SIGKILL": -signal.SIGKILL, "SIGTERM": 128 + signal.SIGTERM}
"""Exit code by kind of kill."""
GRACE_0 = "trainer.stop_grace_s=0"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Kill:
    """One end of a process.

    Attributes:
        how: `crash`, `SIGKILL` or `SIGTERM`.
        call: `rename`, `fsync`, `unlink`, `rmdir`, `rmtree`, or `stage`: the middle of one.
        where: the path it concerns, below the folder of runs; of a stage, `000004/updates`.
        nth: which of the calls with this path.
        moment: `before` or `after` the call; of a stage, `within`.
        delay_s: of a stage, how long after its beginning.
        abandons: SIGTERM gives the stage no time to finish.
        sent: wait at the moment until MLflow has this step.
    """

    how: str
    call: str
    where: str
    nth: int = 1
    moment: str = "within"
    delay_s: float = 0.0
    abandons: bool = False
    sent: int | None = None

    def __str__(self) -> str:
        how = f"{self.how} without grace" if self.abandons else self.how
        place = f"{self.call} {self.where}" + (f" #{self.nth}" if self.nth > 1 else "")
        place += "" if self.sent is None else f" when MLflow has step {self.sent}"
        return f"{how} {self.moment} {place}"

    @property
    def kind(self) -> str:
        """How and what, for counting."""
        how = f"{self.how} without grace" if self.abandons else self.how
        return f"{how} {self.moment} {'a stage' if self.call == 'stage' else 'a commit point'}"


@dataclass
class Trial:
    """One run and how it went.

    Attributes:
        kills: of its first attempts, in order.
        codes: exit code of each attempt.
        wrong: what differs from the run left alone, or should not be there; [] is what is wanted.
        seconds: how long it took.
    """

    kills: Sequence[Kill]
    codes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------- within the process


class Watch:
    """Names every commit point and every stage as it comes, writes it down, and ends the process where it is told."""

    def __init__(self, below: Path, kill: Kill | None, log: Path | None) -> None:
        self._below = f"{below.resolve()}/"
        self._kill = kill
        self._log = log.open("a", buffering=1) if log else None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def install(self) -> None:
        """Put itself around the calls that commit, and around the opening of stages."""
        self._around(os, "rename", lambda _source, target, **_: target)
        self._around(os, "replace", lambda _source, target, **_: target)
        self._around(os, "fsync", lambda descriptor: f"/proc/self/fd/{descriptor}")
        for name in ("unlink", "rmdir"):
            self._around(os, name, _path_in_folder)
        self._around(shutil, "rmtree", lambda path, *_, **__: path)
        self._watch_stages()

    def _around(self, module: Any, name: str, path_of: Callable[..., Any]) -> None:
        original = getattr(module, name)

        def hooked(*args: Any, **options: Any) -> Any:
            where = self._name(path_of(*args, **options))
            if where is None:
                return original(*args, **options)
            nth = self._count(name, where)
            self._pass(name, where, nth, "before")
            result = original(*args, **options)
            self._pass(name, where, nth, "after")
            return result

        setattr(module, name, hooked)

    def _watch_stages(self) -> None:
        from tasks.stage import Step

        original = Step.open

        def opened(step: Step, stage: str, **options: Any) -> Any:
            result = original(step, stage, **options)
            where = f"{step.index:06d}/{stage}"
            self._pass("stage", where, self._count("stage", where), "within")
            return result

        Step.open = opened  # type: ignore[method-assign]

    def _name(self, path: Any) -> str | None:
        """A path below the folder of runs, without what differs from process to process; None: another path."""
        opened = str(path).startswith("/proc/self/fd/")
        text = str(Path(path).readlink() if opened else Path(path).absolute())
        if not text.startswith(self._below) or "/mlflow" in text:
            return None
        text = text.removeprefix(self._below).replace(f".{os.getpid()}.aside", ".PID.aside")
        return re.sub(r"\.[0-9a-f]{8}\.aside", ".HEX.aside", text)

    def _count(self, call: str, where: str) -> int:
        with self._lock:
            self._counts[call, where] += 1
            return self._counts[call, where]

    def _pass(self, call: str, where: str, nth: int, moment: str) -> None:
        if self._log is not None:
            line = {"call": call, "where": where, "nth": nth, "moment": moment, "at": time.monotonic()}
            self._log.write(json.dumps(line) + "\n")
        kill = self._kill
        if kill is None or (kill.call, kill.where, kill.nth, kill.moment) != (call, where, nth, moment):
            return
        if kill.sent is not None:
            self._wait_until_sent(kill.sent)
        if kill.how == "crash":
            os._exit(CRASHED)
        number = getattr(signal, kill.how)
        if kill.delay_s:
            timer = threading.Timer(kill.delay_s, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
        else:
            os.kill(os.getpid(), number)

    def _wait_until_sent(self, step: int) -> None:
        log = Path(self._below) / "chaos" / "run" / "tracking.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (log.exists() and f'"step": {step},' in log.read_text()):
            time.sleep(0.01)


def _path_in_folder(path: Any, *_: Any, dir_fd: int | None = None) -> Any:
    return path if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink() / path


def train(request: dict[str, Any]) -> None:
    """What `grpoflow train` does, watched."""
    from flows.cli import main

    kill = Kill(**request["kill"]) if request.get("kill") else None
    log = Path(request["watch"]) if request.get("watch") else None
    Watch(Path(request["below"]), kill, log).install()
    sys.argv = ["grpoflow", "train", request["config"], *request.get("overrides", ())]
    main()


def make_inputs(request: dict[str, Any]) -> None:
    """Model, tokenizer, prompts, reward function, configuration, and an MLflow store that has its tables."""
    import torch
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM

    from flows.mlflow_store import open_store
    from tasks.warm_start.word_problems import build_tokenizer, save_tokenizer

    folder = Path(request["folder"])
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    rest = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
    shape = AutoConfig.for_model("llama", **sizes, **ids, **rest, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(shape)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=0.25)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    questions = [f"{'Tom has 1 2 apples ' * (1 + i % 3)}." for i in range(16)]
    lines = [json.dumps({"prompt": text, "answer": str(i), "data_source": "toy"}) for i, text in enumerate(questions)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "val.jsonl").write_text("\n".join(lines[:4]))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(_configuration(folder)))
    open_store(f"sqlite:///{folder / 'mlflow.db'}")


def _configuration(folder: Path) -> dict[str, Any]:
    return {
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "val_files": str(folder / "val.jsonl"),
            "train_batch_size": 4,
            "max_prompt_length": 40,
            "max_response_length": 6,
            "shuffle": True,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model"), "enable_gradient_checkpointing": False},
            "actor": {
                "ppo_mini_batch_size": 2,
                "ppo_micro_batch_size_per_gpu": 8,
                "shuffle": True,
                "optim": {"lr": 1e-2, "lr_warmup_steps": 5, "lr_scheduler_type": "cosine"},
            },
            "rollout": {"n": 4, "tensor_model_parallel_size": 1, "log_prob_micro_batch_size_per_gpu": 8},
            "ref": {"log_prob_micro_batch_size_per_gpu": 8},
        },
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "horizon": 100, "target_kl": 0.1},
        },
        "custom_reward_function": {"path": str(folder / "reward.py")},
        "reward": {"num_workers": 1},
        "trainer": {
            "project_name": "chaos",
            "experiment_name": "run",
            "n_gpus_per_node": 1,
            "device": "cpu",
            "total_epochs": 2,
            "save_freq": 3,
            "max_actor_ckpt_to_keep": 2,
            "test_freq": 4,
            "val_before_train": True,
        },
        "tracking": {"enabled": True},
        "orchestration": {"enabled": False},
    }


def describe(request: dict[str, Any]) -> None:
    """Everything of a finished run that must not depend on how often it was killed, as JSON."""
    below = Path(request["below"])
    from storage import open_run
    from storage.checkpoints import check_checkpoint, checkpoints

    run = open_run(below / "chaos" / "run")
    facts: dict[str, Any] = {"state": run.state, "steps": run.steps(), "finished": run.finished_steps()}
    for index in run.steps():
        view = run.step(index)
        for stage in view.stages():
            name = f"step {index} {stage}"
            facts[f"{name}: attempts"] = len(view.attempts(stage))
            facts.update({f"{name}: {key}": value for key, value in _facts_of(view, stage).items()})
        metrics = (view.record or {"metrics": {}})["metrics"]
        facts.update({f"step {index} metric {name}": value for name, value in metrics.items() if not _is_time(name)})
    for checkpoint in checkpoints(run.root):
        check_checkpoint(checkpoint)
        for path in sorted(checkpoint.folder.iterdir()):
            if path.suffix == ".safetensors" or path.name == "state.json":
                facts[f"checkpoint {checkpoint.step}: {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
        facts[f"checkpoint {checkpoint.step}: kl_coef"] = checkpoint.manifest.get("kl_coef")
    facts.update(_mlflow_facts(below, run))
    Path(request["answer"]).write_text(json.dumps(facts))


def _facts_of(view: Any, stage: str) -> dict[str, Any]:
    """What a reader of an artifact sees, but for measured seconds."""
    table = view.table(stage)
    manifest = view.manifest(stage)
    facts = {
        f"column {name}": hashlib.sha256(json.dumps(table[name].to_pylist(), default=str).encode()).hexdigest()[:16]
        for name in table.column_names
        if not _is_time(name)
    }
    if stage == "updates":
        facts.update(weights=table["weights_digest"].to_pylist()[-1], lr=table["lr"].to_pylist())
    notes = {name: value for name, value in manifest.notes.items() if not _is_time(name)}
    return {**facts, "notes": notes}


def _is_time(name: str) -> bool:
    """Whether a number is measured and differs from run to run."""
    return "second" in name or name.startswith(("timing", "perf/", "memory/")) or name.endswith("_s")


def _mlflow_facts(below: Path, run: Any) -> dict[str, Any]:
    """Runs, state, and for each metric the steps and whether they are those of the run, once each."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{below / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("chaos")
    found = client.search_runs([experiment.experiment_id])
    facts: dict[str, Any] = {"MLflow runs": len(found), "MLflow state": [each.info.status for each in found]}
    records = {index: run.step(index).record["metrics"] for index in run.steps() if run.step(index).record}
    wrong = []
    for name in sorted(found[0].data.metrics):
        history = client.get_metric_history(found[0].info.run_id, name)
        sent = Counter(metric.step for metric in history)
        wrong += [f"{name} at step {step}: {count} rows" for step, count in sent.items() if count > 1]
        wrong += [
            f"{name} at step {metric.step}: {metric.value} there, {records[metric.step][name]} here"
            for metric in history
            if name in records[metric.step] and records[metric.step][name] != metric.value
        ]
        facts[f"MLflow {name}: steps"] = sorted(sent)
    return {**facts, "MLflow wrong": wrong[:5]}


def describe_end(request: dict[str, Any]) -> None:
    """What a run that was told to end has left: its state here and in MLflow."""
    below = Path(request["below"])
    from mlflow import MlflowClient

    from storage import open_run

    facts: dict[str, Any] = {}
    if (below / "chaos" / "run" / "run.json").exists():
        run = open_run(below / "chaos" / "run")
        facts["state"] = run.state
        client = MlflowClient(f"sqlite:///{below / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("chaos")
        found = client.search_runs([experiment.experiment_id]) if experiment else []
        facts["MLflow"] = [each.info.status for each in found]
    Path(request["answer"]).write_text(json.dumps(facts))


# ------------------------------------------------------------------------------------------------------ the fork server

DEEDS = {"train": train, "inputs": make_inputs, "describe": describe, "describe_end": describe_end}


def serve() -> None:
    """Import everything, then answer each request, a line of JSON, with the exit code of a fork that did it."""
    _preload()
    print(json.dumps({"ready": True, "threads": _workers()}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _do(request)
        print(json.dumps({"code": _wait(pid)}), flush=True)


PRELOADED = (
    "mlflow.store.tracking.sqlalchemy_store",
    "transformers.models.llama.modeling_llama",
    "flows.train",
    "flows.mlflow_sender",
    "tasks.engines.transformers_engine",
    "tasks.warm_start.word_problems",
    "tasks.workers.policy",
)


def _preload() -> None:
    import logging

    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import torch

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    logging.getLogger("mlflow").setLevel(logging.ERROR)


def _workers() -> list[str]:
    """Threads besides this one that a fork would miss; those of allocators care for forks themselves."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if not name.startswith(("jemalloc", "polars-ooc"))][1:]


def _do(request: dict[str, Any]) -> None:
    """In the fork: do what is asked with output in a file, and end."""
    code = 1
    try:
        os.setsid()
        out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            DEEDS[request["do"]](request)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + ATTEMPT_LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1000
        time.sleep(0.005)


class Chaos:
    """A fork server and a folder: runs, left alone and killed. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._inputs = self.folder / "inputs"
        self._inputs.mkdir(parents=True)
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "server.txt").open("w"),
            text=True,
            env=one_thread(),
        )

    def __enter__(self) -> Chaos:
        ready = self._answer()
        if ready["threads"]:
            raise RuntimeError(f"the fork server has threads that a fork would miss: {ready['threads']}")
        self._ask(do="inputs", folder=str(self._inputs), out=str(self.folder / "inputs.txt"))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def new_root(self) -> Path:
        """An empty folder of runs, with an MLflow store that has its tables."""
        self._number += 1
        root = self.folder / f"{self._number:04d}" / "runs"
        root.mkdir(parents=True)
        shutil.copy(self._inputs / "mlflow.db", root / "mlflow.db")
        return root

    def command(self, root: Path, *overrides: str) -> list[str]:
        """Words behind `grpoflow train`."""
        return [str(self._inputs / "config.yaml"), f"storage.root={root}", *overrides]

    def attempt(self, root: Path, kill: Kill | None = None, watch: Path | None = None, *overrides: str) -> int:
        """Give the command once and return its exit code."""
        config, *words = self.command(root, *overrides, *([GRACE_0] if kill and kill.abandons else []))
        out = root.parent / "output.txt"
        with out.open("a") as file:
            file.write(f"---- {kill}\n")
        request = {"do": "train", "config": config, "overrides": words, "below": str(root), "out": str(out)}
        return self._ask(**request, kill=asdict(kill) if kill else None, watch=str(watch) if watch else None)

    def facts(self, root: Path, do: str = "describe") -> dict[str, Any]:
        """What a run has left."""
        answer = root.parent / "facts.json"
        answer.unlink(missing_ok=True)
        code = self._ask(do=do, below=str(root), answer=str(answer), out=str(root.parent / "output.txt"))
        if code:
            return {"reading the run": f"failed with code {code}: {last_line(root.parent / 'output.txt')}"}
        facts: dict[str, Any] = json.loads(answer.read_text())
        return facts

    def trial(self, kills: Sequence[Kill], expected: dict[str, Any]) -> Trial:
        """Run with kills until it ends by itself, and compare."""
        started = time.monotonic()
        root = self.new_root()
        trial = Trial(kills)
        for kill in kills:
            trial.codes.append(self.attempt(root, kill))
            if kill.how == "SIGTERM":
                trial.wrong += self._wrong_end(root, kill, trial.codes[-1])
            elif trial.codes[-1] != ENDED_BY[kill.how]:
                trial.wrong.append(f"exit code {trial.codes[-1]} where {kill} was to end it")
        trial.codes.append(self.attempt(root))
        if trial.codes[-1] != 0:
            trial.wrong.append(f"the last attempt: code {trial.codes[-1]}, {last_line(root.parent / 'output.txt')}")
        else:
            trial.wrong += differences(expected, self.facts(root))
        trial.wrong += [f"left behind: {path.relative_to(root)}" for path in leftovers(root)]
        trial.seconds = time.monotonic() - started
        if not trial.wrong:
            shutil.rmtree(root.parent)
        return trial

    def _wrong_end(self, root: Path, kill: Kill, code: int) -> list[str]:
        """What a run that was told to end should not have left."""
        facts = self.facts(root, "describe_end")
        if code == 0 and facts == {"state": "finished", "MLflow": ["FINISHED"]} and not kill.abandons:
            # The stage in flight was its last, and ended within the grace time.
            return []
        wrong = [] if code == ENDED_BY["SIGTERM"] else [f"exit code {code} where {kill} was to end it"]
        wrong += [f"after SIGTERM, left behind: {path.relative_to(root)}" for path in leftovers(root)]
        if facts.get("state", "killed") not in ("killed", "created") or "reading the run" in facts:
            wrong.append(f"after SIGTERM: {facts}")
        if set(facts.get("MLflow", ())) - {"KILLED"} and facts["state"] == "killed":
            wrong.append(f"after SIGTERM, in MLflow: {facts['MLflow']}")
        return wrong

    def _ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["code"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended; see {self.folder / 'server.txt'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def one_thread() -> dict[str, str]:
    """Environment of a process that computes on one thread."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **quiet}


def last_line(path: Path) -> str:
    """The last line of a text that says something."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


def leftovers(root: Path) -> list[Path]:
    """Temporary files, and attempts and checkpoints without a manifest."""
    half = [
        folder
        for pattern in ("*/*/steps/*/*/*", "*/*/checkpoints/*")
        for folder in root.glob(pattern)
        if folder.is_dir() and folder.suffix != ".aside" and not (folder / "manifest.json").is_file()
    ]
    return [*root.rglob("*.aside"), *half]


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The first facts that differ, in words."""
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    lines = [f"{name}: {found.get(name)!r} instead of {expected.get(name)!r}"[:300] for name in names[:4]]
    return lines + ([f"and {len(names) - 4} more"] if len(names) > 4 else [])


# ---------------------------------------------------------------------------------------------------------- the moments


def unkilled(chaos: Chaos) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """A run left alone: its facts, all moments that it passed, and its folder of runs."""
    root = chaos.new_root()
    watch = root.parent / "watch.jsonl"
    code = chaos.attempt(root, None, watch)
    if code:
        raise RuntimeError(f"the run left alone ended with {code}: {last_line(root.parent / 'output.txt')}")
    return chaos.facts(root), [json.loads(line) for line in watch.read_text().splitlines()], root


def moments(watched: Sequence[dict[str, Any]]) -> list[Kill]:
    """Where to kill: each kind of commit point, before or after it, and each stage in its middle.

    Paths that differ only in the number of the step are one kind; which of its steps is taken moves on from kind to
    kind, so that all steps have their share. A rename, which is what commits, has both sides taken; of the syncs and
    removals around it one side, in turn.
    """
    sent = [Kill("crash", "stage", f"{step:06d}/updates", sent=step - 1) for step in (1, 5)]
    return [*_crashes(watched), *_signals_in_stages(watched), *_signals_at_commit_points(watched), *sent]


def _crashes(watched: Sequence[dict[str, Any]]) -> Iterator[Kill]:
    for number, ((call, _), lines) in enumerate(_kinds(watched).items()):
        for shift, moment in enumerate(("before", "after")):
            if call == "rename" or number % 2 == shift:
                line = lines[(5 * number + shift + 1) % len(lines)]
                yield Kill("crash", line["call"], line["where"], line["nth"], moment)


def _signals_in_stages(watched: Sequence[dict[str, Any]]) -> Iterator[Kill]:
    stages: dict[str, list[tuple[str, float]]] = {}
    for where, seconds in _stage_seconds(watched).items():
        stages.setdefault(where.partition("/")[2], []).append((where, seconds))
    for number, places in enumerate(stages.values()):
        for shift, (how, abandons) in enumerate((("SIGKILL", False), ("SIGTERM", False), ("SIGTERM", True))):
            where, seconds = places[(3 * number + shift + 1) % len(places)]
            yield Kill(how, "stage", where, delay_s=max(seconds / 2, 0.001), abandons=abandons)


def _signals_at_commit_points(watched: Sequence[dict[str, Any]]) -> Iterator[Kill]:
    for number, lines in enumerate(_kinds(watched).values()):
        line = lines[(7 * number + 2) % len(lines)]
        if number % 6 == 0:
            yield Kill("SIGTERM", line["call"], line["where"], line["nth"], "after", abandons=number % 12 == 0)


def _kinds(watched: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in watched:
        if line["moment"] == "before":
            kinds.setdefault((line["call"], re.sub(r"\d{6}", "N", line["where"])), []).append(line)
    return kinds


def _stage_seconds(watched: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds from the opening of each stage to the rename of its manifest."""
    opened = {line["where"]: line["at"] for line in watched if line["call"] == "stage"}
    ended = {}
    for line in watched:
        match = re.fullmatch(r"chaos/run/steps/(\d{6}/\w+)/\d{4}/manifest\.json", line["where"])
        if match and line["call"] == "rename" and line["moment"] == "before":
            ended[match[1]] = line["at"]
    return {where: ended[where] - at for where, at in opened.items() if where in ended}


def several(watched: Sequence[dict[str, Any]]) -> list[list[Kill]]:
    """Runs that are killed more than once: in a stage, in the replay of the updates before it, at a checkpoint."""
    seconds = _stage_seconds(watched)
    run = "chaos/run"

    def within(where: str, how: str, abandons: bool = False) -> Kill:
        return Kill(how, "stage", where, delay_s=seconds[where] / 2, abandons=abandons)

    def rename(where: str, moment: str) -> Kill:
        return Kill("crash", "rename", f"{run}/{where}", moment=moment)

    return [
        [
            within("000002/rollouts", "SIGKILL"),
            within("000002/updates", "SIGTERM", True),
            within("000005/old_log_probs", "SIGKILL"),
            within("000005/updates", "SIGKILL"),
            rename("checkpoints/000006", "before"),
        ],
        [
            rename("steps/000005/updates/0001/manifest.json", "after"),
            # The first update that is made again after checkpoint 3.
            within("000004/updates", "SIGKILL"),
            rename("steps/000005/step.json", "before"),
            within("000008/advantages", "SIGTERM"),
            rename("checkpoints/.000003.removed.aside", "after"),
        ],
        [
            rename("steps/000001/rewards/0001/manifest.json", "before"),
            within("000001/updates", "SIGKILL"),
            rename("steps/000003/step.json", "after"),
            rename("checkpoints/000003", "after"),
            rename("steps/000004/val_rewards/0001/manifest.json", "after"),
        ],
    ]


def main() -> None:
    """Run the sweep and print a table; exit code 1 where a run was not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-in", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--list", action="store_true", help="print the moments and stop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, Chaos(options.folder or Path(temporary)) as chaos:
        expected, watched, _ = unkilled(chaos)
        plans = [[kill] for kill in moments(watched)] + several(watched)
        plans = [plan for plan in plans if options.only in ", ".join(map(str, plan))][:: options.one_in]
        if options.list:
            print("\n".join("; ".join(map(str, plan)) for plan in plans))
            return
        trials = []
        for number, plan in enumerate(plans, 1):
            trials.append(chaos.trial(plan, expected))
            _print(number, len(plans), trials[-1])
    print(table(trials))
    sys.exit(any(trial.wrong for trial in trials))


def _print(number: int, count: int, trial: Trial) -> None:
    verdict = "equal" if not trial.wrong else "NOT EQUAL"
    print(f"{number:3d}/{count} {verdict} {trial.seconds:5.1f} s {'; '.join(map(str, trial.kills))} {trial.codes}")
    for line in trial.wrong:
        print(f"        {line}")
    sys.stdout.flush()


def table(trials: Sequence[Trial]) -> str:
    """Runs by kind of kill, as a Markdown table."""
    kinds: dict[str, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(trial.kills[0].kind if len(trial.kills) == 1 else "several in one run", []).append(trial)
    lines = ["| kill | runs | equal |", "|---|---|---|"]
    lines += [f"| {kind} | {len(runs)} | {sum(not run.wrong for run in runs)} |" for kind, runs in kinds.items()]
    return "\n".join([*lines, f"| all | {len(trials)} | {sum(not trial.wrong for trial in trials)} |"])


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
