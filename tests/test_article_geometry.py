"""60 prompts x 12 samples on six devices with tensor parallelism 2: every measured shape is the planned one.

The geometry by which verl's batch words are usually explained, with a tiny model and short sequences. The transformers
engine has no tensor parallelism: the two ranks of a rollout replica share its samples.
"""

import os
import shutil

import mlflow
import pytest
from real_vllm import PYTHON, needs_vllm
from tiny_runs import run

from flows.plan_view import plan_of
from tasks.warm_start.word_problems import build_tokenizer, save_tokenizer
from tasks.workers.ray_cluster import ray_of

pytestmark = pytest.mark.slow

ARTICLE = (
    "data.train_batch_size=60",
    "actor_rollout_ref.rollout.n=12",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=60",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "trainer.n_gpus_per_node=6",
    "trainer.total_training_steps=1",
    "tracking.enabled=true",
)


@pytest.fixture(scope="module")
def six():
    """A Ray with room for six ranks, on few cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ray_of(None, 6, gpus=False):
        yield


def metrics_in_mlflow(cfg):
    client = mlflow.MlflowClient(f"sqlite:///{cfg.storage.root}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (the_run,) = client.search_runs(experiments)
    return the_run.data.metrics, the_run.data.params


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_every_shape_of_the_articles_step_is_the_planned_one(tiny_run, tiny_model, six, engine, tmp_path):
    tokenizer = build_tokenizer()
    # vLLM's CPU build has no attention for smaller heads.
    sizes = {"vocab_size": len(tokenizer), "head_dim": 32, "eos_token_id": tokenizer.eos_token_id}
    shutil.copytree(tiny_model("llama", **sizes), tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    overrides = [*ARTICLE, f"actor_rollout_ref.rollout.name={engine}"]
    if engine == "vllm":
        overrides += [f"actor_rollout_ref.rollout.engine_python={PYTHON}"]
    cfg = tiny_run(*overrides, rows=60)
    plan = plan_of(cfg, train_prompts=60)
    the_run, _ = run(cfg)

    step = the_run.step(1)
    planned_rows = plan.sequences_per_rank
    assert (plan.rollout_replicas, plan.sequences_per_rollout_replica, planned_rows) == (3, 240, 120)
    shapes = {stage: step.manifest(stage).shapes for stage in step.stages()}
    parts = {stage: [part.rows for part in step.manifest(stage).parts] for stage in step.stages()}

    assert shapes["prompts"]["rows"] == plan.prompts_per_step == 60
    assert shapes["rollouts"]["rows"] == plan.sequences_per_step == 720
    # vLLM: one rank of each replica samples for all of it.
    assert parts["rollouts"] == ([240] * 3 if engine == "vllm" else [planned_rows] * 6)
    for stage, forwards in (
        ("old_log_probs", plan.old_log_prob_forwards_per_rank),
        ("ref_log_probs", plan.ref_log_prob_forwards_per_rank),
    ):
        assert parts[stage] == [planned_rows] * 6
        assert shapes[stage]["rows_per_rank"] == planned_rows
        assert shapes[stage]["micro_batches"] == forwards == 15
    assert shapes["rewards"]["rows"] == shapes["advantages"]["rows"] == 720
    updates = shapes["updates"]
    assert updates["optimizer_steps"] == plan.optimizer_steps_per_step == 1
    assert updates["sequences"] == plan.sequences_per_mini_batch == 720
    assert updates["micro_batches"] == plan.micro_batches_per_mini_batch[0] == plan.grad_accumulation_steps == 15

    metrics, params = metrics_in_mlflow(cfg)
    for stage, counts in shapes.items():
        for name, value in counts.items():
            assert metrics[f"shape/{stage}/{name}"] == value
    assert params["plan.sequences_per_rank"] == "120"
    assert params["plan.rollout_replicas"] == "3"
