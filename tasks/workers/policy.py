"""PolicyWorker: the only class that owns weights. It computes log-probs, takes optimizer steps, saves what it holds.

Evaluation mode always: no dropout, so that two passes over the same tokens give the same numbers.

In a mesh there is one worker per rank, with its shard of the weights, and every method is collective: all ranks call it
with the same arguments, those of the whole batch, and each computes its own rows. Which rows, and in how many
micro-batches, follows from their lengths, the configuration and the mesh alone, so that ranks need not ask each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.ragged import Ragged
from tasks.config import RunConfig
from tasks.stage import NonFiniteError
from tasks.workers.forward import Layout, choose_layout, to_device
from tasks.workers.mesh import Mesh
from tasks.workers.mini_batch import Accumulated, MiniBatch, forward
from tasks.workers.model import CausalModel, load_model
from tasks.workers.optim import Snapshot, learning_rate, make_optimizer, moments_at_hand
from tasks.workers.policy_files import PolicyFiles, save_policy
from tasks.workers.sequences import MicroBatching, Sequences, share_out
from tasks.workers.sharding import local, moved_by_hand, whole
from tasks.workers.signals import Signals, wrong_signal
from tasks.workers.weights import digests, files_bytes, joined_digest

__all__ = ["LogProbs", "PolicyWorker", "Signals"]


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Numbers of every response token of M rows, aligned with their responses.

    Attributes:
        rows: [M] numbers of the rows, ascending: those this rank computed; in one process all.
        log_probs: float32 log-probs.
        entropy: float32 entropies, nats; None for the reference.
        sum_pi_squared: float32 sums of squared probabilities; None where they were not asked for.
        micro_batches: forward passes it took, as many on every rank.
    """

    rows: np.ndarray
    log_probs: Ragged
    entropy: Ragged | None
    sum_pi_squared: Ragged | None
    micro_batches: int


