"""A run in MLflow, with a real server and the real default store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from postgres import postgres
from servers import free_port, mlflow_server, slow_door, wait_until

from flows.tracking import Tracker, deliver_pending, legal_name, refuse_other_server, short_value
from storage import RunWriter, StorageError, open_run
from storage.durable import append_json_line, read_json_lines, write_json
from tasks.config import RunConfig, StorageConfig, TrackingConfig, TrainerConfig
from tasks.data import PreparedPrompts, SourceFile


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), port):
        yield port


def config(root: Path, uri: str | None = None, project: str = "arithmetic", flush_timeout_s: float = 60) -> RunConfig:
    return RunConfig(
        trainer=TrainerConfig(project_name=project, experiment_name="first"),
        storage=StorageConfig(root=str(root)),
        tracking=TrackingConfig(uri=uri, flush_timeout_s=flush_timeout_s),
    )


def new_run(root: Path) -> RunWriter:
    run = RunWriter.create(root / "arithmetic" / "first", "first")
    run.append("opened", state="running")
    run.write_document("config.yaml", "trainer: {}\n")
    return run


def finish_step(run: RunWriter, index: int, **more: float | None) -> None:
    metrics = {"training/global_step": float(index), "critic/score/mean": index / 10, **more}
    run.finish_step(index, {"metrics": metrics})


def close(run: RunWriter, state: str) -> None:
    run.append("closed", state=state)
    run.__exit__()


def prompts() -> PreparedPrompts:
    table = pa.table(
        {"prompt_text": ["1+1?", "2+2?"], "prompt_ids": pa.array([[1, 2], [3]], pa.large_list(pa.int32()))}
    )
    return PreparedPrompts(table, {"read": 3, "kept": 2}, (SourceFile("/data/sums.parquet", 3, "ab" * 32),), "cd" * 32)


def client_of(uri: str):  # type: ignore[no-untyped-def]
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(uri: str, run_id: str, name: str = "critic/score/mean") -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client_of(uri).get_metric_history(run_id, name))


# ----------------------------------------------------------------------------------------------------- names and values


def test_names_become_legal_and_stay_readable() -> None:
    assert legal_name("critic/score/mean") == "critic/score/mean"
    assert legal_name("val-core/openai/gsm8k/acc/mean@4") == "val-core/openai/gsm8k/acc/mean_at_4"
    assert legal_name("timing_s/gen (ms)=x") == "timing_s/gen _ms__x"
    assert legal_name("/a//b/../c/") == "a/c"
    assert len(legal_name("x" * 400)) <= 250
    assert legal_name("x" * 400) != legal_name("x" * 399)


def test_a_long_value_is_cut_and_carries_its_length_and_digest() -> None:
    text = "a" * 7000
    assert short_value("short") == "short"
    assert short_value([1, None]) == "[1, null]"
    assert len(short_value(text)) == 500
    assert "7000 characters, SHA-256 " in short_value(text)
    assert short_value(text) != short_value("a" * 6999 + "b")


# ---------------------------------------------------------------------------------------------------- the default store


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of three steps with 300 parameters in the default store: its folder, the store's URI and the run's id."""
    root = tmp_path_factory.mktemp("runs")
    cfg = config(root)
    run = new_run(root)
    finish_step(run, 0, **{"val-core/sums/acc/mean@1": 0.5})
    with Tracker(run, cfg) as tracker:
        params = {f"some.key_{number}": number for number in range(299)}
        tracker.start({**params, "reward.prompt": "r" * 7000}, ["config.yaml"], {"train": prompts()})
        tracker.step_finished(0)
        for index in (1, 2, 3):
            finish_step(run, index, **({"actor/grad_norm": None} if index == 2 else {"actor/grad_norm": 1.5}))
            tracker.step_finished(index)
        close(run, "finished")
        delivery = tracker.finish("finished")
    assert delivery.problem is None and delivery.waiting == () and delivery.refused == ()
    assert delivery.sent == 4 and delivery.mlflow_run_id
    return run.root, delivery.uri, delivery.mlflow_run_id


