"""Weights as bytes: their digests, and what writing them in safetensors format takes."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from tasks.workers.mesh import Mesh
from tasks.workers.sharding import whole


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """SHA-256 over a tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().contiguous().cpu().flatten()
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def digests(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, bytes]:
    """SHA-256 of each whole tensor, by name; collective. The ranks take turns at the hashing."""
    own = {}
    for place, (name, tensor) in enumerate(tensors.items()):
        value = whole(tensor)
        if place % mesh.world_size == mesh.rank:
            own[name] = tensor_digest(name, value)
    if mesh.world_size == 1:
        return own
    known = {name: digest for part in mesh.exchange(own) for name, digest in part.items()}
    return {name: known[name] for name in tensors}


def joined_digest(parts: Iterable[bytes]) -> str:
    """Hex SHA-256 over digests, in their order."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


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
