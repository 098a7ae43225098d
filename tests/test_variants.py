"""A new estimator or loss is one function in one file: what the declarations say, and a real step with made-up ones."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tasks.algorithms import variants
from tasks.algorithms.advantages import AdvantageInput
from tasks.algorithms.variants import ESTIMATORS, LOSSES
from tasks.config import ActorConfig, AlgorithmConfig

ROOT = Path(__file__).parents[1]
ESTIMATOR = '''
import numpy as np

from storage.ragged import Ragged
from tasks.algorithms.advantages import AdvantageInput, Advantages, broadcast, group_statistics
from tasks.algorithms.variants import estimator
from tasks.config import AlgorithmConfig


@estimator("one_half", relative=False)
def one_half(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """Every token gets 1 / 2."""
    groups = group_statistics(inputs.outcome, inputs.group)
    rows = Ragged(broadcast(np.full(len(inputs.score), 0.5), inputs.mask).astype(np.float32), inputs.mask.offsets)
    judged = ~np.isnan(inputs.outcome)
    return Advantages(rows, rows, groups.mean, groups.std, judged, [None] * len(inputs.score))
'''
LOSS = '''
from tasks.algorithms.losses import LossBatch, TokenMetrics, token_metrics
from tasks.algorithms.variants import loss
from tasks.config import ActorConfig
import torch


@loss("squared", reads=("clip_ratio",), aggregation="token-mean")
def squared(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """7 + (advantage * log ratio)^2."""
    log_ratio = batch.log_probs - batch.old_log_probs
    return 7 + (batch.advantages * log_ratio).square(), token_metrics(-log_ratio)
'''
ACTOR = "actor_rollout_ref.actor"
CHOSEN = ["algorithm.adv_estimator=one_half", f"{ACTOR}.policy_loss.loss_mode=squared"]
CLI = ["-c", "from flows.cli import main; main()"]


@pytest.fixture
def with_made_up_variants(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python on a copy of our packages that has two files more."""
    code = tmp_path / "code"
    for package in ("flows", "tasks", "storage"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "tasks/algorithms/made_up_estimator.py").write_text(ESTIMATOR)
    (code / "tasks/algorithms/made_up_loss.py").write_text(LOSS)
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_one_file_each_makes_an_estimator_and_a_loss_that_train(
    with_made_up_variants: Callable[..., subprocess.CompletedProcess[str]],
    tiny_run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    tiny_run()  # writes base.yaml and what it names
    done = with_made_up_variants(
        *CLI, "train", "base.yaml", *CHOSEN, "trainer.total_training_steps=1", f"{ACTOR}.use_kl_loss=false"
    )
    assert done.returncode == 0, done.stderr
    (step,) = (tmp_path / "run/steps").glob("*/step.json")
    metrics = json.loads(step.read_text())["metrics"]
    assert metrics["critic/advantages/mean"] == 0.5
    assert metrics["actor/pg_loss"] == pytest.approx(7, abs=0.1)


def test_they_are_planned_without_numpy_and_torch(
    with_made_up_variants: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = (
        "import sys; from flows.plan_view import plan_command; "
        "code = plan_command([], sys.argv[1:], as_json=True); "
        "import tasks; print(tasks.__file__, {'torch', 'numpy'} & set(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    one_device = [
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        # No sample is compared with its siblings.
        "actor_rollout_ref.rollout.n=1",
    ]
    done = with_made_up_variants("-c", code, *CHOSEN, *one_device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.endswith("code/tasks/__init__.py set()\n")


def test_a_name_that_nothing_declares_is_refused_with_those_that_are(
    with_made_up_variants: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = with_made_up_variants(*CLI, "plan", "algorithm.adv_estimator=two_halves")
    assert done.returncode == 2
    assert "one_half" in done.stderr


def test_two_declarations_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text('\n@loss("twice")\ndef first(batch, actor): ...\n')
    (tmp_path / "two.py").write_text('\n@loss("other", "twice")\ndef second(batch, actor): ...\n')
    monkeypatch.setattr(variants, "__file__", str(tmp_path / "variants.py"))
    with pytest.raises(ValueError, match=r"loss 'twice' is declared by .*one\.first and by .*two\.second"):
        variants._declared("loss")


def test_a_declaration_is_read_without_running_its_module() -> None:
    source = 'import nothing_of_the_kind\n\n@estimator("a", "b", needs=("greedy_score",))\ndef f(inputs, cfg): ...\n'
    found = list(variants._in_module(ast.parse(source), "estimator", "some.module"))
    assert [(v.name, v.module, v.function, v.needs) for v in found] == [
        ("a", "some.module", "f", ("greedy_score",)),
        ("b", "some.module", "f", ("greedy_score",)),
    ]


@pytest.mark.parametrize("variant", [*ESTIMATORS.values(), *LOSSES.values()], ids=lambda variant: variant.name)
def test_each_declared_function_and_selection_exists_and_says_what_it_is(variant: variants.Variant) -> None:
    assert variant.load().__doc__
    selection = variant.load_selection()
    assert selection is None or selection.__doc__


@pytest.mark.parametrize("variant", ESTIMATORS.values(), ids=ESTIMATORS)
def test_what_an_estimator_needs_is_a_field_that_a_step_may_lack(variant: variants.Variant) -> None:
    optional = {
        field.name
        for field in fields(AdvantageInput)
        if field.default is not MISSING or field.default_factory is not MISSING
    }
    assert set(variant.needs) <= optional


def has_key(section: type[BaseModel], key: str) -> bool:
    first, _, rest = key.partition(".")
    if first not in section.model_fields:
        return False
    inner = section.model_fields[first].annotation
    return not rest or (isinstance(inner, type) and issubclass(inner, BaseModel) and has_key(inner, rest))


def test_what_a_variant_reads_is_a_key_of_its_section() -> None:
    for section, declared in ((AlgorithmConfig, ESTIMATORS), (ActorConfig, LOSSES)):
        missing = {(name, key) for name, v in declared.items() for key in v.reads if not has_key(section, key)}
        assert not missing
    assert not has_key(ActorConfig, "policy_loss.nope")
