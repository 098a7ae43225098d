"""The GPU check, small and on the processor: what it needs, what it counts, what it notices, when it ends."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.gpu_check import Check, main
from benchmarks.gpu_clock import Clock, Options
from benchmarks.gpu_model import PEAK_TFLOPS, TINY, Sizes, build_model, forward_flops, model_config, peak_tflops
from benchmarks.gpu_report import Gap
from storage.ragged import Ragged
from tasks.workers.sequences import MicroBatching, Sequences

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
CPU = torch.device("cpu")

WITHOUT = """
import importlib.machinery, runpy, sys
hidden = {"prefect", "mlflow", "vllm", "ray", "peft", "psutil", "typer", "rich", "math_verify", "accelerate", "flows"}

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if one is importlib.machinery.PathFinder else one for one in sys.meta_path]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script where packages are as if they were not installed."""


def run_script(folder, *arguments):
    command = [sys.executable, "-c", WITHOUT, str(SCRIPT), "--out", str(folder / "report"), "--tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


def test_the_check_runs_without_orchestration_tracking_and_adapters(tmp_path):
    done = run_script(tmp_path, "--shared", "--packed", "--padded", "--repeats", "1", "--peak-tflops", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "gpu_check.json").read_text())
    timings = report["timings"]
    assert len(timings) == 14 and {one["stage"] for one in timings} == {"generate", "log-prob", "update"}
    assert {one["layout"] for one in timings} == {"", "shared prompts", "packed", "padded"}
    assert all(one["tokens_per_s"] > 0 and (one["mfu"] is None) == (one["stage"] == "generate") for one in timings)
    assert len(report["gaps"]) == 8 and all(gap["fits"] for gap in report["gaps"]) and report["problems"] == []
    assert (tmp_path / "report" / "gpu_check.md").read_text() in done.stdout


@pytest.mark.slow
def test_time_that_is_up_ends_it_with_3(tmp_path):
    done = run_script(tmp_path, "--limit-s", "0.01")
    assert done.returncode == 3 and "time is up" in done.stderr


def test_no_cuda_device_is_one_sentence_and_ends_with_2(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert main(["--out", str(tmp_path)]) == 2
    assert "--tiny" in capsys.readouterr().err and not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- model and FLOPs


def test_the_model_has_as_many_parameters_as_qwen2_5_0_5b():
    with torch.device("meta"):
        model = Qwen2ForCausalLM(model_config(Sizes()))
    assert sum(weight.numel() for weight in model.parameters()) == 494_032_768


def test_operations_of_a_forward_pass_are_those_counted_by_hand():
    sizes = Sizes(hidden=4, layers=1, heads=2, kv_heads=1, mlp=8, vocabulary=10)
    rows = [[1, 2], [3, 4]]
    seqs = Sequences(
        Ragged.from_rows([[5, 6, 7]], np.int32), np.zeros(2, dtype=np.int64), Ragged.from_rows(rows, np.int32)
    )
    micro = MicroBatching(2, None)
    # 4 x 4 twice, 4 x 2 twice, 4 x 8 three times; the head at 4 response tokens.
    weights, head = 2 * 16 + 2 * 8 + 3 * 32, 2 * 40 * 4
    pairs_of_prompt, pairs_of_response = 3 * 3 / 2, 3 * 2 + 2 * 2 / 2
    shared = 2 * weights * 7 + 16 * (pairs_of_prompt + 2 * pairs_of_response) + head
    whole = 2 * weights * 10 + 16 * 2 * (pairs_of_prompt + pairs_of_response) + head
    assert forward_flops(sizes, seqs, micro, shared=True) == shared
    assert forward_flops(sizes, seqs, micro, shared=False) == whole
    # Cut into two micro-batches, the prompt is computed in both.
    assert forward_flops(sizes, seqs, MicroBatching(1, None), shared=True) == whole


def test_every_device_of_the_table_is_found_by_its_own_name():
    assert {name: peak_tflops(f"NVIDIA {name} 80GB") for name in PEAK_TFLOPS} == PEAK_TFLOPS
    assert peak_tflops("NVIDIA GH200 480GB") == PEAK_TFLOPS["H200"] and peak_tflops("AMD EPYC") is None


# ------------------------------------------------------------------------------------------------ what it notices


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """A tiny check whose model is made."""
    made = Check(Options(TINY, CPU, limit_s=60), tmp_path_factory.mktemp("report"))
    made.folder = tmp_path_factory.mktemp("model")
    build_model(made.folder, TINY)
    return made


def test_the_bounds_let_bfloat16_pass_and_notice_another_first_token(check):
    exact = check.log_probs(check.worker(("float32", "float32"), "padded"), check.checked)
    worker = check.worker(("float32", "bfloat16"), "packed")
    check.compare("bfloat16", "right", check.log_probs(worker, check.checked), exact)
    prompts = check.checked.prompts
    values = prompts.values.copy()
    values[prompts.offsets[:-1]] = 3 + (values[prompts.offsets[:-1]] + 7) % (TINY.vocabulary - 3)
    wrong = Sequences(Ragged(values, prompts.offsets), check.checked.group, check.checked.responses)
    check.compare("bfloat16", "wrong", check.log_probs(worker, wrong), exact)
    right, wrong_gap = check.report.gaps[-2:]
    assert right.fits and not wrong_gap.fits and "wrong" in check.report.problems[-1]


def test_a_gap_that_is_no_number_is_too_far():
    assert not Gap("m", "w", 3, float("nan"), float("nan")).fits


def test_a_stage_without_room_is_tried_with_less_until_it_fits_or_nothing_is_left(check, capsys):
    def needs(limit):
        def work(size):
            if check.micro_tokens > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return size, 1.0

        return work

    check.micro_tokens = 240
    check.stage("m", "update", "packed", needs(64), 4)
    assert check.report.timings[-1].at_once == 60 and "Again with" in capsys.readouterr().out
    check.stage("m", "update", "packed", needs(10), 4)
    # One sequence of full length still has to fit.
    assert check.micro_tokens >= TINY.prompt_tokens + TINY.response_tokens
    assert "no room in memory" in check.report.problems[-1]


def test_little_time_means_fewer_runs_and_then_less_work():
    done = []

    def work(size):
        done.append(size)
        time.sleep(0.01 * size)
        return size, 0.0

    seconds, runs, tokens, _ = Clock(Options(TINY, CPU, limit_s=60), 1).measure(work, 8)
    assert (runs, tokens) == (5, 8) and 0.08 <= seconds < 0.5
    _, runs, tokens, _ = Clock(Options(TINY, CPU, limit_s=0.2), 1).measure(work, 16)
    assert runs < 5 and tokens < 16
