"""Both rollout engines on the same batches: tokens per second, and what handing over new weights costs.

vLLM runs with the Python in GRPOFLOW_VLLM_PYTHON (`make vllm-env` makes an environment), one thread; the transformers
engine samples in this process, one thread. Same policy, same prompts, same seeds, end tokens ignored, so that both make
the same number of tokens. They take turns.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console

from flows.config import load_config
from flows.plan_view import plan_of
from flows.recipes import prepare, recipe_file
from flows.train import load_data
from storage.ragged import Ragged
from tasks.engines.hand_over import hand_over
from tasks.engines.protocol import Responses, RolloutEngine, Sampling
from tasks.engines.transformers_engine import TransformersEngine
from tasks.engines.vllm_engine import VllmEngine
from tasks.workers.policy import PolicyWorker

ROUNDS = 5
BATCHES = ((32, 8, 24), (16, 8, 40), (60, 12, 40))
"""Prompts, samples of each, tokens of each response."""


def main() -> None:
    """Sample in turn, hand weights over, and print tables."""
    python = Path(os.environ.get("GRPOFLOW_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
    console = Console(file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        recipe = [recipe_file("quickstart")]
        own = [f"storage.root={root}", f"actor_rollout_ref.rollout.engine_python={python}"]
        longest = max(tokens for _, _, tokens in BATCHES)
        own += [f"data.max_response_length={longest}", "actor_rollout_ref.rollout.max_num_seqs=256"]
        cfg = prepare(recipe, load_config(recipe, own), console.print, None)
        data = load_data(cfg)
        plan = plan_of(cfg, train_prompts=data.train.table.num_rows)
        worker, other = (PolicyWorker(cfg, total_steps=plan.total_steps or 1, with_reference=False) for _ in range(2))
        vllm = VllmEngine(cfg, data.tokenizer)
        try:
            started = time.perf_counter()
            hand_over(worker, vllm)
            start_s = time.perf_counter() - started
            engines: dict[str, RolloutEngine] = {
                "transformers": TransformersEngine(worker, data.tokenizer),
                "vllm": vllm,
            }
            prompts = Ragged.from_arrow(data.train.table["prompt_ids"])
            rows = [rates(engines, prompts, *batch) for batch in BATCHES]
            report(rows, start_s, hand_over_seconds((moved(other), worker), vllm))
        finally:
            vllm.close()


def rates(
    engines: dict[str, RolloutEngine], prompts: Ragged, count: int, n: int, tokens: int
) -> tuple[str, dict[str, float]]:
    """Tokens per second of each engine on one batch."""
    some, group = prompts.take(np.arange(count)), np.repeat(np.arange(count), n)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(ROUNDS + 1):
        for name, engine in engines.items():
            seeds = np.arange(len(group), dtype=np.int64) + number * 2**20
            seconds, responses = timed(lambda engine=engine, seeds=seeds: engine.generate(some, group, seeds, sampling))
            made = int(responses.response_ids.lengths.sum())
            assert made == count * n * tokens, f"{name} made {made} tokens, not {count * n * tokens}"
            # The first call warms caches up.
            times[name] += [seconds] if number else []
    made = count * n * tokens
    return f"{count} x {n} x {tokens}", {name: made / median(seconds) for name, seconds in times.items()}


def timed(call: Callable[[], Responses]) -> tuple[float, Responses]:
    """Seconds that a call takes, and what it returns."""
    start = time.perf_counter()
    answer = call()
    return time.perf_counter() - start, answer


def hand_over_seconds(policies: tuple[PolicyWorker, PolicyWorker], engine: VllmEngine) -> float:
    """Median time until vLLM holds another policy, proven by its log-probs; two policies in turn."""
    times = []
    for number in range(2 * ROUNDS):
        start = time.perf_counter()
        assert hand_over(policies[number % 2], engine), "other weights are loaded"
        times.append(time.perf_counter() - start)
    return median(times)


def moved(worker: PolicyWorker) -> PolicyWorker:
    """A policy whose weights have been moved a little, before anybody took their digest."""
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in worker.model.network.parameters():
            weight.add_(torch.randn(weight.shape, generator=source), alpha=1e-2)
    return worker


def report(rows: list[tuple[str, dict[str, float]]], start_s: float, hand_over_s: float) -> None:
    """Print Markdown tables."""
    print("| prompts x samples x tokens | transformers, tokens/s | vLLM, tokens/s | vLLM / transformers |")
    print("|---|---|---|---|")
    for name, rate in rows:
        ratio = rate["vllm"] / rate["transformers"]
        print(f"| {name} | {rate['transformers']:,.0f} | {rate['vllm']:,.0f} | {ratio:.2f} x |")
    print(
        f"\nvLLM started and given its first weights in {start_s:.1f} s; a later hand-over takes {hand_over_s:.2f} s."
    )


if __name__ == "__main__":
    main()
