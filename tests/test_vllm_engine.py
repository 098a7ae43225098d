"""The vllm rollout engine with a real vLLM on CPU: its tokens, its log-probs, new weights, and its death."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from real_vllm import PYTHON, needs_vllm

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.engines.hand_over import hand_over, write_policy
from tasks.engines.policy_folder import CHECK_LOG_PROBS
from tasks.engines.protocol import Sampling
from tasks.engines.vllm_engine import EngineDied, EngineFailed, VllmEngine, WeightsNotTaken
from tasks.engines.vllm_process import shared_files
from tasks.warm_start.word_problems import build_tokenizer
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import MicroBatching, Sequences

pytestmark = [*needs_vllm, pytest.mark.timeout(300)]

TEXTS = build_tokenizer()
END = TEXTS.eos_token_id
SIZES = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": len(TEXTS),
}
SIZES |= {"eos_token_id": END, "max_position_embeddings": 300}
STRANGER = 300


def parts_of(folder, *, model=None, **rollout):
    """A worker and an engine for one model's folder; nothing is started yet."""
    rollout = {"n": 4, "tensor_model_parallel_size": 1, "engine_python": str(PYTHON), "max_num_seqs": 64, **rollout}
    rollout = {"engine_startup_s": 200.0, "max_model_len": 300, **rollout}
    sections = {"model": {"path": str(folder), "enable_gradient_checkpointing": False, **(model or {})}}
    cfg = RunConfig.model_validate(
        {"actor_rollout_ref": {**sections, "rollout": rollout}, "trainer": {"device": "cpu"}}
    )
    worker = PolicyWorker(cfg, total_steps=1, with_reference=False)
    return worker, VllmEngine(cfg, TEXTS)


@pytest.fixture(scope="module")
def held(tiny_model):
    """(worker, engine) on a small Qwen2 whose output head is its embedding."""
    worker, engine = parts_of(tiny_model("qwen2", **SIZES), stop=["not to be found"], engine_silence_s=15.0)
    yield worker, engine
    engine.close()


@pytest.fixture
def ready(held):
    """The same, holding the worker's weights."""
    worker, engine = held
    hand_over(worker, engine)
    return worker, engine


def some_prompts(lengths=(150, 9, 200, 60)):
    random = np.random.default_rng(0)
    return Ragged.from_rows([random.integers(3, len(TEXTS), n) for n in lengths], np.int32)


def seeds(rows):
    return np.random.default_rng(7).integers(0, 2**62, rows)


def rows(ragged):
    return [row.tolist() for row in ragged]


def trainer_says(worker, prompts, group, responses, temperature=1.0):
    return worker.log_probs(
        Sequences(prompts, group, responses), MicroBatching(8, None), temperature=temperature
    ).log_probs.values


def change(worker, scale=0.05):
    """Other weights, as an update would make them, of the next version."""
    with torch.no_grad():
        for weight in worker.model.network.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(worker.policy_version)) * scale
            )
    worker.policy_version += 1
    worker._trained_digests = None


# ------------------------------------------------------------------------------------------------ log-probs and tokens


@pytest.mark.parametrize(("temperature", "filters"), [(1.0, {}), (0.7, {})])
def test_log_probs_are_the_trainers_at_the_same_temperature(ready, temperature, filters):
    worker, engine = ready
    prompts, group = some_prompts(), np.repeat(np.arange(4), 4)
    got = engine.generate(prompts, group, seeds(16), Sampling(temperature=temperature, max_tokens=40, **filters))
    gap = np.abs(got.log_probs.values - trainer_says(worker, prompts, group, got.response_ids, temperature))
    assert gap.mean() < 1e-3 and gap.max() < 1e-2
    assert got.response_ids.values.dtype == np.int32 and got.log_probs.values.dtype == np.float32
    assert (got.notes["log_probs"], got.notes["temperature"], got.notes["filters"]) == (
        "processed",
        temperature,
        "none",
    )
    assert got.notes["engine"].startswith("vllm ") and got.notes["engine"].endswith(" on cpu")


