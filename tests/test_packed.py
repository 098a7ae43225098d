"""Packed sequences: the numbers and gradients of padded ones, whatever the lengths, and no attention in between."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from storage.ragged import Ragged
from tasks.config import FSDPConfig, ModelConfig
from tasks.workers.forward import choose_layout, response_log_probs, to_device
from tasks.workers.layout import Layout
from tasks.workers.mesh import Mesh
from tasks.workers.model import load_model
from tasks.workers.packed import Packing, attend_within, can_pack, pack
from tasks.workers.sequences import Sequences

CPU = torch.device("cpu")
LENGTHS = {
    "ragged": (1, 40, 7, 0, 13, 25, 0, 38, 2, 11),
    "one token each": (1, 1, 1, 1),
    "equal": (9, 9, 9, 9, 9, 9),
    "one row": (5,),
    "nearly all empty": (0, 0, 3, 0),
}


def load(folder, dtype="float64", **model):
    model = ModelConfig(path=str(folder), dtype=dtype, enable_gradient_checkpointing=False, **model)
    return load_model(model, FSDPConfig(), Mesh.alone(CPU), seed=0)


def some_sequences(lengths, prompt_lengths=(3, 9, 5, 1)):
    random = np.random.default_rng(0)
    return Sequences(
        Ragged.from_rows([random.integers(2, 61, n) for n in prompt_lengths], np.int32),
        np.arange(len(lengths)) % len(prompt_lengths),
        Ragged.from_rows([random.integers(2, 61, n) for n in lengths], np.int32),
    )


def numbers_and_gradients(model, batch, layout, mesh=None):
    """The three columns, and the gradient of a loss in which every number has a weight of its own."""
    model.network.zero_grad()
    with model.computing():
        columns = response_log_probs(
            model, batch, temperature=0.7, layout=layout, entropy=True, squares=True, mesh=mesh
        )
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(len(column), generator=generator, dtype=torch.float64) for column in columns]
        loss = sum((column * weight.to(column.dtype)).sum() for column, weight in zip(columns, weights, strict=True))
    loss.backward()
    return [column.detach() for column in columns], {n: p.grad.clone() for n, p in model.network.named_parameters()}


def assert_near(first, second, tolerance):
    for one, other in zip(first, second, strict=True):
        assert one.dtype == other.dtype and (one - other).abs().max() <= tolerance * one.abs().max().clamp(min=1.0)


def assert_same_gradients(first, second, tolerance):
    largest = max(gradient.abs().max() for gradient in first.values())
    for name, gradient in first.items():
        assert (second[name] - gradient).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_packed_padded_and_shared_prompts_agree_in_float64(tiny_model, model_type, lengths):
    model = load(tiny_model(model_type))
    assert model.packs
    seqs = some_sequences(LENGTHS[lengths])
    batch = to_device(seqs, np.arange(len(seqs.responses)), CPU)
    padded, gradients = numbers_and_gradients(model, batch, Layout.PADDED)
    for layout in (Layout.PACKED, Layout.SHARED_PROMPTS):
        numbers, others = numbers_and_gradients(model, batch, layout)
        assert_near(padded, numbers, 1e-12)
        assert_same_gradients(gradients, others, 1e-10)


def test_in_a_mesh_shared_prompts_call_the_decoder_twice_whatever_the_lengths(tiny_model):
    model = load(tiny_model())
    calls = []
    model.decoder.register_forward_hook(lambda *call: calls.append(1))
    for lengths in LENGTHS.values():
        seqs = some_sequences(lengths)
        batch = to_device(seqs, np.arange(len(lengths)), CPU)
        numbers, gradients = numbers_and_gradients(model, batch, Layout.SHARED_PROMPTS)
        calls.clear()
        others, more = numbers_and_gradients(model, batch, Layout.SHARED_PROMPTS, SimpleNamespace(world_size=2))
        assert len(calls) == 2
        assert_near(numbers, others, 0.0)
        assert_same_gradients(gradients, more, 1e-14)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_packed_and_padded_agree_in_float32(tiny_model, model_type):
    model = load(tiny_model(model_type), "float32")
    seqs = some_sequences(LENGTHS["ragged"])
    batch = to_device(seqs, np.arange(len(seqs.responses)), CPU)
    padded, gradients = numbers_and_gradients(model, batch, Layout.PADDED)
    packed, others = numbers_and_gradients(model, batch, Layout.PACKED)
    assert_near(padded, packed, 1e-5)
    assert_same_gradients(gradients, others, 1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", [None, "sdpa"])
def test_every_sharing_of_key_heads_and_both_attentions_pack(tiny_model, kv_heads, attention):
    model = load(tiny_model("qwen3", num_key_value_heads=kv_heads), attn_implementation=attention)
    seqs = some_sequences(LENGTHS["ragged"])
    batch = to_device(seqs, np.arange(len(seqs.responses)), CPU)
    padded, gradients = numbers_and_gradients(model, batch, Layout.PADDED)
    packed, others = numbers_and_gradients(model, batch, Layout.PACKED)
    assert_near(padded, packed, 1e-12)
    assert_same_gradients(gradients, others, 1e-10)


def test_recomputed_layers_and_a_frozen_copy_pack_alike(tiny_model):
    seqs = some_sequences(LENGTHS["ragged"])
    batch = to_device(seqs, np.arange(len(seqs.responses)), CPU)
    plain, recomputed = load(tiny_model()), load_recomputing(tiny_model())
    numbers, gradients = numbers_and_gradients(plain, batch, Layout.PACKED)
    again, others = numbers_and_gradients(recomputed, batch, Layout.PACKED)
    assert_near(numbers, again, 0.0)
    assert_same_gradients(gradients, others, 1e-14)
    frozen = plain.frozen_copy(away=False)
    with torch.no_grad(), frozen.computing():
        log_probs = response_log_probs(
            frozen, batch, temperature=0.7, layout=choose(frozen, share=False), entropy=False
        ).log_probs
    assert torch.equal(log_probs, numbers[0])


def load_recomputing(folder):
    model = ModelConfig(path=str(folder), dtype="float64", enable_gradient_checkpointing=True)
    return load_model(model, FSDPConfig(), Mesh.alone(CPU), seed=0)


def test_bfloat16_and_autocast_pack(tiny_model):
    seqs = some_sequences(LENGTHS["ragged"])
    batch = to_device(seqs, np.arange(len(seqs.responses)), CPU)
    half = load(tiny_model(), "bfloat16")
    cast = load_model(
        ModelConfig(path=str(tiny_model()), dtype="float32", enable_gradient_checkpointing=False),
        FSDPConfig(mixed_precision={"param_dtype": "bfloat16"}),
        Mesh.alone(CPU),
        seed=0,
    )
    assert half.packs and cast.packs and cast.autocast == torch.bfloat16
    exact = numbers_and_gradients(load(tiny_model()), batch, Layout.PADDED)[0][0]
    for model in (half, cast):
        padded, _ = numbers_and_gradients(model, batch, Layout.PADDED)
        packed, gradients = numbers_and_gradients(model, batch, Layout.PACKED)
        error = (padded[0] - exact).abs().mean()
        assert (packed[0] - exact).abs().mean() <= 1.5 * error
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_a_row_without_padding_holds_every_token_that_is_fed_and_no_other():
    seqs = some_sequences((4, 0, 1, 4, 2), prompt_lengths=(3, 2))
    row = pack(to_device(seqs, np.arange(5), CPU))
    # Fed: prompt and all but the last response token. Rows 0, 2, 4 answer the prompt of 3 tokens, row 3 that of 2.
    assert row.packing.lengths == (3, 4, 5, 6) and row.ids.shape == (1, 18)
    assert row.position_ids.tolist() == [[*range(3), *range(4), *range(5), *range(6)]]
    assert row.packing.borders.tolist() == [0, 3, 7, 12, 18]
    long, short = seqs.prompts.values[:3].tolist(), seqs.prompts.values[3:].tolist()
    responses = np.split(seqs.responses.values, seqs.responses.offsets[1:-1])
    fed = [long, [*long, responses[4][0]], [*short, *responses[3][:3]], [*long, *responses[0][:3]]]
    assert row.ids.tolist() == [[int(token) for part in fed for token in part]]
    assert row.own.tolist() == list(range(11))
    assert row.places.tolist() == [14, 15, 16, 17, 2, 8, 9, 10, 11, 5, 6]


def test_a_sequence_does_not_see_its_neighbours(tiny_model):
    model = load(tiny_model())
    base = some_sequences((6, 6, 6), prompt_lengths=(4, 4, 4))
    changed = Sequences(
        base.prompts,
        base.group,
        Ragged(
            np.r_[(base.responses.values[:6] + 1) % 61, base.responses.values[6:]].astype(np.int32),
            base.responses.offsets,
        ),
    )
    first, second = (
        numbers_and_gradients(model, to_device(seqs, np.arange(3), CPU), Layout.PACKED)[0][0]
        for seqs in (base, changed)
    )
    assert torch.equal(first[6:], second[6:]) and not torch.equal(first[:6], second[:6])


def test_no_scores_between_sequences_are_held(tiny_model):
    # 400 sequences of 64 tokens: scores over the whole row would take 2.6 GB for one head.
    heads = torch.randn(400 * 64, 1, 8)
    borders = torch.arange(0, 400 * 64 + 1, 64, dtype=torch.int32)
    out = attend_within(heads, heads, heads, Packing((64,) * 400, borders), None)
    rows = heads.view(400, 64, 1, 8).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
    assert torch.allclose(out.view(400, 64, 1, 8).transpose(1, 2), expected, atol=1e-6)


def test_the_layout_is_shared_prompts_then_packed_then_padded(tiny_model):
    model = load(tiny_model())
    assert choose(model, share=True) is Layout.SHARED_PROMPTS
    assert choose(model, share=False) is Layout.PACKED
    assert choose(model, share=True, sp_size=2) is Layout.PACKED
    assert choose_layout(model, share_prompts=False, remove_padding=False) is Layout.PADDED
    assert not load(tiny_model(), use_remove_padding=False).packs


def choose(model, *, share, sp_size=1):
    return choose_layout(model, share_prompts=share, remove_padding=True, sp_size=sp_size)


@pytest.mark.parametrize(
    ("model_type", "options", "attention"),
    [
        ("llama", {}, "eager"),
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, None),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, None),
        ("mistral", {"sliding_window": 4}, None),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_models_whose_attention_is_more_than_full_stay_padded(tiny_model, model_type, options, attention):
    model = load(tiny_model(model_type, **options), "float32", attn_implementation=attention)
    assert not model.packs and choose(model, share=False) is Layout.PADDED
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size=2.*not computed packed"):
        choose(model, share=False, sp_size=2)


def test_a_model_that_computes_packed_rows_wrongly_is_noticed(tiny_model):
    model = load(tiny_model())
    rotary = model.decoder.rotary_emb
    usual = rotary.forward
    # Positions counted through the whole row, as by a model that does not read position_ids.
    rotary.forward = lambda x, position_ids: usual(x, torch.arange(x.shape[1]).unsqueeze(0))
    # A rotation is relative, so this model is right all the same; with absolute positions it is not.
    assert can_pack(model)
    embed = model.decoder.embed_tokens.forward
    model.decoder.embed_tokens.forward = lambda ids: embed(ids) + torch.arange(ids.shape[1]).view(1, -1, 1)
    assert not can_pack(model)


def test_sequence_parallel_sizes_that_heads_do_not_allow_are_refused(tiny_model):
    model = load(tiny_model("qwen3", num_attention_heads=6, num_key_value_heads=2))
    assert choose(model, share=False, sp_size=2) is choose(model, share=False, sp_size=6) is Layout.PACKED
    for ranks in (3, 4):
        with pytest.raises(ValueError, match=f"ulysses_sequence_parallel_size={ranks} must divide"):
            choose(model, share=False, sp_size=ranks)
    scaled = load(tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
    with pytest.raises(ValueError, match="rope_type=dynamic"):
        choose(scaled, share=False, sp_size=2)
