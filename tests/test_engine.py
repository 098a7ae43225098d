"""The transformers rollout engine: which tokens it samples, what it says of them, and when it stops."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.engines.protocol import Sampling
from tasks.engines.sampling import BLOCK, Streams, choose, kept
from tasks.engines.transformers_engine import TransformersEngine
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import MicroBatching, Sequences


class Letters:
    """A tokenizer whose tokens are single letters."""

    eos_token_id = 1

    def batch_decode(self, sequences, *, skip_special_tokens):
        return ["".join(chr(ord("A") + token) for token in row) for row in sequences]


def engine_of(folder, *, tokenizer=None, model=None, **rollout):
    model = {"path": str(folder), "enable_gradient_checkpointing": False, **(model or {})}
    sections = {"model": model, "rollout": {"n": 4, **rollout}}
    cfg = RunConfig.model_validate({"actor_rollout_ref": sections, "trainer": {"device": "cpu"}})
    worker = PolicyWorker(cfg, total_steps=1, with_reference=False)
    return TransformersEngine(worker, tokenizer or Letters()), worker


def some_prompts(lengths=(3, 9, 5, 9), vocab=61):
    random = np.random.default_rng(0)
    return Ragged.from_rows([random.integers(2, vocab, n) for n in lengths], np.int32)


def groups(prompts, n=4):
    return np.repeat(np.arange(len(prompts)), n)


def seeds(rows):
    return np.random.default_rng(7).integers(0, 2**62, rows)


def rows(ragged):
    return [row.tolist() for row in ragged]


# --------------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engines_log_probs_are_the_workers_at_the_same_temperature(tiny_model, temperature, filters):
    engine, worker = engine_of(tiny_model())
    prompts = some_prompts()
    sampling = Sampling(temperature=temperature, max_tokens=30, **filters)
    got = engine.generate(prompts, groups(prompts), seeds(16), sampling)
    seqs = Sequences(prompts, groups(prompts), got.response_ids)
    trained = worker.log_probs(seqs, MicroBatching(8, None), temperature=temperature).log_probs
    np.testing.assert_allclose(got.log_probs.values, trained.values, atol=2e-5)
    assert got.notes["log_probs"] == "processed" and got.notes["temperature"] == temperature
    assert got.notes["filters"] == "none"
    assert got.notes["sampled_with"] == (", ".join(f"{k}={v}" for k, v in filters.items()) or "no filter")


def test_greedy_log_probs_are_at_temperature_1_and_may_be_left_out(tiny_model):
    engine, worker = engine_of(tiny_model())
    prompts = some_prompts()
    got = engine.generate(prompts, np.arange(4), seeds(4), Sampling(temperature=0.3, greedy=True, max_tokens=12))
    seqs = Sequences(prompts, np.arange(4), got.response_ids)
    trained = worker.log_probs(seqs, MicroBatching(8, None), temperature=1.0).log_probs
    np.testing.assert_allclose(got.log_probs.values, trained.values, atol=2e-5)
    assert got.notes["temperature"] == 1.0 and got.notes["sampled_with"] == "greedy"
    without = engine.generate(prompts, np.arange(4), seeds(4), Sampling(temperature=0, max_tokens=12, log_probs=False))
    assert without.log_probs is None and rows(without.response_ids) == rows(got.response_ids)


# ------------------------------------------------------------------------------------------------------ which tokens

MODELS = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "final_logit_softcapping": 2.0, "hidden_activation": "gelu"},
}


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_takes_the_most_likely_token_of_the_whole_sequence_every_time(tiny_model, model_type, attention):
    folder = tiny_model(model_type, **MODELS[model_type])
    engine, _ = engine_of(folder, model={"attn_implementation": attention})
    prompts = some_prompts()
    got = engine.generate(prompts, groups(prompts, 1), seeds(4), Sampling(greedy=True, max_tokens=20, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention or "eager").eval()
    for prompt, response in zip(prompts, got.response_ids, strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        assert response.tolist() == logits.argmax(-1).tolist()


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(tiny_model):
    engine, _ = engine_of(tiny_model())
    prompts, group, seed = some_prompts(), groups(some_prompts()), seeds(16)
    sampling = Sampling(max_tokens=40)
    together = engine.generate(prompts, group, seed, sampling)
    order = np.random.default_rng(3).permutation(16)
    shuffled = engine.generate(prompts, group[order], seed[order], sampling)
    assert rows(shuffled.response_ids) == [together.response_ids[i].tolist() for i in order]
    for row in range(16):
        alone = engine.generate(prompts, group[[row]], seed[[row]], sampling)
        assert alone.response_ids[0].tolist() == together.response_ids[row].tolist()
    in_waves, _ = engine_of(tiny_model(), max_num_seqs=3, max_num_batched_tokens=10)
    assert rows(in_waves.generate(prompts, group, seed, sampling).response_ids) == rows(together.response_ids)


def test_samples_of_a_group_differ_by_their_seeds_and_equal_seeds_are_equal(tiny_model):
    engine, _ = engine_of(tiny_model())
    prompts = some_prompts(lengths=(5,))
    different = engine.generate(prompts, np.zeros(8, dtype=int), seeds(8), Sampling(max_tokens=20, ignore_eos=True))
    assert len({tuple(row) for row in rows(different.response_ids)}) == 8
    same = engine.generate(prompts, np.zeros(8, dtype=int), np.full(8, 5), Sampling(max_tokens=20))
    assert len({tuple(row) for row in rows(same.response_ids)}) == 1


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(1000, -1)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, log_probs = choose(logits, uniform, Sampling(temperature=0.5))
    likely = torch.softmax(logits[0] / 0.5, dim=-1)
    shares = torch.bincount(tokens, minlength=4) / 1000
    assert (shares - likely).abs().max() <= 1e-3
    torch.testing.assert_close(log_probs, likely.log()[tokens])


def test_top_k_and_top_p_keep_the_tokens_one_expects():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert kept(probs, 2, 1.0).tolist() == [[False, True, False, True]]
    assert kept(probs, -1, 0.7).tolist() == [[False, True, False, True]]
    assert kept(probs, -1, 0.71).tolist() == [[False, True, True, True]]
    assert kept(probs, -1, 1e-9).tolist() == [[False, True, False, False]]
    assert kept(probs, 9, 1.0).all() and kept(probs, 0, 1.0).all()
    # Of the two that top-k leaves, 0.4 and 0.3, the first holds 57 % alone.
    assert kept(probs, 2, 0.5).tolist() == [[False, True, False, False]]
    assert kept(torch.full((1, 4), 0.25), 2, 1.0).tolist() == [[True, True, False, False]]


def test_filtered_tokens_are_never_drawn():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).repeat_interleave(200, dim=0)
    uniform = torch.rand(800, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    tokens, _ = choose(logits, uniform, Sampling(top_k=7, top_p=0.8))
    allowed = kept(logits.softmax(-1), 7, 0.8)
    assert allowed.gather(1, tokens.unsqueeze(1)).all() and 1 < allowed.sum(-1).max() <= 7


def test_a_stream_is_that_of_its_seed_alone_however_long_it_is():
    device = torch.device("cpu")
    many, one = Streams(np.array([3, 4, 5]), device), Streams(np.array([4]), device)
    for position in range(2 * BLOCK + 3):
        numbers = many.at(position, torch.arange(3))
        assert numbers[1] == one.at(position, torch.arange(1))[0] and len(set(numbers.tolist())) == 3


# ------------------------------------------------------------------------------------------------------ when it stops


def test_a_response_ends_with_its_end_token_or_is_cut_by_length(tiny_model):
    engine, _ = engine_of(tiny_model())
    prompts = some_prompts()
    got = engine.generate(prompts, groups(prompts, 32), seeds(128), Sampling(max_tokens=25))
    assert {"stop", "length"} == set(got.finish_reason)
    for row, reason in zip(rows(got.response_ids), got.finish_reason, strict=True):
        assert 1 not in row[:-1]
        assert (row[-1] == 1) if reason == "stop" else (row[-1] != 1 and len(row) == 25)
    on = engine.generate(prompts, groups(prompts, 32), seeds(128), Sampling(max_tokens=25, ignore_eos=True))
    assert set(on.finish_reason) == {"length"} and set(on.response_ids.lengths) == {25}
    for short, long in zip(got.response_ids, on.response_ids, strict=True):
        assert long[: len(short)].tolist() == short.tolist()


def test_all_end_tokens_of_model_and_tokenizer_end_a_response(tiny_model):
    class Other(Letters):
        eos_token_id = 5

    engine, _ = engine_of(tiny_model(eos_token_id=[1, 3]), tokenizer=Other())
    prompts = some_prompts()
    got = engine.generate(prompts, groups(prompts, 32), seeds(128), Sampling(max_tokens=60))
    last = {row[-1] for row, why in zip(rows(got.response_ids), got.finish_reason, strict=True) if why == "stop"}
    assert last == {1, 3, 5}


def test_a_stop_text_ends_a_response_and_stays_in_it(tiny_model):
    engine, _ = engine_of(tiny_model())
    prompts, text = some_prompts(), Letters()
    free = engine.generate(prompts, groups(prompts, 8), seeds(32), Sampling(max_tokens=25, ignore_eos=True))
    stop = text.batch_decode([free.response_ids[4].tolist()[10:12]], skip_special_tokens=False)[0]
    sampling = Sampling(max_tokens=25, ignore_eos=True, stop=(stop, "not to be found"))
    got = engine.generate(prompts, groups(prompts, 8), seeds(32), sampling)
    whole = text.batch_decode(rows(free.response_ids), skip_special_tokens=False)
    for before, after, reason in zip(
        whole, text.batch_decode(rows(got.response_ids), skip_special_tokens=False), got.finish_reason, strict=True
    ):
        assert after == (before[: before.index(stop) + 2] if stop in before else before)
        assert reason == ("stop" if stop in before else "length")
    assert got.finish_reason[4] == "stop"


def test_a_prompt_that_fills_the_context_still_gets_a_token_and_one_beyond_it_is_refused(tiny_model):
    engine, _ = engine_of(tiny_model(max_position_embeddings=64))
    prompts = some_prompts(lengths=(64, 63, 60, 3))
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    got = engine.generate(prompts, np.arange(4), seeds(4), sampling)
    assert got.response_ids.lengths.tolist() == [1, 1, 4, 16] and set(got.finish_reason) == {"length"}
    with pytest.raises(ValueError, match="prompt 0 has 65 tokens but the context holds 64"):
        engine.generate(some_prompts(lengths=(65,)), np.arange(1), seeds(1), sampling)
    shorter = Sampling(max_tokens=16, max_model_len=10, ignore_eos=True)
    assert engine.generate(some_prompts(lengths=(3,)), np.arange(1), seeds(1), shorter).response_ids.lengths == [7]


def test_a_prompt_without_tokens_is_refused(tiny_model):
    engine, _ = engine_of(tiny_model())
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engine.generate(some_prompts(lengths=(3, 0)), np.arange(2), seeds(2), Sampling(max_tokens=4))


def test_no_rows_give_no_responses(tiny_model):
    engine, _ = engine_of(tiny_model())
    got = engine.generate(some_prompts(), np.arange(0), seeds(0), Sampling(max_tokens=4))
    assert len(got.response_ids) == 0 and got.finish_reason == []


def test_the_engine_samples_from_the_workers_weights_as_they_are_now(tiny_model):
    engine, worker = engine_of(tiny_model())
    prompts = some_prompts()
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    before, digest = engine.generate(prompts, groups(prompts), seeds(16), sampling), engine.policy_digest
    assert engine.policy_version == 0 and digest == worker.weights_digest()
    with torch.no_grad():
        worker.model.network.get_input_embeddings().weight.mul_(0.5)
    worker.policy_version = 1
    after = engine.generate(prompts, groups(prompts), seeds(16), sampling)
    assert engine.policy_version == 1 and rows(after.response_ids) != rows(before.response_ids)
