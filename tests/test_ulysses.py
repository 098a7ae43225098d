"""Ranks that share sequences: real gloo processes together compute the numbers and the gradient of one process."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mesh_ranks import run_ranks
from safetensors.torch import load_file, save_file

from storage.ragged import Ragged
from tasks.config import FSDPConfig, ModelConfig, RunConfig
from tasks.workers.forward import choose_layout, response_log_probs, to_device
from tasks.workers.layout import Layout
from tasks.workers.mesh import Mesh
from tasks.workers.model import load_model
from tasks.workers.packed import pack
from tasks.workers.sequences import Sequences

CPU = torch.device("cpu")
PROMPTS = (3, 9, 5, 1, 30)
RAGGED = [[row % 4, length] for row, length in enumerate((1, 20, 7, 0, 13, 5, 0, 18, 2, 11))]
FEW = [[4, 1], [3, 0]]
"""One response token behind a long prompt: the last chunk predicts it, the others nothing."""
ONE_TOKEN = [[3, 1]]
"""One token is fed, so that all chunks but the first are filling."""


def sequences_of(rows):
    random = np.random.default_rng(0)
    return Sequences(
        Ragged.from_rows([random.integers(2, 61, n) for n in PROMPTS], np.int32),
        np.array([prompt for prompt, _ in rows]),
        Ragged.from_rows([random.integers(2, 61, length) for _, length in rows], np.int32),
    )


def settings(case):
    model = {"path": case["folder"], "dtype": case.get("dtype", "float64")}
    return ModelConfig(enable_gradient_checkpointing=case.get("recompute", False), **model)


def numbers_and_gradients(model, case, layout, mesh=None):
    """Columns and this process's gradients of a loss in which every number has a weight of its own."""
    seqs = sequences_of(case["rows"])
    batch = to_device(seqs, np.arange(len(seqs.responses)), CPU)
    with model.computing():
        columns = model.in_one_forward(
            response_log_probs, model, batch, temperature=0.7, layout=layout, entropy=True, squares=True, mesh=mesh
        )
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(len(column), generator=generator, dtype=torch.float64) for column in columns]
        loss = sum((column * weight.to(column.dtype)).sum() for column, weight in zip(columns, weights, strict=True))
        loss.backward()
    return torch.stack([column.detach() for column in columns]), dict(model.network.named_parameters())


def run_cases(rank, world_size, cases, out):
    """On each rank: the numbers and the summed gradients of each case, into files."""
    for index, case in enumerate(cases):
        sharded = case.get("fsdp_size") is not None
        actor = {"ulysses_sequence_parallel_size": case["sp"], "fsdp_config": {"fsdp_size": case.get("fsdp_size", -1)}}
        mesh = Mesh.join(RunConfig.model_validate({"actor_rollout_ref": {"actor": actor}}), rank, world_size, CPU)
        model = load_model(settings(case), FSDPConfig(), mesh if sharded else Mesh.alone(CPU), seed=0)
        layout = choose_layout(model, share_prompts=True, remove_padding=True, sp_size=case["sp"])
        numbers, weights = numbers_and_gradients(model, case, layout, mesh)
        gradients = {name: summed(weight.grad, sharded) for name, weight in weights.items()}
        save_file({"numbers": numbers, **gradients}, Path(out) / f"{index}-{rank}.safetensors")
    return layout.value


def summed(gradient, sharded):
    """Over all ranks: FSDP has done so."""
    if sharded:
        return gradient.full_tensor().contiguous()
    torch.distributed.all_reduce(gradient)
    return gradient


