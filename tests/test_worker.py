"""The policy worker: its numbers do not depend on how the work is cut, and what goes wrong leaves the weights alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.stage import NonFiniteError
from tasks.workers import forward
from tasks.workers.forward import Layout, response_log_probs, to_device
from tasks.workers.mini_batch import MiniBatch
from tasks.workers.optim import optimizer_tensors
from tasks.workers.policy import PolicyWorker, Signals, choose_device
from tasks.workers.sequences import MicroBatching, Sequences

CUTS = [MicroBatching(1, None), MicroBatching(2, None), MicroBatching(4, None), MicroBatching(8, None)]
CUTS += [MicroBatching(None, 60), MicroBatching(None, 200)]
WHOLE = MicroBatching(1000, None)


def config(folder, *, model=None, actor=None, **more):
    model = {"path": str(folder), "dtype": "float64", "enable_gradient_checkpointing": False, **(model or {})}
    actor = {"optim": {"lr": 1e-2, "weight_decay": 0.1}, **(actor or {})}
    sections = {"data": {"max_response_length": 40}, "trainer": {"device": "cpu"}, **more}
    return RunConfig.model_validate({"actor_rollout_ref": {"model": model, "actor": actor}, **sections})


def worker_of(cfg, steps=10):
    return PolicyWorker(cfg, total_steps=steps, with_reference=True)


def some_sequences(lengths=(1, 40, 7, 0, 13, 25, 0, 38, 2, 11), prompt_lengths=(3, 9, 5), vocab=61):
    random = np.random.default_rng(0)
    return Sequences(
        Ragged.from_rows([random.integers(2, vocab, n) for n in prompt_lengths], np.int32),
        np.arange(len(lengths)) % len(prompt_lengths),
        Ragged.from_rows([random.integers(2, vocab, n) for n in lengths], np.int32),
    )


def some_signals(seqs, near):
    """Signals with off-policy ratios around 1, a loss mask with holes, and one row outside the loss."""
    random = np.random.default_rng(1)
    offsets, total = seqs.responses.offsets, len(seqs.responses.values)
    mask = random.random(total) < 0.9
    mask[offsets[-2] : offsets[-1]] = False

    def noisy(scale):
        return Ragged((near.values + scale * random.standard_normal(total)).astype(np.float32), offsets)

    advantages = np.repeat(random.standard_normal(len(seqs.responses)), seqs.responses.lengths).astype(np.float32)
    return Signals(Ragged(advantages, offsets), Ragged(mask, offsets), noisy(0.2), noisy(0.2), None, seqs.group)


def ready(cfg, seqs=None):
    worker, seqs = worker_of(cfg), seqs or some_sequences()
    near = worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs
    return worker, seqs, some_signals(seqs, near)


def loss_and_gradients(worker, seqs, signals, micro):
    layout = worker.layout(training=True)
    worker.model.network.zero_grad()
    with worker.model.computing():
        batch = MiniBatch(worker.cfg, worker.model, seqs, signals, layout=layout)
        result = batch.accumulate(np.arange(len(seqs.responses)), micro, "here")
    return result, {n: p.grad.clone() for n, p in worker.model.network.named_parameters()}


def numbers(result):
    row = result.row()
    return [row[name] for name in sorted(row) if name not in ("skipped", "micro_batches")]


def assert_same(gradients, others, tolerance):
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        assert (others[name] - gradient).abs().max() <= tolerance * scale, name


# ---------------------------------------------------------------------------------------------- independent of the cut

MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_are_the_same_for_every_cut(tiny_model, mode):
    actor = {"loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.02}
    worker, seqs, signals = ready(config(tiny_model(), actor=actor))
    whole, gradients = loss_and_gradients(worker, seqs, signals, WHOLE)
    assert whole.sums.loss != 0 and whole.micro_batches == 1
    for micro in CUTS:
        cut, others = loss_and_gradients(worker, seqs, signals, micro)
        assert numbers(cut) == pytest.approx(numbers(whole), rel=1e-9)
        assert_same(gradients, others, 1e-9)


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "clip_cov", "kl_cov", "cispo"])
def test_losses_that_look_at_sequences_or_the_whole_mini_batch_are_the_same_for_every_cut(tiny_model, loss):
    actor = {"policy_loss": {"loss_mode": loss, "clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.1}}
    worker, seqs, signals = ready(config(tiny_model(), actor=actor))
    whole, gradients = loss_and_gradients(worker, seqs, signals, WHOLE)
    for micro in (MicroBatching(1, None), MicroBatching(4, None), MicroBatching(None, 100)):
        cut, others = loss_and_gradients(worker, seqs, signals, micro)
        assert cut.sums.loss == pytest.approx(whole.sums.loss, rel=1e-9)
        assert_same(gradients, others, 1e-9)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
def test_loss_and_gradient_are_the_same_with_and_without_shared_prompts_and_checkpointing(
    tiny_model, model_type, attention
):
    folder = tiny_model(model_type)
    results = []
    for share, checkpointing in ((True, False), (False, False), (False, True), (True, True)):
        model = {"attn_implementation": attention, "enable_gradient_checkpointing": checkpointing}
        actor = {"use_prefix_grouper": share, "use_kl_loss": True, "entropy_coeff": 0.02}
        worker, seqs, signals = ready(config(folder, model=model, actor=actor))
        assert (worker.layout(training=True) is Layout.SHARED_PROMPTS) == (share and not checkpointing)
        results.append(loss_and_gradients(worker, seqs, signals, MicroBatching(6, None)))
    (first, gradients), *rest = results
    for other, others in rest:
        assert other.sums.loss == pytest.approx(first.sums.loss, rel=1e-9)
        assert_same(gradients, others, 1e-9)


def test_loss_and_gradient_are_the_same_when_the_head_runs_in_chunks(tiny_model, monkeypatch):
    worker, seqs, signals = ready(config(tiny_model(), actor={"entropy_coeff": 0.02}))
    whole, gradients = loss_and_gradients(worker, seqs, signals, WHOLE)
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 5 * 61)
    chunked, others = loss_and_gradients(worker, seqs, signals, WHOLE)
    assert chunked.sums.loss == pytest.approx(whole.sums.loss, rel=1e-9)
    assert_same(gradients, others, 1e-9)


def test_gradient_is_that_of_each_sequence_alone_without_any_padding(tiny_model):
    """Against plain autograd over the model's own forward pass, one unpadded sequence at a time."""
    worker, seqs, signals = ready(config(tiny_model()))
    result, gradients = loss_and_gradients(worker, seqs, signals, MicroBatching(4, None))
    model, tokens = worker.model.network, signals.loss_mask.values.sum()
    model.zero_grad()
    total = 0.0
    with worker.model.computing():
        for row, response in enumerate(seqs.responses):
            if not len(response):
                continue
            prompt = seqs.prompts[seqs.group[row]]
            ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1)[torch.arange(len(response)), ids[len(prompt) :]]
            ratio = (log_probs - torch.tensor(signals.old_log_probs[row])).exp()
            advantage = torch.tensor(signals.advantages[row])
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            loss = torch.where(advantage < 0, torch.minimum(-advantage * 3.0, loss), loss)
            loss = (loss * torch.tensor(signals.loss_mask[row])).sum() / tokens
            loss.backward()
            total += float(loss.detach())
    assert result.sums.loss == pytest.approx(total, rel=1e-9)
    assert_same({n: p.grad for n, p in model.named_parameters()}, gradients, 1e-9)


