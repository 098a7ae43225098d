"""PolicyWorker: the only class that owns weights. It computes log-probs, takes optimizer steps, saves what it holds.

Evaluation mode always: no dropout, so that two passes over the same tokens give the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.stage import NonFiniteError
from tasks.workers.forward import response_log_probs, to_device
from tasks.workers.mini_batch import Accumulated, MiniBatch, Signals
from tasks.workers.model import CausalModel, load_model
from tasks.workers.optim import Snapshot, learning_rate, make_optimizer, optimizer_tensors, restore_optimizer
from tasks.workers.sequences import MicroBatching, Sequences, cut
from tasks.workers.weights import (
    files_bytes,
    joined_digest,
    load_files,
    require_same_model,
    save_files,
    tensor_digest,
)

__all__ = ["LogProbs", "PolicyWorker", "Signals"]


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Numbers of every response token; N rows, aligned with the responses.

    Attributes:
        log_probs: float32 log-probs.
        entropy: float32 entropies, nats; None for the reference.
        sum_pi_squared: float32 sums of squared probabilities; None where they were not asked for.
        micro_batches: forward passes it took.
    """

    log_probs: Ragged
    entropy: Ragged | None
    sum_pi_squared: Ragged | None
    micro_batches: int


class PolicyWorker:
    """The policy on one device, its optimizer, and the reference it is compared with.

    Attributes:
        cfg: the run's configuration.
        model: the policy.
        policy_version: 0 at the start; whoever commits an update counts it up.
    """

    def __init__(
        self, cfg: RunConfig, *, total_steps: int, with_reference: bool, device: torch.device | None = None
    ) -> None:
        """Load the policy, and with it the reference: without LoRA a frozen copy of the first weights, with LoRA the
        model without its adapter.

        Args:
            cfg: the run's configuration.
            total_steps: the plan's training steps: the length of the learning-rate schedule.
            with_reference: a reference will be asked for.
            device: where to; None: as `trainer.device` says.

        Raises:
            ValueError: the model cannot be loaded as configured.
        """
        self.cfg, self.policy_version = cfg, 0
        self._total_steps = total_steps
        model_cfg, actor = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.actor
        device = device or choose_device(cfg.trainer.device)
        self.model = load_model(model_cfg, actor.fsdp_config, device, cfg.trainer.seed)
        self._weights = {n: p for n, p in sorted(self.model.module.named_parameters()) if p.requires_grad}
        self._frozen = {n: p for n, p in sorted(self.model.module.named_parameters()) if not p.requires_grad}
        self._optimizer = make_optimizer(self._weights.values(), actor.optim)
        self._reference: CausalModel | None = None
        if with_reference:
            self._reference = self.model if self.model.adapter else self.model.frozen_copy()
        self._trained_digests: dict[str, bytes] | None = None
        self._frozen_digests: list[bytes] | None = None

    def follow(self, cfg: RunConfig, *, total_steps: int | None = None) -> None:
        """Compute under another configuration of the same model from now on, such as that of an earlier lineage.

        Args:
            cfg: the configuration.
            total_steps: length of its learning-rate schedule; None: as it is.
        """
        self.cfg = cfg
        self._total_steps = self._total_steps if total_steps is None else total_steps
        optim = cfg.actor_rollout_ref.actor.optim
        for group in self._optimizer.param_groups:
            group.update(betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)

    # ------------------------------------------------------------------------------------------------------ log-probs

    def log_probs(
        self,
        seqs: Sequences,
        micro: MicroBatching,
        *,
        temperature: float,
        reference: bool = False,
        sum_pi_squared: bool = False,
    ) -> LogProbs:
        """Log-probs of the responses' tokens, and their entropy, at a temperature.

        Args:
            seqs: N sequences.
            micro: how they are cut.
            temperature: logits are divided by it.
            reference: under the reference, without entropy.
            sum_pi_squared: also the sum over the vocabulary of squared probabilities.

        Raises:
            ValueError: a sequence does not fit a micro-batch.
        """
        model = self._reference_model() if reference else self.model
        share = self.shares_prompts(training=False)
        parts = cut(seqs, np.arange(len(seqs.responses)), micro, share_prompts=share)
        wanted = (True, not reference, sum_pi_squared)
        columns = [np.empty(len(seqs.responses.values), dtype=np.float32) if want else None for want in wanted]
        with torch.no_grad(), model.computing(adapter=not reference):
            for part in parts:
                batch = to_device(seqs, part, model.device)
                results = response_log_probs(
                    model,
                    batch,
                    temperature=temperature,
                    share_prompts=share,
                    entropy=not reference,
                    squares=sum_pi_squared,
                )
                places = _token_places(seqs.responses, part)
                for column, values in zip(columns, results, strict=True):
                    if column is not None and values is not None:
                        column[places] = values.cpu().numpy()
        log_probs, entropy, squares = (
            None if column is None else Ragged(column, seqs.responses.offsets) for column in columns
        )
        assert log_probs is not None
        return LogProbs(log_probs, entropy, squares, len(parts))

    def shares_prompts(self, *, training: bool) -> bool:
        """Whether a prompt is computed once for its samples: `actor.use_prefix_grouper`, where the model allows it.

        Recomputed layers take no key/value cache, so an update with gradient checkpointing computes whole sequences.
        """
        wanted = self.cfg.actor_rollout_ref.actor.use_prefix_grouper and self.model.full_attention
        return wanted and not (training and self.cfg.actor_rollout_ref.model.enable_gradient_checkpointing)

    def _reference_model(self) -> CausalModel:
        if self._reference is None:
            raise ValueError(
                "this worker holds no reference policy; set actor_rollout_ref.actor.use_kl_loss or "
                "algorithm.use_kl_in_reward"
            )
        return self._reference

    # --------------------------------------------------------------------------------------------------------- update

    def update(
        self,
        seqs: Sequences,
        signals: Signals,
        mini_batches: list[list[np.ndarray]],
        micro: MicroBatching,
        *,
        step: int,
    ) -> list[dict[str, Any]]:
        """Take one optimizer step per mini-batch; whatever fails, the weights are those from before the first.

        Args:
            seqs: N sequences.
            signals: N rows each.
            mini_batches: for each epoch the row numbers of each mini-batch.
            micro: how a mini-batch is cut.
            step: training step, from 1; decides the learning rate.

        Returns:
            One row per mini-batch with the columns of `updates`, less policy versions and digest; and `more`, further
            metrics by their whole name.

        Raises:
            NonFiniteError: a signal, the loss or the gradient is not finite.
            ValueError: a sequence does not fit a micro-batch.
        """
        _check_signals(signals, seqs.responses, step)
        lr = learning_rate(self.cfg.actor_rollout_ref.actor.optim, step, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        plan = [(epoch, rows) for epoch, batches in enumerate(mini_batches) for rows in batches]
        mini_batch = MiniBatch(self.cfg, self.model, seqs, signals, share_prompts=self.shares_prompts(training=True))
        before = Snapshot(self._optimizer, self._weights) if len(plan) > 1 else None
        done: list[dict[str, Any]] = []
        try:
            for index, (epoch, rows) in enumerate(plan):
                place = {"update_index": index, "epoch": epoch, "lr": lr}
                done.append({**place, **self._optimizer_step(mini_batch, rows, micro, f"step {step}, update {index}")})
        except BaseException:
            if before is not None:
                before.restore()
            raise
        finally:
            self._optimizer.zero_grad()
            self._trained_digests = None
        return done

    def _optimizer_step(
        self, mini_batch: MiniBatch, rows: np.ndarray, micro: MicroBatching, where: str
    ) -> dict[str, Any]:
        start = time.perf_counter()
        actor = self.cfg.actor_rollout_ref.actor
        self._optimizer.zero_grad()
        with self.model.computing():
            result = mini_batch.accumulate(rows, micro, where)
        grad_norm = None
        if result.skipped is None:
            grad_norm = self._clip(actor.grad_clip, where)
            self._optimizer.step()
        return {
            **result.row(),
            "grad_norm": grad_norm,
            "kl_loss": result.sums.kl_loss if actor.use_kl_loss and not result.skipped else None,
            "kl_clamped": int(result.sums.kl_clamped) if actor.use_kl_loss else None,
            "entropy": _mean_entropy(result) if actor.entropy_coeff != 0 and not result.skipped else None,
            "more": result.more(),
            "seconds": time.perf_counter() - start,
        }

    def _clip(self, limit: float, where: str) -> float:
        """Scale the gradient down to `limit`; return its norm before that."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), limit))
        if not np.isfinite(norm):
            bad = [n for n, p in self._weights.items() if p.grad is not None and not torch.isfinite(p.grad).all()]
            why = f"the gradient of {bad[0]} is not finite" if bad else "every gradient is finite, their norm is not"
            raise NonFiniteError(f"{where}: the gradient norm is {norm}; {why}. The weights are as before the step.")
        return norm

    # -------------------------------------------------------------------------------------------------- what is held

    def weights_digest(self) -> str:
        """SHA-256 over names, types, shapes and bytes of all weights, trained ones first."""
        return joined_digest([*self._trained().values(), *self._unchanging()])

    def tensor_digests(self) -> dict[str, str]:
        """The first 16 hex digits of the digest of each trained weight, by name: where two policies differ first."""
        return {name: digest.hex()[:16] for name, digest in self._trained().items()}

    def _trained(self) -> dict[str, bytes]:
        if self._trained_digests is None:
            self._trained_digests = _digests(self._weights)
        return self._trained_digests

    def _unchanging(self) -> list[bytes]:
        if self._frozen_digests is None:
            self._frozen_digests = list(_digests(self._frozen).values())
        return self._frozen_digests

    def checkpoint_bytes(self) -> int:
        """What `save` writes, at most: trained weights, Adam's two moments and step count of each, bytes."""
        return 3 * files_bytes(self._weights) + STATE_BYTES

    def save(self, folder: Path) -> None:
        """Write trained weights, optimizer moments and policy version into an existing folder.

        Frozen weights are not written: they are those of `actor_rollout_ref.model.path`, known by their digest. The
        learning rate needs no state: it is a function of the policy version.

        Raises:
            OSError: the files cannot be written.
        """
        state = {
            "policy_version": self.policy_version,
            "weights_digest": self.weights_digest(),
            "frozen_digest": joined_digest(self._unchanging()),
        }
        save_files(folder, self._weights, dict(optimizer_tensors(self._optimizer, self._weights)), state)

    def load(self, folder: Path) -> None:
        """Become the policy version that `save` wrote, bit for bit.

        Raises:
            ValueError: it is of another model, or the files do not hold what their digest says. The worker is as it
                was before.
        """
        weights, optimizer, state = load_files(folder)
        if state["frozen_digest"] != joined_digest(self._unchanging()):
            raise ValueError(
                f"{folder} was saved over other frozen weights than those at actor_rollout_ref.model.path="
                f"{self.cfg.actor_rollout_ref.model.path}. Give the run the model it began with."
            )
        require_same_model(weights, self._weights, folder)
        digests = _digests({name: weights[name] for name in self._weights})
        if joined_digest([*digests.values(), *self._unchanging()]) != state["weights_digest"]:
            raise ValueError(f"{folder} is damaged: its weights do not have the digest {state['weights_digest'][:12]}")
        restore_optimizer(self._optimizer, self._weights, optimizer)
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(weights[name])
        self.policy_version, self._trained_digests = int(state["policy_version"]), digests


STATE_BYTES = 64 * 1024
"""Room for what a checkpoint holds besides tensors: state, manifest, headers' brackets."""


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}