def assert_ranks_agree_with_one_process(tmp_path, cases, world_size):
    cases = [{**case, "folder": str(case["folder"])} for case in cases]
    layouts = run_ranks(run_cases, world_size, tmp_path / "ranks", cases=cases, out=str(tmp_path))
    assert layouts == ["packed"] * world_size
    for index, case in enumerate(cases):
        alone = load_model(settings(case), FSDPConfig(), Mesh.alone(CPU), seed=0)
        numbers, weights = numbers_and_gradients(alone, case, Layout.PADDED)
        # Groups of ranks have the same rows here, so each group adds the whole gradient once.
        groups, tolerance = world_size // case["sp"], case.get("tolerance", 1e-10)
        largest = max(weight.grad.abs().max() for weight in weights.values())
        files = [load_file(tmp_path / f"{index}-{rank}.safetensors") for rank in range(world_size)]
        for file in files:
            assert torch.equal(file["numbers"], files[0]["numbers"])
            assert (file["numbers"] - numbers).abs().max() <= tolerance
            for name, weight in weights.items():
                assert (file[name] / groups - weight.grad).abs().max() <= tolerance * largest, (index, name)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_the_ranks_gradients_sum_to_that_of_one_process(tmp_path, tiny_model, ranks):
    heads, key_heads, fewer = {2: (4, 2, 1), 3: (6, 3, 1), 4: (4, 4, 2)}[ranks]
    cases = [
        {
            "folder": tiny_model(kind, hidden_size=48, num_attention_heads=heads, num_key_value_heads=shared),
            "sp": ranks,
            **more,
        }
        for kind, shared, more in (
            ("qwen3", key_heads, {"rows": RAGGED}),
            ("llama", fewer, {"rows": RAGGED, "recompute": True}),
            ("qwen3", fewer, {"rows": RAGGED, "dtype": "float32", "tolerance": 1e-5}),
            ("qwen3", key_heads, {"rows": RAGGED, "dtype": "bfloat16", "tolerance": 0.3}),
            ("qwen2", fewer, {"rows": FEW}),
            ("qwen3", key_heads, {"rows": ONE_TOKEN}),
        )
    ]
    assert_ranks_agree_with_one_process(tmp_path, cases, ranks)


def test_sharded_weights_and_shared_sequences_on_four_ranks(tmp_path, tiny_model):
    case = {"folder": tiny_model(), "sp": 2, "fsdp_size": -1}
    cases = [
        {**case, "rows": RAGGED},
        {**case, "rows": FEW, "recompute": True},
        {**case, "rows": RAGGED, "fsdp_size": 2, "sp": 4},
    ]
    assert_ranks_agree_with_one_process(tmp_path, cases, 4)


def run_with_rows_of_its_own(rank, world_size, model, rows, out):
    """Data parallel, sharded, shared prompts: the gradient summed over ranks, into a file."""
    actor = {"ulysses_sequence_parallel_size": 1, "fsdp_config": {"fsdp_size": -1}}
    mesh = Mesh.join(RunConfig.model_validate({"actor_rollout_ref": {"actor": actor}}), rank, world_size, CPU)
    case = {"folder": model, "rows": rows[rank]}
    loaded = load_model(settings(case), FSDPConfig(), mesh, seed=0)
    _, weights = numbers_and_gradients(loaded, case, Layout.SHARED_PROMPTS, mesh)
    save_file({n: summed(w.grad, True) for n, w in weights.items()}, Path(out) / f"{rank}.safetensors")


def test_ranks_with_one_token_responses_and_longer_ones_do_not_wait_for_each_other(tmp_path, tiny_model):
    folder, rows = str(tiny_model()), [ONE_TOKEN, RAGGED]
    run_ranks(run_with_rows_of_its_own, 2, tmp_path / "ranks", rows=rows, out=str(tmp_path), model=folder)
    alone = load_model(settings({"folder": folder}), FSDPConfig(), Mesh.alone(CPU), seed=0)
    for own in rows:
        _, weights = numbers_and_gradients(alone, {"rows": own}, Layout.PADDED)
    for rank in range(2):
        gradients = load_file(tmp_path / f"{rank}.safetensors")
        for name, weight in weights.items():
            torch.testing.assert_close(
                gradients[name], weight.grad, rtol=0, atol=1e-10 * weight.grad.abs().max().item()
            )


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_chunks_cover_the_row_and_every_response_token_has_one_owner(parts):
    for rows in (RAGGED, FEW, ONE_TOKEN):
        seqs = sequences_of(rows)
        batch = to_device(seqs, np.arange(len(rows)), CPU)
        whole = pack(batch)
        chunks = [pack(batch, SimpleNamespace(sp_size=parts, sp_rank=part, sp_group=None)) for part in range(parts)]
        assert len({chunk.ids.shape for chunk in chunks}) == 1
        ids = torch.cat([chunk.ids for chunk in chunks], dim=1)
        positions = torch.cat([chunk.position_ids for chunk in chunks], dim=1)
        total = whole.ids.shape[1]
        assert torch.equal(ids[:, :total], whole.ids) and torch.equal(positions[:, :total], whole.position_ids)
        more = ids.shape[1] - total
        assert 0 <= more < parts and positions[0, total:].tolist() == list(range(more))
        assert all(chunk.packing.lengths == (*whole.packing.lengths, *[more] * (more > 0)) for chunk in chunks)
        assert torch.cat([chunk.own for chunk in chunks]).sort().values.tolist() == list(range(batch.tokens.numel()))
        for part, chunk in enumerate(chunks):
            assert torch.equal(chunk.places + part * chunk.ids.shape[1], whole.places.index_select(0, chunk.own))
