"""What a run says, as lines of JSON for what collects logs."""

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from flows.progress import RunConsole
from storage import open_run


def test_with_grpoflow_log_json_each_line_of_a_run_is_one_json_object(tiny_run, tmp_path):
    tiny_run()
    words = ["train", str(tmp_path / "base.yaml"), "trainer.test_freq=1"]
    code = "import sys; from flows.cli import main; sys.argv[0] = 'grpoflow'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, "GRPOFLOW_LOG": "json"}
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    run = open_run(tmp_path / "run")
    assert {"time", "level", "run", "message"} <= set.intersection(*(set(line) for line in lines))
    assert {line["run"] for line in lines} == {None, run.run_id}
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    steps = [line for line in lines if "timing_s/step" in line.get("metrics", {})]
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["metrics"] for line in steps] == [run.step(index).record["metrics"] for index in (1, 2)]
    validations = [line["step"] for line in lines if line["message"].startswith("validation after")]
    assert validations == [1, 2]


def test_warnings_and_alarms_have_their_level(monkeypatch, capsys):
    monkeypatch.setenv("GRPOFLOW_LOG", "json")
    console = RunConsole()
    for message in ("warning: slow", "alarm: entropy", "error: none", "step 1: [bold]fine[/bold]", ""):
        console.print(message)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "warning", "error", "info"]
    assert lines[-1]["message"] == "step 1: [bold]fine[/bold]"


def test_another_value_is_refused_with_those_there_are(monkeypatch):
    monkeypatch.setenv("GRPOFLOW_LOG", "xml")
    with pytest.raises(ValueError, match="GRPOFLOW_LOG=xml: lines can be text or json"):
        RunConsole()
