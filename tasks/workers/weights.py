"""A policy's weights as bytes: their digest, and the files they are saved in and restored from. No pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """SHA-256 over a tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().contiguous().cpu().flatten()
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def joined_digest(parts: Iterable[bytes]) -> str:
    """Hex SHA-256 over digests, in their order."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def save_files(
    folder: Path, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Write the three files of a policy version into an existing folder."""
    for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
        save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, folder / name)
    (folder / STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")


def load_files(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Read them back: (weights, optimizer state, the rest)."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER), state


def copy_weights(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.nn.Parameter], where: Path) -> None:
    """Set the target's weights to the source's values; nothing is changed unless all of them fit.

    Raises:
        ValueError: names, shapes or types differ.
    """
    odd = sorted(set(source) ^ set(target))
    odd += [n for n in sorted(set(source) & set(target)) if _kind(source[n]) != _kind(target[n])]
    if odd:
        raise ValueError(
            f"{where} is no policy of this run's model: {odd[0]} is on one side only or differs in shape or type "
            f"({len(odd)} weights in all). Give the run the actor_rollout_ref.model it was made with, or another "
            "trainer.experiment_name."
        )
    with torch.no_grad():
        for name, weight in target.items():
            weight.copy_(source[name])


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
