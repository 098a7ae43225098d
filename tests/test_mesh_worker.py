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


TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def compare(cases, world_size, folder):
    """Compute the cases in one process and on ranks, and assert that they are equal, to rounding of their type."""
    folder.mkdir(parents=True, exist_ok=True)
    alone = []
    for each in cases:
        worker = PolicyWorker(cfg_of(each), total_steps=10, with_reference=False)
        near = worker.log_probs(some_sequences(each["lengths"]), MicroBatching(*each["micro"]), temperature=0.9)
        np.save(folder / f"{each['name']}.npy", near.log_probs.values)
        alone.append(computed(each, None, near.log_probs.values))
    by_rank = run_ranks(on_a_rank, world_size, folder, timeout_s=1500, cases=cases, out=str(folder))
    for place, (each, (wanted, tensors, own)) in enumerate(zip(cases, alone, strict=True)):
        answers, tolerance = [answer[place] for answer in by_rank], TOLERANCE[each["model"].get("dtype", "float64")]
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
    compare(cases, 2, tmp_path / "ranks")


APART = {"use_prefix_grouper": False}
PADDED = {"use_remove_padding": False}
STEADY = {"optim": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}}
"""Adam divides each gradient by its own size, and so moves a weight whose gradient is nothing but rounding
as far as any other. With this eps it does not."""


def in_both_types(folder64, folder32, name, *, model=None, actor=None, **more):
    """The same case in float64 and in float32."""
    in_float32 = {"model": {**(model or {}), **FLOAT32}, "actor": {**(actor or {}), **STEADY}}
    return [
        case(name, folder64, model=model, actor=actor, **more),
        case(f"{name}_float32", folder32, **in_float32, **more),
    ]


def sharded(size, **more):
    return {"fsdp_config": {"fsdp_size": size, **more}}


def every_word(world_size):
    """What must not change a number: how weights are sharded and where they rest, how sequences lie, who shares them.

    Returns:
        Arguments of `case` by its name.
    """
    away, policy, by_two = OFFLOADED["fsdp_config"], HOST["fsdp_config"], {"ulysses_sequence_parallel_size": 2}
    in_host_memory = {"model": RECOMPUTED, "actor": HOST, "ref": {"offload_policy": True}}
    if world_size == 2:
        return {
            "prompts_once": {},
            "packed": {"actor": APART, "micro": (None, 80)},
            "padded": {"model": PADDED, "actor": APART},
            "offloaded": {"actor": OFFLOADED, "ref": {"param_offload": True}},
            "offload_policy": in_host_memory,
            "sp_2": {"actor": by_two},
            "sp_2_offloaded": {"model": RECOMPUTED, "actor": {**by_two, **OFFLOADED}, "micro": (None, 90)},
        }
    if world_size == 3:
        return {
            "prompts_once": {},
            "fsdp_3_offloaded_packed": {"actor": {**APART, **sharded(3, **away)}, "ref": {"param_offload": True}},
            "padded": {"model": PADDED, "actor": APART},
            "offload_policy": in_host_memory,
        }
    return {
        "prompts_once": {},
        "fsdp_2_offload_policy_padded": {"model": PADDED, "actor": {**APART, **sharded(2, **policy)}},
        "fsdp_3_offloaded_packed": {"actor": {**APART, **sharded(3, **away)}},
        "fsdp_2_kept_gathered": {"actor": sharded(2, reshard_after_forward=False)},
        "sp_2": {"actor": by_two},
        "sp_2_fsdp_3_offload_policy": {"actor": {**by_two, **sharded(3, **policy)}},
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_no_word_of_the_mesh_changes_a_number(tiny_model, tmp_path, world_size):
    """In float64 within 1e-9, in float32 within 1e-5. Key biases of Qwen2 have a gradient of rounding alone."""
    folders = tiny_model("qwen2"), tiny_model("llama")
    words = every_word(world_size)
    cases = [one for name, given in words.items() for one in in_both_types(*folders, name, **given)]
    compare(cases, world_size, tmp_path / "ranks")


def kinds(folder, untied, world_size):
    """Cases of other models, losses, row counts and cuts; in float64."""
    chunks = {"chunk": 5 * 61, "model": RECOMPUTED, "trainer": {"device": "cpu", "balance_batch": False}}
    cases, by_two = [], {"ulysses_sequence_parallel_size": 2}
    if world_size == 2:
        cases += [case(mode, folder, actor={"loss_agg_mode": mode}) for mode in MODES]
    if world_size % 2 == 0:
        shared = {**by_two, **CLIP_COV, **OFFLOADED}
        cases += [
            case("sp_2_by_tokens", folder, micro=(None, 90), model=RECOMPUTED, actor=shared),
            case("sp_2_few_rows", folder, lengths=(3, 1), actor={**by_two, **sharded(world_size // 2)}),
            case("sp_2_adapter", folder, model={"lora_rank": 4}, lengths=UNEVEN[:7], actor=by_two),
        ]
    if world_size % 3 == 0:
        cases += [
            case("untied", untied, model=RECOMPUTED, lengths=(*UNEVEN, 1, 1)),
            case("one_copy_each", folder, actor=sharded(1)),
            case("clip_cov", folder, actor={**CLIP_COV, **sharded(3, optimizer_offload=True)}),
            case("few_rows", folder, lengths=(3, 0, 5, 0), actor=APART),
            case("packed_by_tokens", folder, micro=(None, 80), actor={**APART, **CLIP_COV}),
            case("chunks", folder, ref={"param_offload": True}, **chunks),
            case("adapter", folder, model={"lora_rank": 4, **RECOMPUTED}, actor=HOST),
        ]
    return cases


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_models_losses_aggregations_and_row_counts_of_all_kinds_are_shared_alike(tiny_model, tmp_path, world_size):
    untied = tiny_model("llama", tie_word_embeddings=False, hidden_size=36)
    compare(kinds(tiny_model("qwen2"), untied, world_size), world_size, tmp_path / "ranks")


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


def refused(rank, world_size, model):
    """For each way in which one rank's numbers are not finite: what its update says, and whether the weights stayed and
    still move."""
    cfg = config(model, model=FLOAT32)
    worker = PolicyWorker(
        cfg, total_steps=10, with_reference=False, mesh=Mesh.join(cfg, rank, world_size, torch.device("cpu"))
    )
    return [refused_at(worker, at) for at in REFUSED]


REFUSED = {"signal": "the advantage of sample 7", "loss": "update 1: the loss is", "gradient": "gradient norm is"}
"""Where a number is out of range, and what is said of it."""


def refused_at(worker, at):
    seqs, micro = some_sequences(), MicroBatching(2, None)
    signals = some_signals(seqs, Ragged(np.full(len(seqs.responses.values), -4.0), seqs.responses.offsets))
    plan = [[np.arange(0, 6), np.arange(6, 10)]]
    worker.update(seqs, signals, plan, micro, step=1)
    before, kept = worker.weights_digest(), signals.advantages.values.copy()
    start = seqs.responses.offsets[7]
    if at == "signal":
        signals.advantages.values[start] = np.nan if worker.mesh.rank == 1 else 0.0
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
def test_a_number_out_of_range_on_one_rank_is_refused_by_all_and_nobody_waits(tiny_model, tmp_path):
    answers = run_ranks(refused, 2, tmp_path / "ranks", model=str(tiny_model("llama")))
    assert answers[0] == answers[1]
    for (said, stayed, moved), expected in zip(answers[0], REFUSED.values(), strict=True):
        assert said.startswith("NonFiniteError: step 2") and expected in said
        assert stayed and moved


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
