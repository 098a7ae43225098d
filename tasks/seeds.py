"""Seeds as pure functions of names and numbers, never of a process-wide state."""

from __future__ import annotations

import hashlib


def hashed(*parts: int | str) -> int:
    """A 63-bit integer that is the same for the same parts on every machine and in every version (BLAKE2b)."""
    text = "\0".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(run_seed: int, step: int, prompt_index: int, slot: int, sample: int) -> int:
    """Seed of one response's random stream.

    Args:
        run_seed: `trainer.seed`.
        step: training step.
        prompt_index: row of the prepared data set.
        slot: place of the prompt within the step; tells apart a prompt that is drawn twice.
        sample: number of the response within its group.

    Returns:
        0 <= seed < 2^63.
    """
    return hashed("sample", run_seed, step, prompt_index, slot, sample)
