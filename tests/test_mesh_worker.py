"""A policy on several ranks: loss, gradients and updated weights are those of one process, however it is sharded."""

import json

import numpy as np
import pytest
import torch
from mesh_ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_worker import MODES, config, some_sequences, some_signals

from storage.ragged import Ragged
from tasks.config import FSDPConfig
from tasks.workers import forward
from tasks.workers.forward import CHUNK_LOGITS
from tasks.workers.layout import Layout
from tasks.workers.mesh import Mesh
from tasks.workers.mini_batch import MiniBatch
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import MicroBatching, share_out
from tasks.workers.sharding import whole

UNEVEN = (1, 40, 7, 0, 13, 25, 0, 38, 2, 11)
ALL_LOSSES = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.02}


def case(name, folder, *, model=None, actor=None, ref=None, lengths=UNEVEN, micro=(3, None), chunk=None, **sections):
    """One comparison, in JSON; `chunk`: logits that are held at a time."""
    return {
        "name": name,
        "folder": str(folder),
        "model": model or {},
        "actor": {**ALL_LOSSES, **(actor or {})},
        "lengths": list(lengths),
        "micro": list(micro),
        "ref": ref or {},
        "chunk": chunk,
        "sections": sections,
    }


def cfg_of(each):
    cfg = config(each["folder"], model=each["model"], actor=each["actor"], **each["sections"])
    policy = cfg.actor_rollout_ref
    ref = policy.ref.model_copy(update={"fsdp_config": FSDPConfig(**each["ref"])})
    return cfg.model_copy(update={"actor_rollout_ref": policy.model_copy(update={"ref": ref})})


def computed(each, mesh, signals_from=None):
    """Everything that must not depend on the mesh: numbers and whole tensors, and what is this rank's own."""
    forward.CHUNK_LOGITS = each["chunk"] or CHUNK_LOGITS
    worker = PolicyWorker(cfg_of(each), total_steps=10, with_reference=True, mesh=mesh)
    seqs, micro = some_sequences(each["lengths"]), MicroBatching(*each["micro"])
    start = worker.weights_digest()
    near = worker.log_probs(seqs, micro, temperature=0.9)
    reference = worker.log_probs(seqs, micro, temperature=0.9, reference=True)
    stored = near.log_probs if signals_from is None else Ragged(signals_from, seqs.responses.offsets)
    signals = some_signals(seqs, stored)
    everyone = np.arange(len(seqs.responses))
    layout = worker.layout(training=True)
    with worker.model.computing():
        batch = MiniBatch(worker.cfg, worker.model, seqs, signals, layout=layout, mesh=mesh)
        result = batch.accumulate(everyone, micro, "here")
    tensors = {f"grad {n}": whole(p.grad).clone() for n, p in worker._weights.items()}
    worker._optimizer.zero_grad()
    halves = [[everyone[::2], everyone[1::2]], [everyone]]
    rows = worker.update(seqs, signals, halves, micro, step=1)
    tensors |= {f"weight {name}": value.clone() for name, value in worker.full_weights()}
    skip = ("seconds", "micro_batches")
    numbers = {**result.row(), **result.more(), "micro_batches": 0}
    rows = [{key: value for key, value in row.items() if key not in skip} for row in rows]
    own = {
        "rows": near.rows.tolist(),
        "log_probs": near.log_probs.values.tolist(),
        "reference": reference.log_probs.values.tolist(),
        "entropy": near.entropy.values.tolist(),
        "forwards": near.micro_batches,
    }
    return {"start": start, "numbers": numbers, "updates": rows, "end": worker.weights_digest()}, tensors, own


def on_a_rank(rank, world_size, cases, out):
    """The cases one after the other, each in a mesh of its own."""
    answers = []
    for each in cases:
        mesh = Mesh.join(cfg_of(each), rank, world_size, torch.device("cpu"))
        near = np.load(f"{out}/{each['name']}.npy")
        shared, tensors, own = computed(each, mesh, near)
        if rank == 0:
            save_file({name: value.contiguous() for name, value in tensors.items()}, f"{out}/{each['name']}.st")
        answers.append((shared, own))
    return answers


