"""Seconds per step by stage on the quickstart's geometry, and what flow, artifacts and tracking add to a bare loop.

Two policies with the same weights take the same steps in turn, in one process: one as `grpoflow train` runs them, with
its own Prefect server, artifacts on disk and MLflow, one as a loop over the same functions with everything in memory.
Both end with the same weights.
"""

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from rich.console import Console

from flows.config import load_config
from flows.plan_view import plan_of
from flows.prefect_server import prefect_api
from flows.progress import Progress
from flows.recipes import prepare, recipe_file
from flows.run_folder import open_run_for_training
from flows.stages import stage_runner
from flows.step import Workers
from flows.tracking import Tracker
from flows.train import Loop, Outcome, load_data, open_workers
from storage import Ragged
from tasks.algorithms.advantages import AdvantageInput
from tasks.algorithms.variants import ESTIMATORS
from tasks.config import RunConfig
from tasks.data import step_rows
from tasks.generate import training_sampling
from tasks.log_prob import actor_micro_batching, old_micro_batching, ref_micro_batching
from tasks.rewards.pool import RewardRow
from tasks.seeds import sample_seed
from tasks.update import plan_mini_batches
from tasks.workers.group import LocalGroup
from tasks.workers.policy import Signals
from tasks.workers.rank import open_rank, training_role
from tasks.workers.sequences import Sequences

STEPS = 30
STAGES = ("gen", "old_log_prob", "ref", "reward", "adv", "update_actor")


def bare_step(index: int, cfg: RunConfig, workers: Workers) -> None:
    """The arithmetic of one step, handed on in memory."""
    assert isinstance(workers.group, LocalGroup) and workers.group.rank.engine is not None
    n, data, rank = cfg.actor_rollout_ref.rollout.n, workers.train.table, workers.group.rank
    policy = rank.policy
    _, rows = step_rows(index, data.num_rows, cfg.data.train_batch_size, cfg.trainer.seed, cfg.data.shuffle)
    prompts = data.take(pa.array(rows))
    group = np.repeat(np.arange(len(rows)), n)
    seeds = [sample_seed(cfg.trainer.seed, index, int(rows[g]), int(g), i % n) for i, g in enumerate(group)]
    prompt_ids = Ragged.from_arrow(prompts["prompt_ids"])
    responses = rank.engine.generate(prompt_ids, group, np.asarray(seeds), training_sampling(cfg))
    texts = rank.tokenizer.batch_decode([row.tolist() for row in responses.response_ids], skip_special_tokens=True)
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(workers.rewards.score, reward_rows(prompts.to_pylist(), group, texts))
        sequences = Sequences(prompt_ids, group, responses.response_ids)
        old = policy.log_probs(sequences, old_micro_batching(cfg), temperature=1.0).log_probs
        ref = policy.log_probs(sequences, ref_micro_batching(cfg), temperature=1.0, reference=True).log_probs
        verdicts = scoring.result()
    score = np.asarray([np.nan if verdict.score is None else verdict.score for verdict in verdicts])
    mask = Ragged(np.ones(len(responses.response_ids.values), dtype=bool), responses.response_ids.offsets)
    result = ESTIMATORS[cfg.algorithm.adv_estimator].load()(AdvantageInput(score, group, mask), cfg.algorithm)
    signals = Signals(result.advantages, mask, old, ref, None, group)
    mini_batches = plan_mini_batches(group, cfg.actor_rollout_ref.actor, index)
    policy.update(sequences, signals, mini_batches, actor_micro_batching(cfg), step=index)
    policy.policy_version = index


def reward_rows(prompts: list[dict], group: np.ndarray, texts: list[str]) -> list[RewardRow]:
    """What the reward function is given."""
    rows = []
    for i, (g, text) in enumerate(zip(group, texts, strict=True)):
        prompt = prompts[g]
        truth, extra = json.loads(prompt["ground_truth"]), json.loads(prompt["extra_info"])
        rows.append(RewardRow(str(i), prompt["data_source"], json.loads(prompt["prompt"]), text, truth, extra))
    return rows


def main() -> None:
    """Take the steps in turn and print medians and their difference."""
    console = Console(file=sys.stderr)
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        cfg = load_config([recipe_file("quickstart")], [f"storage.root={root}", "trainer.save_freq=-1", *sys.argv[1:]])
        progress = Progress(console, STEPS)
        api = stack.enter_context(prefect_api(cfg.orchestration, Path(root), progress.say))
        cfg = prepare([recipe_file("quickstart")], cfg, progress.say, api)
        data = load_data(cfg)
        plan = plan_of(cfg, train_prompts=data.train.table.num_rows)
        run = stack.enter_context(open_run_for_training(cfg, progress.say))
        tracker = stack.enter_context(Tracker(run, cfg))
        runner = stack.enter_context(stage_runner(api, run.run_id))
        workers = stack.enter_context(open_workers(cfg, plan, data))
        tracker.start(params={}, documents=(), datasets={})
        twin = open_rank(cfg, None, data.tokenizer, role=training_role(cfg), total_steps=plan.total_steps or 1)
        bare = Workers(LocalGroup(twin), workers.rewards, data.train, None)
        loop, outcome = Loop(run, cfg, plan, workers, runner, tracker, progress), Outcome(run.root)
        flow_s, bare_s = [], []
        for index in range(1, STEPS + 1):
            start = time.perf_counter()
            loop.step(index, outcome, validates=False)
            middle = time.perf_counter()
            bare_step(index, cfg, bare)
            flow_s.append(middle - start)
            bare_s.append(time.perf_counter() - middle)
        assert twin.policy.weights_digest() == workers.group.weights_digest(), "both loops do the same arithmetic"
        tracker.finish("finished")
        report(flow_s, bare_s, [run.step(index).record["metrics"] for index in range(1, STEPS + 1)])


def report(flow_s: list[float], bare_s: list[float], metrics: list[dict]) -> None:
    """Print medians over the steps but the first three."""
    kept = slice(3, None)
    print(f"quickstart geometry, {STEPS} steps in turn, medians without the first three")
    for stage in STAGES:
        print(f"  {stage:<14} {median(step[f'timing_s/{stage}'] for step in metrics[kept]):7.3f} s")
    differences = [flow - bare for flow, bare in zip(flow_s[kept], bare_s[kept], strict=True)]
    print(f"  as a flow      {median(flow_s[kept]):7.3f} s   with Prefect, artifacts and MLflow")
    print(f"  bare loop      {median(bare_s[kept]):7.3f} s")
    print(f"  overhead       {median(differences):7.3f} s   median of the differences, step by step")
    print(f"  ratio          {median(flow_s[kept]) / median(bare_s[kept]):7.2f}")


if __name__ == "__main__":
    main()