class PolicyWorker:
    """The policy on one device or one rank's shard of it, its optimizer, and the reference it is compared with.

    Attributes:
        cfg: the run's configuration.
        mesh: where this rank is among the others.
        model: the policy.
        policy_version: 0 at the start; whoever commits an update counts it up.
    """

    def __init__(
        self,
        cfg: RunConfig,
        *,
        total_steps: int,
        with_reference: bool,
        device: torch.device | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Load the policy, and with it the reference: without LoRA a frozen copy of the first weights, with LoRA the
        model without its adapter.

        Args:
            cfg: the run's configuration.
            total_steps: the plan's training steps: the length of the learning-rate schedule.
            with_reference: a reference will be asked for.
            device: where to; None: as `trainer.device` says.
            mesh: this rank's, with its device; None: one process.

        Raises:
            ValueError: the model cannot be loaded or computed as configured.
        """
        self.cfg, self.policy_version = cfg, 0
        self.mesh = mesh or Mesh.alone(device or choose_device(cfg.trainer.device))
        self._total_steps = total_steps
        model_cfg, fsdp = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.actor.fsdp_config
        away = moved_by_hand(fsdp.param_offload, fsdp, self.mesh)
        self.model = load_model(model_cfg, fsdp, self.mesh, cfg.trainer.seed, away=away)
        self.layout(training=True)
        self._weights = {n: p for n, p in sorted(self.model.module.named_parameters()) if p.requires_grad}
        self._frozen = {n: p for n, p in sorted(self.model.module.named_parameters()) if not p.requires_grad}
        self._optimizer = make_optimizer(self._weights.values(), cfg.actor_rollout_ref.actor.optim)
        # Where moments rest is settled here, as it is for weights: `follow` moves nothing.
        self._moments_away = moved_by_hand(fsdp.optimizer_offload, fsdp, self.mesh)
        self._reference = self._first_weights() if with_reference else None
        self._trained_digests: dict[str, bytes] | None = None
        self._frozen_digests: list[bytes] | None = None

    def _first_weights(self) -> CausalModel:
        """The reference; it computes as the policy does and rests where `ref.fsdp_config` says."""
        if self.model.adapter:
            return self.model
        model_cfg, actor, ref = (getattr(self.cfg.actor_rollout_ref, part) for part in ("model", "actor", "ref"))
        fsdp = ref.fsdp_config.model_copy(update={"mixed_precision": actor.fsdp_config.mixed_precision})
        away = moved_by_hand(fsdp.param_offload, fsdp, self.mesh)
        if self.mesh.world_size == 1:
            return self.model.frozen_copy(away=away)
        # Shards cannot be copied as a module; the same files give the same weights.
        return load_model(model_cfg, fsdp, self.mesh, self.cfg.trainer.seed, away=away, frozen=True)

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
            micro: how they are cut; tokens of one device.
            temperature: logits are divided by it.
            reference: under the reference, without entropy.
            sum_pi_squared: also the sum over the vocabulary of squared probabilities.

        Raises:
            ValueError: a sequence does not fit a micro-batch.
        """
        model = self._reference_model() if reference else self.model
        layout, responses = self.layout(training=False), seqs.responses
        share = share_out(
            seqs,
            np.arange(len(responses)),
            micro.shared_by(self.mesh.sp_size),
            self.mesh.dp_size,
            balance=self.cfg.trainer.balance_batch,
            layout=layout,
        )
        wanted = (True, not reference, sum_pi_squared)
        columns = [np.empty(len(responses.values), dtype=np.float32) if want else None for want in wanted]
        with torch.no_grad(), model.computing(adapter=not reference):
            for turn in share.turns(self.mesh.dp_rank):
                results = forward(
                    model,
                    to_device(seqs, turn.rows, model.device),
                    self.mesh,
                    layout=layout,
                    temperature=temperature,
                    entropy=not reference,
                    squares=sum_pi_squared,
                )
                places = _token_places(responses, turn.rows)
                for column, values in zip(columns, results, strict=True):
                    if column is not None and values is not None:
                        column[places] = values.cpu().numpy()
        rows = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *share.parts[self.mesh.dp_rank]]))
        places, lengths = _token_places(responses, rows), responses.lengths[rows]
        log_probs, entropy, squares = (
            None if column is None else Ragged.from_lengths(column[places], lengths) for column in columns
        )
        assert log_probs is not None
        return LogProbs(rows, log_probs, entropy, squares, share.micro_batches)

    def layout(self, *, training: bool) -> Layout:
        """How a micro-batch's sequences lie in a forward pass.

        Prompts are computed once for their samples (`actor.use_prefix_grouper`) where the model allows it, but not in
        an update with gradient checkpointing: recomputed layers take no key/value cache.
        """
        model, actor = self.cfg.actor_rollout_ref.model, self.cfg.actor_rollout_ref.actor
        return choose_layout(
            self.model,
            share_prompts=actor.use_prefix_grouper and not (training and model.enable_gradient_checkpointing),
            remove_padding=model.use_remove_padding,
            sp_size=self.mesh.sp_size,
        )

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
            micro: how a mini-batch is cut; tokens of one device.
            step: training step, from 1; decides the learning rate.

        Returns:
            One row per mini-batch with the columns of `updates`, less policy versions and digest; and `more`, further
            metrics by their whole name.

        Raises:
            NonFiniteError: a signal, the loss or the gradient is not finite.
            ValueError: a sequence does not fit a micro-batch.
        """
        self.mesh.agree(wrong_signal(signals, seqs.responses, step))
        lr = learning_rate(self.cfg.actor_rollout_ref.actor.optim, step, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        plan = [(epoch, rows) for epoch, batches in enumerate(mini_batches) for rows in batches]
        layout = self.layout(training=True)
        mini_batch = MiniBatch(self.cfg, self.model, seqs, signals, layout=layout, mesh=self.mesh)
        done: list[dict[str, Any]] = []
        with self.model.residence.at_hand(), self._moments_at_hand():
            before = Snapshot(self._optimizer, self._weights) if len(plan) > 1 else None
            try:
                for index, (epoch, rows) in enumerate(plan):
                    place = {"update_index": index, "epoch": epoch, "lr": lr}
                    where = f"step {step}, update {index}"
                    done.append({**place, **self._optimizer_step(mini_batch, rows, micro, where)})
            except BaseException:
                if before is not None:
                    before.restore()
                raise
            finally:
                self._optimizer.zero_grad()
                self._trained_digests = None
        return done

    def _moments_at_hand(self) -> AbstractContextManager[None]:
        return moments_at_hand(self._optimizer, self.mesh.device, away=self._moments_away)

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
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._weights.values(), limit)))
        if not np.isfinite(norm):
            grads = {name: local(weight.grad) for name, weight in self._weights.items() if weight.grad is not None}
            bad = [name for name, grad in grads.items() if not torch.isfinite(grad).all()]
            what, after = f"{where}: the gradient norm is {norm};", "The weights are as before the step."
            # A rank sees its shards of the gradients alone; the first that finds one speaks for all.
            named = NonFiniteError(f"{what} the gradient of {bad[0]} is not finite. {after}") if bad else None
            self.mesh.agree(named)
            raise NonFiniteError(f"{what} every gradient is finite, their norm is not. {after}")
        return norm

    # -------------------------------------------------------------------------------------------------- what is held

    def weights_digest(self) -> str:
        """SHA-256 over names, types, shapes and bytes of all weights, trained ones first; the same however they are
        sharded."""
        return joined_digest([*self._trained().values(), *self._unchanging()])

    def tensor_digests(self) -> dict[str, str]:
        """The first 16 hex digits of the digest of each trained weight, by name: where two policies differ first."""
        return {name: digest.hex()[:16] for name, digest in self._trained().items()}

    def _trained(self) -> dict[str, bytes]:
        if self._trained_digests is None:
            with self.model.residence.at_hand():
                self._trained_digests = digests(self._weights, self.mesh)
        return self._trained_digests

    def _unchanging(self) -> list[bytes]:
        if self._frozen_digests is None:
            with self.model.residence.at_hand():
                self._frozen_digests = list(digests(self._frozen, self.mesh).values())
        return self._frozen_digests

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of every weight, trained ones first, on this rank's device, one at a time.

        Collective: every rank takes all of them. A value must not be changed: in one process it is the weight itself.
        """
        with self.model.residence.at_hand():
            for name, weight in [*self._weights.items(), *self._frozen.items()]:
                yield name, whole(weight.detach()).to(self.mesh.device)

    def checkpoint_bytes(self) -> int:
        """What `save` writes on all ranks together, at most: trained weights, Adam's two moments and step count of
        each, bytes."""
        return 3 * files_bytes(self._weights) + STATE_BYTES * self.mesh.world_size

    def save(self, folder: Path) -> None:
        """Write trained weights, optimizer moments and policy version into an existing folder that all ranks see.

        Frozen weights are not written: they are those of `actor_rollout_ref.model.path`, known by their digest. The
        learning rate needs no state: it is a function of the policy version. In a mesh each rank writes its shards into
        a file of its own, which `load` reads into any number of ranks.

        Raises:
            OSError: the files cannot be written.
        """
        state = {
            "policy_version": self.policy_version,
            "weights_digest": self.weights_digest(),
            "frozen_digest": joined_digest(self._unchanging()),
        }
        save_policy(folder, self._weights, self._optimizer, state, self.mesh)

    def load(self, folder: Path) -> None:
        """Become the policy version that `save` wrote, bit for bit, whatever number of ranks it was written by.

        Raises:
            ValueError: it is of another model, or the files do not hold what their digest says. The worker is as it
                was before.
        """
        with self.model.residence.at_hand(), self._moments_at_hand():
            read = PolicyFiles(folder, self._weights, self.mesh)
            if read.state["frozen_digest"] != joined_digest(self._unchanging()):
                raise ValueError(
                    f"{folder} was saved over other frozen weights than those at actor_rollout_ref.model.path="
                    f"{self.cfg.actor_rollout_ref.model.path}. Give the run the model it began with."
                )
            found = read.become(self._optimizer, self._unchanging())
        self.policy_version, self._trained_digests = int(read.state["policy_version"]), found


STATE_BYTES = 64 * 1024
"""Room for what a checkpoint holds besides tensors: state, manifest, headers' brackets."""


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