def choose_device(wanted: str) -> torch.device:
    """The device of `trainer.device`.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda but torch sees no CUDA device. Set trainer.device=cpu or auto.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _mean_entropy(result: Accumulated) -> float:
    return result.sums.entropy / max(result.tokens, 1)


def _token_places(responses: Ragged, rows: np.ndarray) -> np.ndarray:
    """Places of the rows' tokens in the flat values, row by row."""
    lengths = responses.lengths[rows]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(responses.offsets[rows], lengths) + within


def _require_finite(what: str, values: np.ndarray, rows: Ragged, where: str = "") -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = int(np.searchsorted(rows.offsets, bad[0], side="right")) - 1
        raise NonFiniteError(
            f"{where}the {what} of sample {row}, token {bad[0] - rows.offsets[row]}, is {values[bad[0]]} "
            f"({len(bad)} such values). Nothing was trained on it."
        )


def _check_signals(signals: Signals, responses: Ragged, step: int) -> None:
    """Refuse signals that are not aligned with the responses, or not finite: a NaN outside the loss mask, too, would
    reach the gradient, as 0 times NaN."""
    columns = {
        "advantage": signals.advantages,
        "old log-prob": signals.old_log_probs,
        "reference log-prob": signals.ref_log_probs,
        "importance weight": signals.rollout_is_weights,
    }
    for name, rows in {**columns, "loss mask": signals.loss_mask}.items():
        if rows is not None and not np.array_equal(rows.offsets, responses.offsets):
            raise ValueError(f"step {step}: the {name}s are not aligned with the responses")
    for name, rows in columns.items():
        if rows is not None:
            _require_finite(name, rows.values, responses, f"step {step}: ")