def test_a_run_is_stored_in_the_runs_folder_with_one_value_per_metric_and_step(tracked: tuple[Path, str, str]) -> None:
    folder, uri, run_id = tracked
    assert uri == f"sqlite:///{folder.parents[1] / 'mlflow.db'}"
    assert history(uri, run_id) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert history(uri, run_id, "val-core/sums/acc/mean_at_1") == [(0, 0.5)]
    point = client_of(uri).get_metric_history(run_id, "critic/score/mean")[1]
    finished_at = open_run(folder).step(1).record["finished_at"]  # type: ignore[index]
    assert point.timestamp == round(1000 * datetime.fromisoformat(finished_at).timestamp())


def test_the_run_has_name_state_times_tags_and_its_experiment(tracked: tuple[Path, str, str]) -> None:
    folder, uri, run_id = tracked
    info, data = client_of(uri).get_run(run_id).info, client_of(uri).get_run(run_id).data
    assert (info.run_name, info.status) == ("first", "FINISHED")
    assert info.start_time <= info.end_time
    assert data.tags["grpoflow.run_id"] == open_run(folder).run_id
    assert client_of(uri).get_experiment(info.experiment_id).name == "arithmetic"
    assert info.artifact_uri.startswith((folder.parents[1] / "mlflow-artifacts").as_uri())


def test_a_value_that_is_no_number_is_left_out_and_named(tracked: tuple[Path, str, str]) -> None:
    _, uri, run_id = tracked
    assert history(uri, run_id, "actor/grad_norm") == [(1, 1.5), (3, 1.5)]
    tags = client_of(uri).get_run(run_id).data.tags
    assert json.loads(tags["grpoflow.no_value_since_step"]) == {"actor/grad_norm": 2}


def test_all_of_300_parameters_arrive_and_the_long_one_carries_a_digest(tracked: tuple[Path, str, str]) -> None:
    _, uri, run_id = tracked
    params = client_of(uri).get_run(run_id).data.params
    assert len(params) == 300 and params["some.key_298"] == "298"
    assert "7000 characters, SHA-256" in params["reward.prompt"]
    assert [artifact.path for artifact in client_of(uri).list_artifacts(run_id)] == ["config.yaml"]


def test_the_prompts_are_a_data_set_with_digest_source_schema_and_counts(tracked: tuple[Path, str, str]) -> None:
    _, uri, run_id = tracked
    (entry,) = client_of(uri).get_run(run_id).inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("sums.parquet", ("cd" * 32)[:36])
    assert entry.tags[0].value == "training"
    assert json.loads(entry.dataset.profile) == {"num_rows": 2, "read": 3, "kept": 2}
    assert json.loads(entry.dataset.source)["files"][0]["sha256"] == "ab" * 32
    columns = json.loads(entry.dataset.schema)["mlflow_colspec"]
    assert [column["name"] for column in columns] == ["prompt_text", "prompt_ids"]