def compare(cases, world_size, folder, tolerance):
    """Compute the cases in one process and on ranks, and assert that they are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    alone = []
    for each in cases:
        worker = PolicyWorker(cfg_of(each), total_steps=10, with_reference=False)
        near = worker.log_probs(some_sequences(each["lengths"]), MicroBatching(*each["micro"]), temperature=0.9)
        np.save(folder / f"{each['name']}.npy", near.log_probs.values)
        alone.append(computed(each, None, near.log_probs.values))
    by_rank = run_ranks(on_a_rank, world_size, folder, cases=cases, out=str(folder))
    for place, (each, (wanted, tensors, own)) in enumerate(zip(cases, alone, strict=True)):
        answers = [answer[place] for answer in by_rank]
        for shared, _ in answers:
            assert shared["start"] == wanted["start"], each["name"]
            assert_near(shared["numbers"], wanted["numbers"], tolerance, each["name"])
            for row, expected in zip(shared["updates"], wanted["updates"], strict=True):
                assert_near(row, expected, tolerance, each["name"])
        assert len({shared["end"] for shared, _ in answers}) == 1
        assert_own(own, [mine for _, mine in answers], some_sequences(each["lengths"]).responses, each)
        theirs = load_file(folder / f"{each['name']}.st")
        assert theirs.keys() == tensors.keys()
        for name, value in tensors.items():
            gap, scale = (theirs[name] - value).abs().max(), value.abs().max()
            assert gap <= tolerance * max(scale, 1e-3), f"{each['name']}: {name} differs by {gap} of {scale}"
    return by_rank


def assert_near(got, wanted, tolerance, where):
    assert json.dumps(sorted(got)) == json.dumps(sorted(wanted)), where
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_near(got[key], value, tolerance, where)
        elif isinstance(value, float):
            assert got[key] == pytest.approx(value, rel=tolerance, abs=tolerance), f"{where}: {key}"
        else:
            assert got[key] == value, f"{where}: {key}"


def assert_own(alone, ranks, responses, each):
    """Every row is computed once, except that ranks which share sequences all compute them."""
    sp = each["actor"].get("ulysses_sequence_parallel_size", 1)
    assert sorted(row for mine in ranks[::sp] for row in mine["rows"]) == list(range(len(responses)))
    sizes = [len(mine["rows"]) for mine in ranks]
    assert max(sizes) - min(sizes) <= 1 and len({mine["forwards"] for mine in ranks}) == 1
    for mine in ranks:
        rows = mine["rows"]
        for column in ("log_probs", "reference", "entropy"):
            expected = Ragged(np.asarray(alone[column]), responses.offsets).take(np.asarray(rows, dtype=int)).values
            np.testing.assert_allclose(mine[column], expected, rtol=1e-5, atol=2e-6)


# ------------------------------------------------------------------------------------------------ who computes what


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("micro", [MicroBatching(3, None), MicroBatching(None, 100)])
@pytest.mark.parametrize("balance", [True, False])
def test_every_row_has_one_rank_and_all_ranks_make_as_many_forward_passes(layout, micro, balance):
    seqs = some_sequences()
    for rows in (np.arange(10), np.arange(7), np.array([4, 3, 9]), np.array([3, 6]), np.empty(0, np.int64)):
        for ranks in (1, 2, 3, 6):
            share = share_out(seqs, rows, micro, ranks, balance=balance, layout=layout)
            sizes = [sum(len(part) for part in own) for own in share.parts]
            assert sorted(share.order) == sorted(rows) and max(sizes) - min(sizes) <= 1
            turns = [share.turns(rank) for rank in range(ranks)]
            assert {len(own) for own in turns} == {share.micro_batches}
            computed = np.concatenate([t.rows for own in turns for t in own if not t.idle] + [rows[:0]])
            answered = {int(row) for row in rows if seqs.responses.lengths[row]}
            assert answered <= set(computed.tolist()) and len(set(computed.tolist())) == len(computed)
            for turn in (turn for own in turns for turn in own):
                assert seqs.responses.lengths[turn.rows].any()
                assert share.order[turn.places].tolist() == turn.rows.tolist()


def test_groups_that_divide_evenly_stay_on_one_rank_when_prompts_are_shared():
    seqs = some_sequences(lengths=range(1, 13), prompt_lengths=(3, 9, 5, 4, 2, 7))
    for layout, together in ((Layout.SHARED_PROMPTS, True), (Layout.PACKED, False)):
        share = share_out(seqs, np.arange(12), MicroBatching(4, None), 3, balance=True, layout=layout)
        homes = [
            {rank for rank, own in enumerate(share.parts) for part in own for row in part if row % 6 == group}
            for group in range(6)
        ]
        assert all(len(home) == 1 for home in homes) == together
        assert [sum(len(part) for part in own) for own in share.parts] == [4, 4, 4]


def test_ranks_have_nearly_the_same_work():
    random = np.random.default_rng(0)
    seqs = some_sequences(lengths=random.integers(1, 400, 120), prompt_lengths=random.integers(5, 90, 20))
    share = share_out(seqs, np.arange(120), MicroBatching(None, 2000), 6, balance=True, layout=Layout.PACKED)
    tokens = [sum(int(seqs.lengths()[part].sum()) for part in own) for own in share.parts]
    assert max(tokens) - min(tokens) < 0.02 * max(tokens)
    assert len({len(own) for own in share.parts}) == 1


# ------------------------------------------------------------------------------------------------ the same numbers


OFFLOADED = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
HOST = {"fsdp_config": {"offload_policy": True, "forward_prefetch": True, "reshard_after_forward": False}}
CLIP_COV = {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.0}}
FLOAT32 = {"dtype": "float32"}
RECOMPUTED = {"enable_gradient_checkpointing": True}


def test_two_ranks_give_the_loss_gradients_and_weights_of_one_process(tiny_model, tmp_path):
    folder = tiny_model("qwen2")
    cases = [
        case("uneven", folder, lengths=UNEVEN[:9]),
        case("clip_cov", folder, actor={**CLIP_COV, **OFFLOADED}, micro=(None, 90)),
        case("recomputed", tiny_model("llama", tie_word_embeddings=False), model=RECOMPUTED, actor=HOST),
    ]
    compare(cases, 2, tmp_path / "ranks", 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 6])
def test_full_and_hybrid_sharding_give_the_numbers_of_one_process(tiny_model, tmp_path, world_size):
    folder, untied = tiny_model("qwen2"), tiny_model("llama", tie_word_embeddings=False, hidden_size=36)
    ref = {"param_offload": True}
    cases = [
        case("full", folder, ref=ref),
        case("untied", untied, model=RECOMPUTED, lengths=(*UNEVEN, 1, 1)),
        case("one_copy_each", folder, actor={"fsdp_config": {"fsdp_size": 1}}),
        case("three", folder, actor={"fsdp_config": {"fsdp_size": 3, "optimizer_offload": True}, **CLIP_COV}),
        case("few_rows", folder, lengths=(3, 0, 5, 0), actor={"use_prefix_grouper": False}),
        case("padded", folder, model={"use_remove_padding": False}, actor={"use_prefix_grouper": False}),
        case("packed", folder, micro=(None, 80), actor={"use_prefix_grouper": False, **CLIP_COV}),
        case(
            "chunks", folder, chunk=5 * 61, ref=ref, trainer={"device": "cpu", "balance_batch": False}, model=RECOMPUTED
        ),
        case("adapter", folder, model={"lora_rank": 4, **RECOMPUTED}, actor=HOST),
    ]
    if world_size == 6:
        cases += [
            case("two", folder, actor={"fsdp_config": {"fsdp_size": 2, "reshard_after_forward": False}}),
            case("two_in_host_memory", untied, actor={"fsdp_config": {"fsdp_size": 2, "offload_policy": True}}),
            case("offloaded", folder, actor={"fsdp_config": {"fsdp_size": 3, **OFFLOADED["fsdp_config"]}}),
        ]
    compare(cases, world_size, tmp_path / "ranks", 1e-9)


def shared_by_two(folder, name, **more):
    actor = {"ulysses_sequence_parallel_size": 2, **more.pop("actor", {})}
    return case(name, folder, actor=actor, **more)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 6])
def test_ranks_that_share_sequences_give_the_numbers_of_one_process(tiny_model, tmp_path, world_size):
    folder = tiny_model("qwen2")
    few = world_size // 2
    cases = [
        shared_by_two(folder, "whole"),
        shared_by_two(folder, "tokens", micro=(None, 90), model=RECOMPUTED, actor={**CLIP_COV, **OFFLOADED}),
        shared_by_two(folder, "few_rows", lengths=(3, 1), actor={"fsdp_config": {"fsdp_size": few}}),
        shared_by_two(folder, "adapter", model={"lora_rank": 4}, lengths=UNEVEN[:7]),
    ]
    compare(cases, world_size, tmp_path / "ranks", 1e-9)


@pytest.mark.slow
def test_every_aggregation_is_one_over_the_global_mini_batch(tiny_model, tmp_path):
    folder = tiny_model("qwen2")
    compare([case(mode, folder, actor={"loss_agg_mode": mode}) for mode in MODES], 2, tmp_path / "ranks", 1e-9)


@pytest.mark.slow
def test_float32_ranks_stay_within_rounding_of_one_process(tiny_model, tmp_path):
    """At a usual rate: Adam moves a weight whose gradient is nothing but rounding by as much as any other."""
    folder, rate = tiny_model("llama"), {"optim": {"lr": 1e-3, "weight_decay": 0.1}}
    cases = [
        case("float32", folder, model=FLOAT32),
        case("hybrid", folder, model=FLOAT32, actor={"fsdp_config": {"fsdp_size": 2}, "use_prefix_grouper": False}),
        case("recomputed", folder, model={**FLOAT32, **RECOMPUTED}, actor=OFFLOADED),
    ]
    for each in cases:
        each["actor"].update(rate)
    compare(cases, 4, tmp_path / "ranks", 1e-5)


def half_precision(rank, world_size, model):
    """Gradient norms of bfloat16 computation over float32 shards, and types of weights and gradients."""
    cfg = config(model, model=FLOAT32, actor={"fsdp_config": {"mixed_precision": {"param_dtype": "bfloat16"}}})
    mesh = None if world_size == 1 else Mesh.join(cfg, rank, world_size, torch.device("cpu"))
    worker = PolicyWorker(cfg, total_steps=10, with_reference=False, mesh=mesh)
    seqs = some_sequences()
    near = worker.log_probs(seqs, MicroBatching(4, None), temperature=1.0)
    signals = some_signals(seqs, Ragged(np.full(len(seqs.responses.values), -4.0), seqs.responses.offsets))
    [row] = worker.update(seqs, signals, [[np.arange(10)]], MicroBatching(4, None), step=1)
    kinds = sorted({str(weight.dtype) for weight in worker._weights.values()})
    return [row["grad_norm"], row["loss"], kinds, near.rows.tolist(), near.log_probs.values.tolist()]


def test_a_pass_without_gradient_before_it_leaves_every_weight_its_gradient(tiny_model):
    """Autocast keeps casts of the weights, in some torch versions those made without gradient too."""
    half = {"fsdp_config": {"mixed_precision": {"param_dtype": "bfloat16"}}}
    cfg = config(tiny_model("qwen2"), model=FLOAT32, actor={**half, **CLIP_COV})
    worker = PolicyWorker(cfg, total_steps=10, with_reference=False)
    seqs, micro, layout = some_sequences(), MicroBatching(100, None), worker.layout(training=True)
    near = worker.log_probs(seqs, micro, temperature=1.0).log_probs
    with worker.model.computing():
        batch = MiniBatch(cfg, worker.model, seqs, some_signals(seqs, near), layout=layout)
        assert batch.accumulate(np.arange(10), micro, "here").skipped is None
    assert [name for name, weight in worker._weights.items() if weight.grad is None] == []


@pytest.mark.slow
def test_bfloat16_computation_over_float32_shards_stays_near_one_process(tiny_model, tmp_path):
    model = str(tiny_model("qwen2"))
    norm, loss, _, _, log_probs = half_precision(0, 1, model)
    responses = some_sequences().responses
    for answer in run_ranks(half_precision, 2, tmp_path / "ranks", model=model):
        assert answer[0] == pytest.approx(norm, rel=0.1) and answer[1] == pytest.approx(loss, rel=0.1, abs=0.02)
        assert answer[2] == ["torch.float32"]
        wanted = Ragged(np.asarray(log_probs), responses.offsets).take(np.asarray(answer[3])).values
        assert np.abs(np.asarray(answer[4]) - wanted).mean() < 0.05


# ------------------------------------------------------------------------------------------------- what goes wrong


def refused(rank, world_size, model, at):
    """What an update says when one rank's numbers are not finite, and whether the weights stayed and still move."""
    cfg = config(model, model=FLOAT32)
    worker = PolicyWorker(
        cfg, total_steps=10, with_reference=False, mesh=Mesh.join(cfg, rank, world_size, torch.device("cpu"))
    )
    seqs, micro = some_sequences(), MicroBatching(2, None)
    signals = some_signals(seqs, Ragged(np.full(len(seqs.responses.values), -4.0), seqs.responses.offsets))
    plan = [[np.arange(0, 6), np.arange(6, 10)]]
    worker.update(seqs, signals, plan, micro, step=1)
    before, kept = worker.weights_digest(), signals.advantages.values.copy()
    start = seqs.responses.offsets[7]
    if at == "signal":
        signals.advantages.values[start] = np.nan if rank == 1 else 0.0
    else:
        signals.loss_mask.values[start : start + 9] = True
        signals.advantages.values[start : start + 9] = 3e38 if at == "loss" else 1e30
    try:
        worker.update(seqs, signals, plan, micro, step=2)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    stayed = worker.weights_digest() == before
    signals.advantages.values[:] = kept
    worker.update(seqs, signals, plan, micro, step=2)
    return [said, stayed, worker.weights_digest() != before]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["signal", "loss", "gradient"])
def test_a_number_out_of_range_on_one_rank_is_refused_by_all_and_nobody_waits(tiny_model, tmp_path, at):
    answers = run_ranks(refused, 2, tmp_path / "ranks", at=at, model=str(tiny_model("llama")))
    expected = {"signal": "the advantage of sample 7", "loss": "update 1: the loss is", "gradient": "gradient norm is"}
    assert answers[0] == answers[1] and answers[0][1:] == [True, True]
    assert answers[0][0].startswith("NonFiniteError: step 2") and expected[at] in answers[0][0]


def too_long(rank, world_size, model):
    cfg = config(model)
    worker = PolicyWorker(
        cfg, total_steps=10, with_reference=False, mesh=Mesh.join(cfg, rank, world_size, torch.device("cpu"))
    )
    try:
        worker.log_probs(some_sequences(), MicroBatching(None, 45), temperature=1.0)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_sequence_that_fits_no_micro_batch_is_refused_by_all_ranks(tiny_model, tmp_path):
    answers = run_ranks(too_long, 3, tmp_path / "ranks", model=str(tiny_model("llama")))
    assert len(set(answers)) == 1 and "sequence 1 has 49 tokens but a micro-batch holds 45" in answers[0]