# ---------------------------------------------------------------------------------------------------------- log-probs


def by_hand(folder, seqs, temperature):
    """Log-probs and entropies from the model's own forward pass, one unpadded sequence at a time, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    log_probs, entropies = [], []
    for row, response in enumerate(seqs.responses):
        prompt = seqs.prompts[seqs.group[row]]
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : len(ids) - 1]
        log_softmax = (logits / temperature).log_softmax(-1)
        log_probs += log_softmax[torch.arange(len(response)), ids[len(prompt) :]].tolist()
        entropies += (-(log_softmax.exp() * log_softmax).sum(-1)).tolist()
    return log_probs, entropies


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_are_the_models_own(tiny_model, share, temperature):
    cfg = config(tiny_model(), model={"dtype": "float32"}, actor={"use_prefix_grouper": share})
    seqs = some_sequences()
    got = worker_of(cfg).log_probs(seqs, MicroBatching(4, None), temperature=temperature)
    log_probs, entropies = by_hand(tiny_model(), seqs, temperature)
    np.testing.assert_allclose(got.log_probs.values, log_probs, atol=2e-5)
    np.testing.assert_allclose(got.entropy.values, entropies, atol=2e-5)
    assert got.micro_batches == 3 and np.array_equal(got.log_probs.offsets, seqs.responses.offsets)


ODD_HEADS = {
    "gemma2": {
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 1.5,
        "sliding_window": 6,
        "hidden_activation": "gelu",
    },
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "mistral": {"sliding_window": 6},
}


@pytest.mark.parametrize("model_type", ODD_HEADS)
def test_log_probs_are_the_models_own_for_capped_and_scaled_logits_and_sliding_windows(tiny_model, model_type):
    folder, seqs = tiny_model(model_type, **ODD_HEADS[model_type]), some_sequences()
    worker = worker_of(config(folder, model={"dtype": "float32"}))
    got = worker.log_probs(seqs, MicroBatching(4, None), temperature=1.0)
    np.testing.assert_allclose(got.log_probs.values, by_hand(folder, seqs, 1.0)[0], atol=2e-5)
    assert (worker.layout(training=False) is Layout.SHARED_PROMPTS) == (model_type in ("cohere", "granite"))


def test_a_model_with_an_unknown_rule_for_its_logits_is_refused(tiny_model):
    folder = tiny_model("hyperclovax", logits_scaling=3.0)
    with pytest.raises(ValueError, match="hyperclovax computes its logits in a way unknown here"):
        worker_of(config(folder))


def test_shared_and_unshared_prompts_agree_in_float64(tiny_model):
    worker, seqs = worker_of(config(tiny_model())), some_sequences()
    batch = to_device(seqs, np.arange(10), torch.device("cpu"))
    with torch.no_grad(), worker.model.computing():
        both = [
            response_log_probs(worker.model, batch, temperature=1.0, layout=layout, entropy=True, squares=True)
            for layout in (Layout.SHARED_PROMPTS, Layout.PADDED)
        ]
    for shared, alone in zip(*both, strict=True):
        assert shared.dtype == torch.float64
        torch.testing.assert_close(shared, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"dtype": "float32"}])
def test_bfloat16_weights_and_bfloat16_computation_stay_near_float32(tiny_model, model):
    fsdp = {"mixed_precision": {"param_dtype": "bfloat16"}}
    cfg = config(tiny_model(), model=model, actor={"fsdp_config": fsdp, "use_kl_loss": True})
    worker, seqs, signals = ready(cfg)
    got = worker.log_probs(seqs, MicroBatching(4, None), temperature=1.0)
    log_probs, _ = by_hand(tiny_model(), seqs, 1.0)
    assert np.abs(got.log_probs.values - np.asarray(log_probs)).mean() < 0.05
    [row] = worker.update(seqs, signals, [[np.arange(10)]], MicroBatching(4, None), step=1)
    assert np.isfinite(row["grad_norm"]) and row["grad_norm"] > 0


def test_a_computation_that_does_not_fit_the_weights_is_refused(tiny_model):
    fsdp = {"mixed_precision": {"param_dtype": "float32"}}
    with pytest.raises(ValueError, match="param_dtype=float32 does not fit"):
        worker_of(config(tiny_model(), actor={"fsdp_config": fsdp}))


def test_a_log_prob_that_is_not_a_number_is_handed_on_as_one_for_the_stage_to_refuse(tiny_model):
    worker, seqs = worker_of(config(tiny_model())), some_sequences(lengths=(3, 3), prompt_lengths=(2,))
    seqs.responses.values[:] = [5, 6, 7, 8, 9, 10]
    with torch.no_grad():
        worker.model.network.get_input_embeddings().weight[8] = torch.nan
    log_probs = worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs
    assert np.isnan(log_probs[1]).any()


# ------------------------------------------------------------------------------------------------------------- update


def test_an_update_moves_the_weights_and_reports_every_optimizer_step(tiny_model):
    worker, seqs, signals = ready(config(tiny_model(), actor={"use_kl_loss": True}))
    before = worker.weights_digest()
    batches = [[np.arange(0, 6), np.arange(6, 10)], [np.arange(0, 6), np.arange(6, 10)]]
    rows = worker.update(seqs, signals, batches, MicroBatching(4, None), step=1)
    assert [(row["update_index"], row["epoch"], row["sequences"], row["micro_batches"]) for row in rows] == [
        (0, 0, 6, 2),
        (1, 0, 4, 1),
        (2, 1, 6, 2),
        (3, 1, 4, 1),
    ]
    assert rows[0]["tokens"] + rows[1]["tokens"] == signals.loss_mask.values.sum()
    assert all(row["skipped"] is None and row["lr"] == 1e-2 and row["grad_norm"] > 0 for row in rows)
    assert rows[0]["entropy"] is None and rows[0]["kl_loss"] > 0
    assert rows[0]["loss"] == pytest.approx(rows[0]["pg_loss"] + 0.001 * rows[0]["kl_loss"])
    assert worker.weights_digest() != before and worker.policy_version == 0


def test_the_first_step_of_a_warm_up_moves_nothing_and_the_rate_follows_the_step(tiny_model):
    optim = {"lr": 1e-2, "lr_warmup_steps": 2}
    worker, seqs, signals = ready(config(tiny_model(), actor={"optim": optim}))
    before = worker.weights_digest()
    rates = []
    for step in (1, 2, 3):
        batches = [[np.arange(0, 6), np.arange(6, 10)]]
        rates += [row["lr"] for row in worker.update(seqs, signals, batches, MicroBatching(4, None), step=step)]
        assert (worker.weights_digest() == before) == (step == 1)
    assert rates == [0, 0, 5e-3, 5e-3, 1e-2, 1e-2]


def test_a_mini_batch_without_loss_tokens_is_skipped_and_the_weights_stay(tiny_model):
    worker, seqs, signals = ready(config(tiny_model()))
    signals.loss_mask.values[:] = False
    before = worker.weights_digest()
    [row] = worker.update(seqs, signals, [[np.arange(10)]], MicroBatching(4, None), step=1)
    assert row["skipped"] == "no token is in the loss" and row["tokens"] == 0 and row["loss"] is None
    assert worker.weights_digest() == before and not list(optimizer_tensors(worker._optimizer, worker._weights))


def test_micro_batches_of_empty_responses_are_not_computed_and_add_nothing(tiny_model):
    worker, seqs, signals = ready(config(tiny_model()), some_sequences(lengths=(0, 0, 5, 0), prompt_lengths=(3,)))
    signals.loss_mask.values[:] = True
    [row] = worker.update(seqs, signals, [[np.arange(4)]], MicroBatching(1, None), step=1)
    assert row["micro_batches"] == 1 and row["tokens"] == 5 and np.isfinite(row["loss"])
    nothing = some_sequences(lengths=(0, 0), prompt_lengths=(3,))
    assert len(worker.log_probs(nothing, WHOLE, temperature=1.0).log_probs.values) == 0


def test_only_response_tokens_count_whatever_the_padded_width(tiny_model):
    """An ended response, one cut by length and one ended by a stop text without an end token, padded to 8."""
    worker, seqs = worker_of(config(tiny_model())), some_sequences(lengths=(3, 8, 5), prompt_lengths=(4,))
    seqs.responses.values[2] = 1
    batch = to_device(seqs, np.arange(3), torch.device("cpu"))
    assert batch.responses.shape == (3, 8) and batch.padded(torch.ones(16)).sum(dim=1).tolist() == [3, 8, 5]
    log_probs = worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs
    assert log_probs.lengths.tolist() == [3, 8, 5]


def test_a_signal_that_is_not_a_number_is_refused_before_anything_moves(tiny_model):
    worker, seqs, signals = ready(config(tiny_model()))
    before = worker.weights_digest()
    signals.old_log_probs.values[seqs.responses.offsets[5] + 2] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 3: the old log-prob of sample 5, token 2, is nan"):
        worker.update(seqs, signals, [[np.arange(10)]], MicroBatching(4, None), step=3)
    assert worker.weights_digest() == before


def test_signals_of_other_lengths_are_refused(tiny_model):
    worker, seqs, signals = ready(config(tiny_model()))
    other = Ragged.from_lengths(signals.advantages.values, np.roll(seqs.responses.lengths, 1))
    with pytest.raises(ValueError, match="the advantages are not aligned with the responses"):
        broken = Signals(other, signals.loss_mask, signals.old_log_probs, None, None, seqs.group)
        worker.update(seqs, broken, [[np.arange(10)]], WHOLE, step=1)


def state_of(worker):
    tensors = {**worker._weights, **dict(optimizer_tensors(worker._optimizer, worker._weights))}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("at", ["loss", "gradient"])
def test_a_loss_or_gradient_out_of_range_late_in_a_step_brings_back_the_weights_before_it(tiny_model, at):
    worker, seqs, signals = ready(config(tiny_model(), model={"dtype": "float32"}))
    worker.update(seqs, signals, [[np.arange(10)]], WHOLE, step=1)
    before = state_of(worker)
    start = seqs.responses.offsets[7]
    signals.loss_mask.values[start:] = True
    signals.advantages.values[start:] = 3e38 if at == "loss" else 1e30
    expected = "update 1: the loss is" if at == "loss" else "update 1: the gradient norm is"
    with pytest.raises(NonFiniteError, match=f"step 2, {expected}"):
        worker.update(seqs, signals, [[np.arange(0, 6), np.arange(6, 10)]], MicroBatching(2, None), step=2)
    after = state_of(worker)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_huge_gap_to_the_reference_leaves_loss_and_gradient_finite(tiny_model):
    worker, seqs, signals = ready(config(tiny_model(), model={"dtype": "float32"}, actor={"use_kl_loss": True}))
    signals.ref_log_probs.values[3] += 100
    [row] = worker.update(seqs, signals, [[np.arange(10)]], MicroBatching(4, None), step=1)
    assert np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"])


# -------------------------------------------------------------------------------------------------------- what is kept


def two_steps(worker, seqs, signals, steps=(1, 2)):
    for step in steps:
        worker.update(seqs, signals, [[np.arange(0, 6), np.arange(6, 10)]], MicroBatching(4, None), step=step)


def test_the_same_inputs_give_the_same_weights_bit_for_bit(tiny_model):
    cfg = config(tiny_model(), model={"dtype": "float32"}, actor={"use_kl_loss": True})
    digests = []
    for _ in range(2):
        worker, seqs, signals = ready(cfg)
        two_steps(worker, seqs, signals)
        digests.append(worker.weights_digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_saved_policy_goes_on_as_if_it_had_never_stopped(tiny_model, tmp_path, lora_rank):
    cfg = config(tiny_model(), model={"dtype": "float32", "lora_rank": lora_rank})
    worker, seqs, signals = ready(cfg)
    two_steps(worker, seqs, signals, steps=(1,))
    worker.policy_version = 1
    worker.save(tmp_path)
    two_steps(worker, seqs, signals, steps=(2,))
    restored = worker_of(cfg)
    restored.load(tmp_path)
    assert restored.policy_version == 1
    two_steps(restored, seqs, signals, steps=(2,))
    one, other = state_of(worker), state_of(restored)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert worker.weights_digest() == restored.weights_digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_a_policy_is_saved_before_its_first_step_and_loaded_without_moments(tiny_model, tmp_path):
    worker, seqs, signals = ready(config(tiny_model()))
    worker.save(tmp_path)
    start = worker.weights_digest()
    two_steps(worker, seqs, signals, steps=(1,))
    worker.load(tmp_path)
    assert worker.weights_digest() == start and not list(optimizer_tensors(worker._optimizer, worker._weights))


def test_a_policy_of_another_model_or_a_damaged_one_is_not_loaded(tiny_model, tmp_path):
    worker = worker_of(config(tiny_model(num_hidden_layers=1)))
    before = worker.weights_digest()
    worker_of(config(tiny_model())).save(tmp_path)
    with pytest.raises(ValueError, match="is no policy of this run's model"):
        worker.load(tmp_path)
    assert worker.weights_digest() == before
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "weights_digest": "0" * 64}))
    with pytest.raises(ValueError, match="is damaged"):
        worker_of(config(tiny_model())).load(tmp_path)


def test_the_digest_is_that_of_all_names_types_shapes_and_bytes(tiny_model):
    worker = worker_of(config(tiny_model()))
    digest = worker.weights_digest()
    assert digest == worker_of(config(tiny_model())).weights_digest()
    assert digest != worker_of(config(tiny_model(), model={"dtype": "float32"})).weights_digest()


# ------------------------------------------------------------------------------------------------- reference and LoRA


def test_the_reference_stays_what_the_policy_was_at_the_start(tiny_model):
    worker, seqs, signals = ready(config(tiny_model(), model={"dtype": "float32"}))
    start = worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs.values
    two_steps(worker, seqs, signals)
    reference = worker.log_probs(seqs, WHOLE, temperature=1.0, reference=True)
    np.testing.assert_array_equal(reference.log_probs.values, start)
    assert reference.entropy is None
    assert np.abs(worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs.values - start).max() > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_the_adapter_alone_and_the_reference_is_the_model_without_it(tiny_model, checkpointing):
    model = {"dtype": "float32", "lora_rank": 4, "enable_gradient_checkpointing": checkpointing}
    cfg = config(tiny_model(), model={**model, "exclude_modules": ".*gate_proj"})
    worker, seqs, signals = ready(cfg)
    start = worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs.values
    frozen = {name: weight.clone() for name, weight in worker._frozen.items()}
    assert all("lora_" in name and "gate_proj" not in name for name in worker._weights)
    two_steps(worker, seqs, signals)
    assert all(torch.equal(weight, frozen[name]) for name, weight in worker._frozen.items())
    reference = worker.log_probs(seqs, WHOLE, temperature=1.0, reference=True).log_probs.values
    np.testing.assert_array_equal(reference, start)
    assert np.abs(worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs.values - start).max() > 1e-4


def test_lora_starts_from_a_given_adapter(tiny_model, tmp_path):
    worker, seqs, signals = ready(config(tiny_model(), model={"dtype": "float32", "lora_rank": 4}))
    two_steps(worker, seqs, signals)
    worker.model.module.save_pretrained(tmp_path)
    again = worker_of(config(tiny_model(), model={"dtype": "float32", "lora_adapter_path": str(tmp_path)}))
    trained = worker.log_probs(seqs, WHOLE, temperature=1.0).log_probs.values
    np.testing.assert_array_equal(again.log_probs(seqs, WHOLE, temperature=1.0).log_probs.values, trained)
    assert again._weights and all("lora_" in name for name in again._weights)


def test_a_worker_without_a_reference_says_so(tiny_model):
    worker = PolicyWorker(config(tiny_model()), total_steps=1, with_reference=False)
    with pytest.raises(ValueError, match="holds no reference policy"):
        worker.log_probs(some_sequences(), WHOLE, temperature=1.0, reference=True)


# ------------------------------------------------------------------------------------------------------------ loading


def test_a_folder_that_is_not_there_or_a_value_no_model_has_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=.*missing is no folder"):
        worker_of(config(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"override_config\.rope_tehta: a qwen3 configuration has no such value"):
        worker_of(config(tiny_model(), model={"override_config": {"rope_tehta": 1.0}}))


def test_weights_that_are_missing_are_not_made_up(tiny_model):
    with pytest.raises(ValueError, match=r"holds no weights for model\.layers\.2"):
        worker_of(
            config(
                tiny_model(), model={"override_config": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}}
            )
        )


def test_cuda_is_not_taken_for_granted():
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(ValueError, match=r"trainer\.device=cuda but torch sees no CUDA device"):
            choose_device("cuda")


MEMORY = """
import json, resource, sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from test_worker import config, some_sequences, some_signals, worker_of
from tasks.workers.sequences import MicroBatching
worker, micro, peaks = worker_of(config(sys.argv[1], model={"dtype": "float32"})), MicroBatching(8, None), []
for groups in (4, 4, 64):
    seqs = some_sequences(lengths=[80] * groups * 8, prompt_lengths=[40] * groups)
    near = worker.log_probs(seqs, micro, temperature=1.0).log_probs
    worker.update(seqs, some_signals(seqs, near), [[np.arange(groups * 8)]], micro, step=1)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_number_of_sequences(tiny_model, request):
    arguments = [str(tiny_model()), str(request.path.parent)]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, check=True)
    _, few, many = json.loads(done.stdout.splitlines()[-1])
    # 16 times the sequences bring 16 times their own signals, about 3 MiB, and nothing else.
    assert many - few < 25
