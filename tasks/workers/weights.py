"""A policy's weights as bytes: their digest, and the files they are saved in and restored from. No pickle.

The files are plain safetensors: torch.distributed.checkpoint's HuggingFaceStorageReader reads them into any sharding.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    """Write the three files of a policy version into an existing folder.

    Raises:
        OSError: they cannot be written.
    """
    for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
        with full_disk_as_os_error(folder):
            save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, folder / name)
        usual_mode(folder / name)
    (folder / STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")


def usual_mode(path: Path) -> None:
    """Give a file the mode that any new file has: safetensors makes files that their owner alone can read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextmanager
def full_disk_as_os_error(folder: Path) -> Iterator[None]:
    """Raise what every other writer raises: safetensors and tokenizers tell of a full disk in words alone."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if f"(os error {errno.ENOSPC})" in str(error) or f"(os error {errno.EDQUOT})" in str(error):
            raise OSError(errno.ENOSPC, str(error), str(folder)) from error
        raise


def files_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """About what tensors take in a safetensors file, bytes: their values, and a line of the header for each."""
    return sum(value.numel() * value.element_size() + HEADER_BYTES + len(name) for name, value in tensors.items())


HEADER_BYTES = 100
"""A tensor's type, shape and place in a safetensors header, without its name."""


def load_files(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Read them back: (weights, optimizer state, the rest)."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER), state


def require_same_model(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], where: Path) -> None:
    """Refuse weights whose names, shapes or types are not the target's.

    Raises:
        ValueError: they are not.
    """
    odd = sorted(set(source) ^ set(target))
    odd += [n for n in sorted(set(source) & set(target)) if _kind(source[n]) != _kind(target[n])]
    if odd:
        raise ValueError(
            f"{where} is no policy of this run's model: {odd[0]} is on one side only or differs in shape or type "
            f"({len(odd)} weights in all). Give the run the actor_rollout_ref.model it was made with, or another "
            "trainer.experiment_name."
        )


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