def test_credentials_go_to_no_server_that_only_a_run_s_own_files_name(tmp_path, monkeypatch) -> None:
    run = new_run(tmp_path)
    write_json(run.document("tracking.json"), {"uri": "https://elsewhere.example", "documents": ["config.yaml"]})
    refuse_other_server(run)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-secret")
    with pytest.raises(
        ValueError, match=r"MLFLOW_TRACKING_TOKEN of this environment would be sent there\. Say"
    ) as told:
        refuse_other_server(run)
    assert "a-secret" not in str(told.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://elsewhere.example/")
    refuse_other_server(run)
    run.__exit__()


def test_no_file_outside_of_a_run_is_sent(tmp_path) -> None:
    run = new_run(tmp_path)
    write_json(run.document("tracking.json"), {"uri": "https://elsewhere.example", "documents": ["../../secret"]})
    run.__exit__()
    with pytest.raises(StorageError, match="names files that are not the run's"):
        deliver_pending(open_run(run.root))


def test_a_delivered_run_is_not_sent_again(tracked: tuple[Path, str, str]) -> None:
    folder = tracked[0]
    log = (folder / "tracking.jsonl").read_bytes()
    delivery = deliver_pending(open_run(folder))
    assert (delivery.sent, delivery.waiting, delivery.problem) == (4, (), None)
    assert (folder / "tracking.jsonl").read_bytes() == log


def test_a_crash_between_sending_and_noting_duplicates_nothing(tracked: tuple[Path, str, str]) -> None:
    folder, uri, run_id = tracked
    log = folder / "tracking.jsonl"
    kept = [line for line in read_json_lines(log) if line.get("step") not in (2, 3)]
    log.unlink()
    for line in kept:
        append_json_line(log, line)
    delivery = deliver_pending(open_run(folder))
    assert delivery.sent == 4
    assert history(uri, run_id) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert client_of(uri).get_run(run_id).info.status == "FINISHED"


def test_a_crash_before_the_run_is_noted_makes_no_second_run(tracked: tuple[Path, str, str]) -> None:
    folder, uri, run_id = tracked
    (folder / "tracking.jsonl").unlink()
    delivery = deliver_pending(open_run(folder))
    assert delivery.mlflow_run_id == run_id
    assert history(uri, run_id) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_step_reported_again_with_more_metrics_adds_only_those(
    tmp_path: Path, tracked: tuple[Path, str, str]
) -> None:
    cfg = config(tmp_path, uri=tracked[1], project="again")
    run = new_run(tmp_path)
    with Tracker(run, cfg) as tracker:
        tracker.start({}, [], {})
        finish_step(run, 1)
        tracker.step_finished(1)
        wait_until(lambda: any("step" in line for line in read_json_lines(run.root / "tracking.jsonl")))
        time.sleep(0.01)
        finish_step(run, 1, **{"val-core/sums/acc/mean@1": 0.75})
        tracker.step_finished(1)
        delivery = tracker.finish("finished")
    assert history(delivery.uri, delivery.mlflow_run_id or "") == [(1, 0.1)]
    assert history(delivery.uri, delivery.mlflow_run_id or "", "val-core/sums/acc/mean_at_1") == [(1, 0.75)]


@pytest.mark.parametrize(("state", "word"), [("failed", "FAILED"), ("killed", "KILLED")])
def test_an_end_that_is_no_success_is_told_as_it_was(
    tmp_path: Path, tracked: tuple[Path, str, str], state: str, word: str
) -> None:
    run = new_run(tmp_path)
    with Tracker(run, config(tmp_path, uri=tracked[1])) as tracker:
        tracker.start({}, [], {})
        delivery = tracker.finish(state)
    info = client_of(delivery.uri).get_run(delivery.mlflow_run_id).info
    assert info.status == word and info.end_time is not None


def test_the_run_of_a_process_that_died_is_closed_as_killed(tmp_path: Path, tracked: tuple[Path, str, str]) -> None:
    run = new_run(tmp_path)
    with Tracker(run, config(tmp_path, uri=tracked[1])) as tracker:
        tracker.start({}, [], {})
        finish_step(run, 1)
        tracker.step_finished(1)
        wait_until(lambda: any("step" in line for line in read_json_lines(run.root / "tracking.jsonl")))
        with pytest.raises(StorageError, match="being written by process"):
            deliver_pending(open_run(run.root))
    run.__exit__()
    assert open_run(run.root).state == "crashed"
    delivery = deliver_pending(open_run(run.root))
    info = client_of(delivery.uri).get_run(delivery.mlflow_run_id).info
    assert info.status == "KILLED" and info.end_time is not None


def test_a_run_whose_process_died_is_closed_as_killed_before_it_goes_on(
    tmp_path: Path, tracked: tuple[Path, str, str]
) -> None:
    uri, said = tracked[1], []
    run = new_run(tmp_path)
    with Tracker(run, config(tmp_path, uri=uri)) as tracker:
        tracker.start({}, [], {})
        finish_step(run, 1)
        tracker.step_finished(1)
        wait_until(lambda: any("step" in line for line in read_json_lines(run.root / "tracking.jsonl")))
    run.__exit__()
    died_ms = round(1000 * datetime.fromisoformat(run.step(1).record["finished_at"]).timestamp())  # type: ignore[index]
    again = RunWriter(run.root)
    with Tracker(again, config(tmp_path, uri=uri), say=said.append) as tracker:
        assert "died without a word" in said[0] and said[0].endswith("after step 1: it counts as killed")
        again.append("opened", state="running")
        tracker.start({}, [], {})
        finish_step(again, 2)
        tracker.step_finished(2)
        close(again, "finished")
        delivery = tracker.finish("finished")
    [ended] = [line for line in read_json_lines(run.root / "tracking.jsonl") if "ended_ms" in line]
    assert (ended["closed"], ended["ended_ms"]) == ("KILLED", died_ms)
    found = client_of(uri).get_run(delivery.mlflow_run_id)
    assert found.info.status == "FINISHED" and found.info.end_time > died_ms
    assert datetime.fromisoformat(found.data.tags["grpoflow.last_killed_at"]).timestamp() == died_ms / 1000
    assert history(uri, delivery.mlflow_run_id or "") == [(1, 0.1), (2, 0.2)]


def test_a_lineage_is_a_run_of_its_own_and_the_one_that_was_left_is_closed(
    tmp_path: Path, tracked: tuple[Path, str, str]
) -> None:
    uri = tracked[1]
    run = new_run(tmp_path)
    with Tracker(run, config(tmp_path, uri=uri)) as tracker:
        tracker.start({}, [], {})
        for index in (1, 2):
            finish_step(run, index)
            tracker.step_finished(index)
        wait_until(lambda: any(line.get("step") == 2 for line in read_json_lines(run.root / "tracking.jsonl")))
    run.__exit__()
    again = RunWriter(run.root)
    again.open_lineage(2, None, {}, {})
    with Tracker(again, config(tmp_path, uri=uri), say=lambda _: None) as tracker:
        again.append("opened", state="running")
        tracker.start({}, [], {})
        finish_step(again, 2, **{"critic/score/mean": 0.9})
        tracker.step_finished(2)
        close(again, "finished")
        delivery = tracker.finish("finished")
    client = client_of(uri)
    ours = f"tags.`grpoflow.folder` = '{run.root}'"
    experiment = client.get_experiment_by_name("arithmetic").experiment_id
    by_lineage = {found.data.tags["grpoflow.lineage"]: found.info for found in client.search_runs([experiment], ours)}
    assert {lineage: info.status for lineage, info in by_lineage.items()} == {"1": "KILLED", "2": "FINISHED"}
    assert by_lineage["1"].end_time <= by_lineage["2"].end_time
    assert history(uri, by_lineage["1"].run_id) == [(1, 0.1), (2, 0.2)]
    assert history(uri, delivery.mlflow_run_id or "") == [(1, 0.1), (2, 0.9)]


def test_a_run_without_tracking_sends_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    cfg = config(tmp_path).model_copy(update={"tracking": TrackingConfig(enabled=False)})
    with Tracker(run, cfg) as tracker:
        tracker.start({}, [], {})
        tracker.step_finished(1)
        assert tracker.finish("finished").uri == ""
    run.__exit__()
    assert deliver_pending(open_run(run.root)).uri == ""
    assert "tracking.json" not in [path.name for path in run.root.iterdir()]


def test_mlflow_is_not_imported_with_the_module() -> None:
    code = """
import sys, flows.tracking, flows.stages, flows.prefect_server
print([name for name in ("mlflow", "prefect", "torch") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------------- servers and outages


@pytest.mark.slow
def test_an_outage_in_the_middle_costs_no_time_and_no_value(tmp_path: Path) -> None:
    port, said = free_port(), []
    uri = f"http://127.0.0.1:{port}"
    run = new_run(tmp_path)
    with Tracker(run, config(tmp_path, uri), say=said.append) as tracker:
        with mlflow_server(tmp_path / "server", port):
            tracker.start({"a": 1}, ["config.yaml"], {"train": prompts()})
            finish_step(run, 1)
            tracker.step_finished(1)
            wait_until(lambda: any(line.get("step") == 1 for line in read_json_lines(run.root / "tracking.jsonl")))
        started = time.monotonic()
        for index in (2, 3, 4):
            finish_step(run, index)
            tracker.step_finished(index)
        assert time.monotonic() - started < 5.0
        wait_until(lambda: any("does not answer" in line for line in said))
        with mlflow_server(tmp_path / "server", port):
            finish_step(run, 5)
            tracker.step_finished(5)
            delivery = tracker.finish("finished")
            assert delivery.waiting == () and delivery.problem is None
            assert history(uri, delivery.mlflow_run_id or "") == [(index, index / 10) for index in range(1, 6)]
            assert client_of(uri).get_run(delivery.mlflow_run_id).info.status == "FINISHED"
    assert [line for line in said if "answers again" in line]
    assert len([line for line in said if "does not answer" in line]) == 1


@pytest.mark.slow
def test_a_server_that_is_dead_from_start_to_end_costs_telemetry_only(tmp_path: Path, server: int) -> None:
    dead, said = f"http://127.0.0.1:{free_port()}", []
    run = new_run(tmp_path)
    with Tracker(run, config(tmp_path, dead), say=said.append) as tracker:
        tracker.start({"a": 1}, ["config.yaml"], {"train": prompts()})
        for index in (1, 2):
            finish_step(run, index)
            tracker.step_finished(index)
        wait_until(lambda: any("does not answer" in line for line in said))
        started = time.monotonic()
        close(run, "finished")
        delivery = tracker.finish("finished")
        assert time.monotonic() - started < 10
    assert delivery.waiting == (1, 2) and delivery.sent == 0 and delivery.problem
    assert "has not got 2 steps" in said[-1]
    assert len([line for line in said if "does not answer" in line]) == 1
    later = deliver_pending(open_run(run.root), uri=f"http://127.0.0.1:{server}")
    assert later.sent == 2 and later.problem is None
    assert history(later.uri, later.mlflow_run_id or "") == [(1, 0.1), (2, 0.2)]
    assert client_of(later.uri).get_run(later.mlflow_run_id).data.params == {"a": "1"}


@pytest.mark.slow
def test_a_slow_server_delays_neither_the_steps_nor_the_end(tmp_path: Path, server: int) -> None:
    run = new_run(tmp_path)
    with slow_door(server, 30.0) as port:
        cfg = config(tmp_path, f"http://127.0.0.1:{port}", flush_timeout_s=1)
        with Tracker(run, cfg, say=lambda _: None) as tracker:
            started = time.monotonic()
            tracker.start({"a": 1}, [], {})
            for index in (1, 2, 3):
                finish_step(run, index)
                tracker.step_finished(index)
            assert time.monotonic() - started < 5.0
            close(run, "finished")
            delivery = tracker.finish("finished")
            assert time.monotonic() - started < 15.0
    assert delivery.waiting == (1, 2, 3) and "flush_timeout_s" in (delivery.problem or "")
    later = deliver_pending(open_run(run.root), uri=f"http://127.0.0.1:{server}")
    assert history(later.uri, later.mlflow_run_id or "") == [(1, 0.1), (2, 0.2), (3, 0.3)]


START_ONE_RUN = """
import sys
from pathlib import Path
from flows.tracking import Tracker
from storage import RunWriter
from tasks.config import RunConfig
root, number, uri = Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None
cfg = RunConfig.model_validate({"trainer": {"project_name": "crowd"}, "storage": {"root": str(root)},
                                "tracking": {"uri": uri, "flush_timeout_s": 240}})
run = RunWriter.create(root / "crowd" / number, f"run-{number}")
with Tracker(run, cfg) as tracker:
    tracker.start({}, [], {})
    run.finish_step(1, {"metrics": {"training/global_step": 1.0}})
    tracker.step_finished(1)
    assert tracker.finish("finished").sent == 1
"""


@pytest.fixture
def fresh_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty database in PostgreSQL."""
    with postgres() as database:
        monkeypatch.setenv("PGPASSWORD", database.password)
        yield database.create("mlflow")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["server", "default", "postgresql"])
