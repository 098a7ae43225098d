"""Masked statistics, response ends, log-probs out of logits and missing counts, against verl's numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden import cases, check, values
from transformers import GPT2Config, GPT2LMHeadModel

from storage.ragged import Ragged
from tasks.algorithms.advantages import whiten
from tasks.algorithms.aggregation import Totals, masked_sum
from tasks.config import RunConfig
from tasks.engines.protocol import Sampling
from tasks.engines.transformers_engine import TransformersEngine
from tasks.workers.forward import Layout, response_log_probs, sum_pi_squared, to_device, token_log_probs
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import Sequences

# ------------------------------------------------------------------------------------------------------------- masked


def inside_mask(case):
    given = values(case, "inputs")
    return given["values"][np.asarray(given["mask"]).astype(bool)].astype(np.float64)


# Whitening divides by sqrt(variance + 1e-8); the slope of a line through two of its points gives that back.
@cases("masked", lambda case: case["function"] == "masked_var" and not case["raises"] and case["params"]["unbiased"])
def test_whitening_divides_by_verls_variance(case):
    numbers = inside_mask(case)
    slope = np.ptp(numbers) / np.ptp(whiten(numbers))
    check(case, slope**2 - 1e-8, values(case, "expected")["out"])


@cases("masked", lambda case: case["function"] == "masked_var" and case["params"]["unbiased"] is False)
def test_the_variance_of_masked_sums_is_verls_biased_one(case):
    given = values(case, "inputs")
    numbers, mask = torch.from_numpy(given["values"]), torch.from_numpy(np.asarray(given["mask"])).bool()
    mean = masked_sum(numbers, mask) / mask.sum()
    check(case, masked_sum((numbers - mean) ** 2, mask) / mask.sum(), values(case, "expected")["out"])


@cases("masked", lambda case: case["function"] == "masked_whiten" and case["params"]["shift_mean"] is False)
def test_whitening_and_the_mean_again_equal_verls_unshifted_whitening(case):
    want, mask = values(case, "expected")["out"], np.asarray(values(case, "inputs")["mask"]).astype(bool)
    numbers = inside_mask(case)
    check(case, whiten(numbers) + numbers.mean(), want[mask])


class EndsAtNothing:
    eos_token_id = None


def reciting_model(rows, eos):
    """A GPT-2 whose next token depends on the position alone: all rows, one after the other."""
    config = GPT2Config(
        vocab_size=int(rows.max()) + 1,
        n_positions=rows.size + 1,
        n_embd=rows.size,
        n_layer=1,
        n_head=1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in (*model.transformer.h.parameters(), model.transformer.wte.weight, model.lm_head.weight):
            weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(rows.size + 1, rows.size))
        model.lm_head.weight[torch.from_numpy(rows.reshape(-1)), torch.arange(rows.size)] = 1
    return model


@cases("masked", lambda case: case["function"] == "get_response_mask")
def test_the_engine_ends_responses_where_verls_mask_does(case, tmp_path):
    said = values(case, "inputs")["response_id"]
    count, length = said.shape
    reciting_model(said, case["params"]["eos_token"]).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "enable_gradient_checkpointing": False}
    cfg = RunConfig.model_validate({"actor_rollout_ref": {"model": model}, "trainer": {"device": "cpu"}})
    engine = TransformersEngine(PolicyWorker(cfg, total_steps=1, with_reference=False), EndsAtNothing())
    # A prompt of i * R + 1 tokens is answered from position i * R on.
    prompts = Ragged.from_rows([np.zeros(row * length + 1) for row in range(count)], np.int32)
    sampling = Sampling(temperature=0, max_tokens=length)
    got = engine.generate(prompts, np.arange(count), np.arange(count), sampling).response_ids
    mask = np.asarray(values(case, "expected")["mask"])
    check(case, np.arange(length) < got.lengths[:, None], mask)
    for row in range(count):
        assert got[row].tolist() == said[row][mask[row].astype(bool)].tolist()


# --------------------------------------------------------------------------------------------------------- from logits


def bits_to_bfloat16(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@cases("logits", lambda case: case["function"] == "logprobs_from_logits_v2")
def test_log_probs_of_bfloat16_logits_equal_verls_to_its_rounding(case):
    given, want = values(case, "inputs"), bits_to_bfloat16(values(case, "expected")["out"])
    logits, labels = bits_to_bfloat16(given["logits"]), torch.from_numpy(given["labels"])
    head = SimpleNamespace(config=SimpleNamespace(vocab_size=logits.shape[-1]), logits=lambda hidden: hidden)
    got, *_ = token_log_probs(head, logits.flatten(0, 1), labels.flatten(), temperature=1.0, entropy=False)
    assert got.dtype == torch.float32
    check(case, got.reshape(want.shape), want.float())


@cases("logits", lambda case: case["function"] == "log_probs_from_logits_response")
def test_the_logits_before_a_response_token_predict_it_as_in_verl(case):
    given = values(case, "inputs")
    logits, ids = torch.from_numpy(given["logits"]), given["input_ids"].astype(np.int32)
    rows, prompt = len(ids), ids.shape[1] - case["params"]["response_length"]
    seqs = Sequences(
        prompts=Ragged.from_rows(ids[:, :prompt], np.int32),
        group=np.arange(rows),
        responses=Ragged.from_rows(ids[:, prompt:], np.int32),
    )
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=logits.shape[-1]),
        hidden=lambda fed: logits[:, : fed.shape[1]],
        logits=lambda hidden: hidden,
    )
    batch = to_device(seqs, np.arange(rows), torch.device("cpu"))
    got, *_ = response_log_probs(model, batch, temperature=1.0, layout=Layout.PADDED, entropy=False)
    check(case, got.reshape(rows, -1), values(case, "expected")["out"])


@cases("logits", lambda case: case["function"] == "calculate_sum_pi_squared_from_logits")
def test_sums_of_squared_probabilities_equal_verls(case):
    logits = torch.from_numpy(values(case, "inputs")["logits"])
    check(case, sum_pi_squared(logits), values(case, "expected")["out"])


def test_the_sum_of_squared_probabilities_is_1_when_certain_and_1_over_v_when_uniform():
    logits = torch.tensor([[5000.0, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]], dtype=torch.bfloat16)
    got = sum_pi_squared(logits)
    assert got.dtype == torch.float32 and got.tolist() == pytest.approx([1.0, 0.25])


# ------------------------------------------------------------------------------------------------------------- counts

# The count each case leaves out when several ranks share a mini-batch.
LEFT_OUT = {"batch_num_tokens": "tokens", "global_batch_size": "sequences"}


@cases("agg", lambda case: "_without_" in case["name"])
def test_a_mini_batch_has_no_totals_without_its_global_counts(case):
    missing = LEFT_OUT[case["name"].split("_without_")[1]]
    tokens = values(case, "inputs")["loss_mask"].sum(axis=1)
    counts = {"tokens": int(tokens.sum()), "sequences": len(tokens), "prompts": len(tokens)}
    del counts[missing]
    with pytest.raises(TypeError, match=f"'{missing}'"):
        Totals(row_tokens=tokens, prompt_tokens=tokens, **counts)
