"""The learning rate as a function of the step, against verl's traces and by hand."""

import json
from pathlib import Path

import pytest

from tasks.config import OptimConfig
from tasks.workers.optim import learning_rate

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "schedule.json").read_text())


@pytest.mark.parametrize("case", [c for c in GOLDEN if "init_lr_ratio" not in c["params"]], ids=lambda c: c["name"])
def test_the_schedule_is_verls(case):
    params, trace = case["params"], case["expected"]["lr_trace"]["json"]
    optim = OptimConfig(
        lr=params["lr"],
        lr_warmup_steps=params["num_warmup_steps"],
        lr_scheduler_type="cosine" if "cosine" in case["function"] else "constant",
        min_lr_ratio=params.get("min_lr_ratio", 0.0),
        num_cycles=params.get("num_cycles", 0.5),
    )
    total = params.get("num_training_steps", len(trace))
    ours = [learning_rate(optim, step, total) for step in range(1, len(trace) + 1)]
    assert ours == pytest.approx(trace, rel=case["tolerance"]["rtol"], abs=case["tolerance"]["atol"])


def test_a_linear_schedule_falls_to_its_floor_and_stays_there():
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2)
    rates = [learning_rate(optim, step, 6) for step in range(1, 10)]
    assert rates == pytest.approx([0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_warm_up_is_a_share_of_the_plan_unless_it_is_given_in_steps():
    by_share = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.25)
    assert [learning_rate(by_share, step, 8) for step in (1, 2, 3, 8)] == [0, 0.5, 1, 1]
    by_steps = OptimConfig(lr=1.0, lr_warmup_steps=0, lr_warmup_steps_ratio=0.25)
    assert learning_rate(by_steps, 1, 8) == 1


def test_the_schedules_own_length_overrides_the_plans():
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", total_training_steps=4)
    assert learning_rate(optim, 3, 1000) == 0.5
