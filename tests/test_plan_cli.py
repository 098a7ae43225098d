"""`grpoflow plan`: exit codes, tables, JSON, words, facts from the disk, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.plan_view import count_rows, plan_command

WORKED_EXAMPLE = [
    "data.train_batch_size=60",
    "data.max_prompt_length=8192",
    "data.max_response_length=1024",
    "trainer.n_gpus_per_node=6",
    "actor_rollout_ref.rollout.n=12",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=60",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
]
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


def as_json(capsys: pytest.CaptureFixture[str], *overrides: str, **options: Any) -> tuple[int, dict[str, Any]]:
    code = plan_command([], [*WORKED_EXAMPLE, *overrides], as_json=True, **options)
    return code, json.loads(capsys.readouterr().out)


def test_the_worked_example_is_shown_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([], WORKED_EXAMPLE, train_prompts=7473) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["step", "720", "sequences", "60 prompts x 12 samples"] in rows
    assert ["per rank", "120", "sequences", "720 / 6 ranks"] in rows
    assert ["optimizer steps", "1", "per step", "1 per epoch x 1 ppo_epochs"] in rows
    assert ["epoch", "124", "steps", "7473 prompts / 60"] in rows
    assert ["prompts", "prompt_ids", "int32", "[60, 8192]", "", "2.0", "2.0", "gen_batch"] in rows


def test_json_has_the_numbers_the_stages_and_the_problems(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = as_json(capsys)
    assert code == 0
    assert answer["sequences_per_rank"] == 120
    assert answer["fsdp_mesh"] == {"shape": [6], "names": ["fsdp"]}
    assert answer["stages"][0]["global_shape"] == [60, 8192]
    assert answer["problems"] == []


def test_a_refused_plan_exits_with_2_and_still_has_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = as_json(capsys, f"{MICRO}=7")
    assert code == 2
    assert answer["sequences_per_rank"] == 120
    assert answer["problems"][0]["nearest"][0] == {"key": MICRO, "value": 7, "lower": 6, "upper": 8}
    assert plan_command([], [*WORKED_EXAMPLE, f"{MICRO}=7"]) == 2
    assert f"Nearest legal: {MICRO}=6 or 8" in capsys.readouterr().out


def test_a_configuration_that_does_not_load_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([], ["trainer.nnodes=", "data.train_batchsize=3"]) == 2
    message = capsys.readouterr().err
    assert "trainer.nnodes" in message and "Nearest: data.train_batch_size" in message
    code, answer = as_json(capsys, "trainer.nnodes=")
    assert code == 2 and answer["errors"][0]["key"] == "trainer.nnodes"


def test_words_say_what_counts_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([], WORKED_EXAMPLE, explain=True) == 0
    words = capsys.readouterr().out
    assert "count prompts over all devices" in words
    assert "60 prompts and samples 12 responses to each (rollout.n): 720 sequences in 60 groups of 12" in words
    assert "720 sequences over 6 data-parallel ranks: 120 sequences per rank" in words
    assert "a mini-batch is 15 micro-batches per rank" in words


def test_a_launch_script_is_explained_with_what_is_not_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    body = " \\\n  ".join([*WORKED_EXAMPLE, "trainer.logger=console", "trainer.val_only=$DRY"])
    script.write_text(f"python3 -m verl.trainer.main_ppo {body}\n")
    assert plan_command([], [], verl=script) == 2
    shown = capsys.readouterr().out
    assert "720 / 6 ranks" in shown
    assert "trainer.logger=console: metrics always go to MLflow" in shown
    assert "trainer.val_only=$DRY: $DRY is not set" in shown
    assert plan_command([], ["trainer.val_only=false"], verl=script, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["launch_script"]["unresolved"] == []


def test_a_missing_script_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([], [], verl=tmp_path / "none.sh") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_sizes_of_data_and_model_are_read_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 100}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n' * 50)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096, "num_attention_heads": 8}')
    files = f"data.train_files=[{tmp_path}/a.parquet,{tmp_path}/b.jsonl]"
    code, answer = as_json(capsys, files, f"actor_rollout_ref.model.path={tmp_path}")
    assert (answer["train_prompts"], answer["steps_per_epoch"], answer["total_steps"]) == (150, 2, 60)
    assert code == 2 and [problem["code"] for problem in answer["problems"]] == ["MODEL_CONTEXT"]
    code, answer = as_json(capsys, files, train_prompts=600)
    assert (code, answer["steps_per_epoch"]) == (0, 10)


def test_files_that_are_not_here_leave_the_size_unknown(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("{}\n")
    assert count_rows([str(tmp_path / "b.jsonl")]) == 1
    assert count_rows([str(tmp_path / "b.jsonl"), str(tmp_path / "none.parquet")]) is None
    assert count_rows([]) is None


def test_training_files_that_are_missing_are_said_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n' * 60)
    missing = f"data.train_files=[{tmp_path}/b.jsonl,{tmp_path}/nope.jsonl]"
    assert plan_command([], [*WORKED_EXAMPLE, missing]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "TRAIN_FILES_MISSING" in line]
    assert f"no file {tmp_path}/nope.jsonl here" in note and "--train-prompts" in note
    assert plan_command([], [*WORKED_EXAMPLE, missing], train_prompts=600) == 0
    assert plan_command([], [*WORKED_EXAMPLE, f"data.train_files={tmp_path}/b.jsonl"]) == 0
    assert plan_command([], WORKED_EXAMPLE) == 0
    assert "TRAIN_FILES_MISSING" not in capsys.readouterr().out


def test_a_file_that_is_no_parquet_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.parquet").write_text("no")
    assert plan_command([], [*WORKED_EXAMPLE, f"data.train_files={tmp_path}/a.parquet"]) == 2
    assert "a.parquet" in capsys.readouterr().err


def test_a_plan_needs_no_heavy_library() -> None:
    code = (
        "import sys; from flows.plan_view import plan_command; plan_command([], sys.argv[1:], as_json=True); "
        "print({'torch', 'numpy', 'pyarrow', 'prefect', 'mlflow', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *WORKED_EXAMPLE]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == "set()\n"