def test_b70_eight_processes_that_start_together_share_a_new_experiment(
    tmp_path: Path, server: int, store: str, request: pytest.FixtureRequest
) -> None:
    uri = f"http://127.0.0.1:{server}" if store == "server" else ""
    if store == "postgresql":
        uri = request.getfixturevalue("fresh_database")
    command = [sys.executable, "-c", START_ONE_RUN, str(tmp_path)]
    crowd = [subprocess.Popen([*command, str(number), uri]) for number in range(8)]
    assert [process.wait(timeout=300) for process in crowd] == [0] * 8
    client = client_of(uri or f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("crowd")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == [f"run-{number}" for number in range(8)]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(client.search_runs(["0"], "attributes.run_name LIKE 'run-%'")) == 0


@pytest.mark.slow
def test_a_kill_while_the_default_store_is_being_made_leaves_a_store_that_the_next_process_makes(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", START_ONE_RUN, str(tmp_path)]
    first = subprocess.Popen([*command, "0", ""])
    aside = tmp_path / ".mlflow.db.aside"
    wait_until(lambda: aside.exists() and aside.stat().st_size > 100_000, 120)
    first.kill()
    first.wait()
    assert not (tmp_path / "mlflow.db").exists()
    assert subprocess.run([*command, "1", ""], timeout=300).returncode == 0
    assert not list(tmp_path.glob(".mlflow.db.aside*"))
    later = deliver_pending(open_run(tmp_path / "crowd" / "0"))
    assert (later.sent, later.problem) == (1, None)
    assert client_of(later.uri).get_run(later.mlflow_run_id).info.status == "KILLED"
