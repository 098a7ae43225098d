"""A policy as it is handed to an engine with weights of its own: a folder in Hugging Face format, and a check.

The check is a row of token ids and the trainer's log-probs of them. It is long enough for one block of vLLM's prefix
cache, so that an engine which kept anything of the policy before is found out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.engines.vllm_settings import context_tokens, model_sizes
from tasks.workers.sequences import Sequences

POLICY, CHECK_IDS, CHECK_LOG_PROBS = "policy.json", "check_ids.npy", "check_log_probs.npy"
"""Files beside those of the model; the first is written last."""
CHECK_TOKENS = 200
"""Length of the check where the context allows it: more than a block of 128 tokens of vLLM's cache on CPU."""
MEAN_GAP = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest mean difference, in nats, between vLLM's log-probs of the check and the trainer's, by type of computation."""


@dataclass(frozen=True, eq=False)
class Held:
    """The policy that is loaded.

    Attributes:
        folder: it was loaded from, and is again when the process is replaced.
        version: of the policy.
        digest: of its weights.
        log_probs: the trainer's, of the check.
    """

    folder: Path
    version: int
    digest: str
    log_probs: np.ndarray


def check_of(cfg: RunConfig, folder: Path) -> Sequences:
    """The check as one sequence: its first token is the prompt. The same for every policy of a run."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = (config.get("text_config") or config)["vocab_size"]
    length = min(CHECK_TOKENS, context_tokens(cfg, model_sizes(folder)))
    ids = np.random.default_rng(0).integers(0, size, length).astype(np.int32)
    prompt, response = (Ragged.from_rows([part], np.int32) for part in (ids[:1], ids[1:]))
    return Sequences(prompt, np.zeros(1, dtype=np.int64), response)


def finish(folder: Path, policy_version: int, policy_digest: str, check: Sequences, log_probs: np.ndarray) -> None:
    """Add to a folder of weights what makes it a hand-over.

    Args:
        folder: holds config.json and the weights.
        policy_version: of the policy.
        policy_digest: of its weights.
        check: `check_of` the folder.
        log_probs: [T] of the check's response at temperature 1, under these weights.
    """
    ids = np.concatenate([check.prompts.values, check.responses.values]).astype(np.int32)
    np.save(folder / CHECK_IDS, ids, allow_pickle=False)
    np.save(folder / CHECK_LOG_PROBS, log_probs.astype(np.float64), allow_pickle=False)
    said = {"policy_version": policy_version, "policy_digest": policy_digest}
    (folder / POLICY).write_text(json.dumps(said), encoding="utf-8")


def fault_of(
    wanted: np.ndarray, got: np.ndarray, cached: float, before: np.ndarray | None, largest: float
) -> str | None:
    """What speaks against vLLM having taken the weights; None: nothing.

    Args:
        wanted: [T] log-probs of the check under the policy.
        got: [T] vLLM's.
        cached: vLLM's last one, computed with its prefix cache.
        before: [T] log-probs under the policy that was loaded before; None: unknown.
        largest: mean difference that two ways to compute the same may have, nats.
    """
    if got.shape != wanted.shape:
        return f"it gives {got.size} log-probs of the check instead of {wanted.size}"
    gap = float(np.abs(got - wanted).mean())
    if not gap <= largest:
        return (
            f"its log-probs of the check differ from the policy's by {gap:.3g} nats on average, more than {largest:g}"
        )
    if not abs(cached - got[-1]) <= 5 * largest:
        return f"with its prefix cache a log-prob is {cached:.4g}, without it is {got[-1]:.4g}: the cache is stale"
    if before is not None and before.shape == wanted.shape:
        moved, to_old = float(np.abs(wanted - before).mean()), float(np.abs(got - before).mean())
        # New weights that were taken put the numbers nearer to the new ones; rounding alone favours neither.
        if gap - to_old > 0.5 * moved:
            return f"its log-probs are those of the policy before: {to_old:.3g} nats from them, {gap:.3g} from the new"
    return None


def end_tokens(folder: Path, of_tokenizer: int | None) -> list[int]:
    """Ids that end a response: the generation settings' (the model's where there are none) and the tokenizer's."""
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    of_model = (config.get("text_config") or config).get("eos_token_id")
    for source in (settings.get("eos_token_id") or of_model, of_tokenizer):
        ids.update(source if isinstance(source, list) else [] if source is None else [source])
    return sorted(ids)


def read_policy(folder: Path, version: int, digest: str) -> Held:
    """What a hand-over folder says of itself.

    Raises:
        ValueError: it is not complete, or of another policy.
    """
    if not (folder / POLICY).is_file():
        raise ValueError(f"{folder} is no complete hand-over of a policy: there is no {POLICY}")
    said = json.loads((folder / POLICY).read_text(encoding="utf-8"))
    if (said["policy_version"], said["policy_digest"]) != (version, digest):
        raise ValueError(
            f"{folder} holds policy {said['policy_version']} with digest {said['policy_digest'][:12]}, not policy "
            f"{version} with {digest[:12]}"
        )
    return Held(folder, version, digest, np.load(folder / CHECK_LOG_PROBS, allow_pickle=False).astype(np.float64))