def test_greedy_takes_the_most_likely_token_every_time(ready):
    worker, engine = ready
    prompts, group = some_prompts(), np.arange(4)
    got = engine.generate(
        prompts, group, seeds(4), Sampling(temperature=0.3, greedy=True, max_tokens=20, ignore_eos=True)
    )
    for prompt, response in zip(prompts, got.response_ids, strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
        with torch.no_grad():
            logits = worker.model.network(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        assert response.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(got.log_probs.values, trainer_says(worker, prompts, group, got.response_ids), atol=1e-3)
    assert got.notes["temperature"] == 1.0 and got.notes["sampled_with"] == "greedy"


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(ready):
    _, engine = ready
    prompts, group, seed = some_prompts(), np.repeat(np.arange(4), 4), seeds(16)
    sampling = Sampling(max_tokens=30)
    together = engine.generate(prompts, group, seed, sampling)
    order = np.random.default_rng(3).permutation(16)
    shuffled = engine.generate(prompts, group[order], seed[order], sampling)
    assert rows(shuffled.response_ids) == [together.response_ids[i].tolist() for i in order]
    for row in (0, 5, 15):
        alone = engine.generate(prompts, group[[row]], seed[[row]], sampling)
        assert alone.response_ids[0].tolist() == together.response_ids[row].tolist()


def test_samples_of_a_group_differ_by_their_seeds_and_equal_seeds_are_equal(ready):
    _, engine = ready
    prompts, group = some_prompts((5,)), np.zeros(8, dtype=int)
    neighbours = engine.generate(prompts, group, np.arange(8), Sampling(max_tokens=20, ignore_eos=True))
    assert len({tuple(row) for row in rows(neighbours.response_ids)}) == 8
    same = engine.generate(prompts, group, np.full(8, 2**63 - 1), Sampling(max_tokens=20))
    assert len({tuple(row) for row in rows(same.response_ids)}) == 1


# ------------------------------------------------------------------------------------------------------------ its end


def test_a_response_ends_with_its_end_token_or_is_cut_by_length(ready):
    _, engine = ready
    prompts, group, seed = some_prompts((9, 20)), np.repeat(np.arange(2), 60), seeds(120)
    got = engine.generate(prompts, group, seed, Sampling(max_tokens=60))
    assert {"stop", "length"} == set(got.finish_reason)
    for row, reason in zip(rows(got.response_ids), got.finish_reason, strict=True):
        assert END not in row[:-1]
        assert (row[-1] == END) if reason == "stop" else (row[-1] != END and len(row) == 60)
    on = engine.generate(prompts, group, seed, Sampling(max_tokens=60, ignore_eos=True))
    assert set(on.finish_reason) == {"length"} and set(on.response_ids.lengths) == {60}
    for short, long in zip(got.response_ids, on.response_ids, strict=True):
        assert long[: len(short)].tolist() == short.tolist()


def test_a_stop_text_ends_a_response_and_stays_in_it(ready):
    _, engine = ready
    prompts, group, seed = some_prompts((9, 20)), np.repeat(np.arange(2), 8), seeds(16)
    free = engine.generate(prompts, group, seed, Sampling(max_tokens=25, ignore_eos=True))
    whole = TEXTS.batch_decode(rows(free.response_ids), skip_special_tokens=False)
    stop = TEXTS.batch_decode([free.response_ids[4].tolist()[10:12]], skip_special_tokens=False)[0]
    sampling = Sampling(max_tokens=25, ignore_eos=True, stop=(stop, "not to be found"))
    got = engine.generate(prompts, group, seed, sampling)
    ended = TEXTS.batch_decode(rows(got.response_ids), skip_special_tokens=False)
    for before, after, reason in zip(whole, ended, got.finish_reason, strict=True):
        assert after == (before[: before.index(stop) + len(stop)] if stop in before else before)
        assert reason == ("stop" if stop in before else "length")
    assert got.finish_reason[4] == "stop" and len(got.log_probs.values) == len(got.response_ids.values)


def test_a_prompt_that_fills_the_context_still_gets_a_token_and_one_beyond_it_is_refused(ready):
    _, engine = ready
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    got = engine.generate(some_prompts((300, 299, 296, 3)), np.arange(4), seeds(4), sampling)
    assert got.response_ids.lengths.tolist() == [1, 1, 4, 16] and set(got.finish_reason) == {"length"}
    with pytest.raises(ValueError, match="prompt 0 has 301 tokens but the context holds 300"):
        engine.generate(some_prompts((301,)), np.arange(1), seeds(1), sampling)
    shorter = Sampling(max_tokens=16, max_model_len=10, ignore_eos=True)
    assert engine.generate(some_prompts((3,)), np.arange(1), seeds(1), shorter).response_ids.lengths == [7]
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engine.generate(some_prompts((3, 0)), np.arange(2), seeds(2), sampling)
    assert len(engine.generate(some_prompts(), np.arange(0), seeds(0), sampling).response_ids) == 0


def test_log_probs_may_be_left_out(ready):
    _, engine = ready
    got = engine.generate(some_prompts(), np.arange(4), seeds(4), Sampling(max_tokens=5, log_probs=False))
    assert got.log_probs is None and len(got.response_ids) == 4


# ------------------------------------------------------------------------------------------------------------ weights


def test_after_new_weights_tokens_and_log_probs_are_those_of_the_new_policy(ready):
    worker, engine = ready
    prompts, group, sampling = some_prompts(), np.repeat(np.arange(4), 4), Sampling(max_tokens=30, ignore_eos=True)
    before, pid = engine.generate(prompts, group, seeds(16), sampling), engine.process.pid
    old = trainer_says(worker, prompts, group, before.response_ids)
    change(worker)
    assert hand_over(worker, engine) and not hand_over(worker, engine)
    after = engine.generate(prompts, group, seeds(16), sampling)
    new = trainer_says(worker, prompts, group, after.response_ids)
    assert np.abs(after.log_probs.values - new).mean() < 1e-3
    assert engine.process.pid == pid and (engine.policy_version, engine.policy_digest) == (
        worker.policy_version,
        worker.weights_digest(),
    )
    assert rows(after.response_ids) != rows(before.response_ids)
    assert np.abs(old - trainer_says(worker, prompts, group, before.response_ids)).mean() > 0.05


def test_a_change_of_the_shared_embedding_alone_reaches_the_output_head(ready):
    worker, engine = ready
    with torch.no_grad():
        worker.model.network.get_input_embeddings().weight.mul_(1.3)
    worker.policy_version += 1
    worker._trained_digests = None
    hand_over(worker, engine)
    prompts, group = some_prompts((160,)), np.zeros(4, dtype=int)
    got = engine.generate(prompts, group, seeds(4), Sampling(max_tokens=10))
    assert np.abs(got.log_probs.values - trainer_says(worker, prompts, group, got.response_ids)).mean() < 1e-3


def test_weights_of_another_policy_are_refused_and_the_next_load_works(ready):
    worker, engine = ready
    folder = engine.new_folder(99, 0)
    write_policy(worker, folder)
    reference = np.load(folder / CHECK_LOG_PROBS)
    np.save(folder / CHECK_LOG_PROBS, reference + 0.01)
    with pytest.raises(WeightsNotTaken, match=r"differ from the policy.s by 0\.01 nats"):
        engine.load(folder, worker.policy_version, worker.weights_digest())
    assert engine.policy_version == -1
    with pytest.raises(ValueError, match="no policy is loaded"):
        engine.generate(some_prompts(), np.arange(4), seeds(4), Sampling(max_tokens=4))
    hand_over(worker, engine)
    assert engine.policy_version == worker.policy_version


# -------------------------------------------------------------------------------------------------------------- death


def in_the_middle(engine, action):
    """Sample for a while; do something to the engine as soon as it samples. Returns what was raised, and when."""
    prompts, group = some_prompts((9,)), np.zeros(2000, dtype=int)

    def act():
        time.sleep(1.5)
        action(engine.process.pid)

    thread = threading.Thread(target=act)
    thread.start()
    start = time.monotonic()
    with pytest.raises(OSError) as caught:
        engine.generate(prompts, group, seeds(2000), Sampling(max_tokens=280, ignore_eos=True))
    took = time.monotonic() - start - 1.5
    thread.join()
    return caught.value, took


def the_next_call_works(engine):
    prompts, group, sampling = some_prompts(), np.arange(4), Sampling(max_tokens=10)
    got = engine.generate(prompts, group, seeds(4), sampling)
    assert rows(engine.generate(prompts, group, seeds(4), sampling).response_ids) == rows(got.response_ids)
    return got


def test_an_engine_that_is_killed_while_it_samples_is_replaced_and_samples_the_same(ready):
    worker, engine = ready
    before, pid = the_next_call_works(engine), engine.process.pid
    error, took = in_the_middle(engine, lambda pid: os.kill(pid, signal.SIGKILL))
    assert isinstance(error, EngineDied) and "in generate: it was killed by SIGKILL" in str(error) and took < 5
    assert not psutil.pid_exists(pid) and engine.policy_version == worker.policy_version
    after = the_next_call_works(engine)
    assert engine.process.pid != pid and rows(after.response_ids) == rows(before.response_ids)
    assert after.log_probs.values.tobytes() == before.log_probs.values.tobytes()


def test_an_engine_that_hangs_is_noticed_and_replaced(ready):
    _, engine = ready
    error, took = in_the_middle(engine, lambda pid: os.kill(pid, signal.SIGSTOP))
    assert "no sign of life for 15 s" in str(error) and "engine_silence_s" in str(error) and took < 30
    the_next_call_works(engine)


def test_a_call_that_vllm_refuses_ends_its_process_and_says_why(ready):
    _, engine = ready
    pid = engine.process.pid
    with pytest.raises(EngineFailed, match=r"vLLM, in generate: .*temperature"):
        engine.generate(some_prompts(), np.arange(4), seeds(4), Sampling(temperature=9.0, max_tokens=4))
    assert not psutil.pid_exists(pid)
    the_next_call_works(engine)


def left_behind(scratch):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(scratch) in " ".join(p.info["cmdline"] or [])]


def test_closing_leaves_no_process_and_no_file(ready):
    _, engine = ready
    scratch, pid = engine.scratch(), engine.process.pid
    assert left_behind(scratch)
    engine.close()
    assert not left_behind(scratch) and not psutil.pid_exists(pid) and not scratch.exists()


OWNER = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from test_vllm_engine import hand_over, parts_of
worker, engine = parts_of({folder!r}, tensor_model_parallel_size={tp})
hand_over(worker, engine)
print(engine.scratch(), engine.process.pid, *engine.process.workers, flush=True)
input()
"""


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_does_not_outlive_its_owner(tiny_model, tp):
    root = Path(__file__).parent.parent
    code = OWNER.format(tests=str(root / "tests"), root=str(root), folder=str(tiny_model("llama", **SIZES)), tp=tp)
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        scratch, *pids = owner.stdout.readline().split()
    finally:
        owner.kill()
        owner.communicate()
    assert len(pids) == (1 if tp == 1 else 3)
    deadline = time.monotonic() + 10
    while left_behind(scratch) or Path(scratch).exists() or any(psutil.pid_exists(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------- several devices


@pytest.mark.slow
def test_two_tensor_parallel_workers_sample_what_one_does_and_a_lost_one_is_noticed(tiny_model):
    worker, engine = parts_of(tiny_model("llama", **SIZES), tensor_model_parallel_size=2, engine_startup_s=500.0)
    try:
        hand_over(worker, engine)
        prompts, group = some_prompts(), np.repeat(np.arange(4), 4)
        got = engine.generate(prompts, group, seeds(16), Sampling(max_tokens=30))
        assert np.abs(got.log_probs.values - trainer_says(worker, prompts, group, got.response_ids)).mean() < 1e-3
        change(worker)
        hand_over(worker, engine)
        got = engine.generate(prompts, group, seeds(16), Sampling(max_tokens=30))
        assert np.abs(got.log_probs.values - trainer_says(worker, prompts, group, got.response_ids)).mean() < 1e-3
        assert len(engine.process.workers) == 2
        lost = engine.process.workers[1]
        shared = {path for pid in engine.process.workers for path in shared_files(pid)}
        assert shared and all(path.exists() for path in shared)
        error, took = in_the_middle(engine, lambda _: os.kill(lost, signal.SIGKILL))
        assert isinstance(error, EngineDied) and f"worker process {lost} died" in str(error) and took < 5
        the_next_call_works(engine)
        assert not any(path.exists() for path in shared)
    finally:
        engine.close()


def test_filters_at_temperature_1_leave_the_log_probs_those_of_the_whole_distribution(tiny_model):
    worker, engine = parts_of(tiny_model("llama", **SIZES, tie_word_embeddings=False), top_k=5)
    try:
        hand_over(worker, engine)
        prompts, group = some_prompts(), np.repeat(np.arange(4), 4)
        got = engine.generate(prompts, group, seeds(16), Sampling(top_k=5, max_tokens=20))
        assert np.abs(got.log_probs.values - trainer_says(worker, prompts, group, got.response_ids)).mean() < 1e-3
        assert (got.notes["filters"], got.notes["sampled_with"]) == ("none", "top_k=5")
    finally:
        engine.close()
