"""What a configuration asks for that this version plans but does not train: refused before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.config import RunConfig
from tasks.geometry import Plan


def refuse_unbuilt(cfg: RunConfig, plan: Plan) -> None:
    """Refuse what cannot be trained, all of it at once.

    Raises:
        ValueError: with every reason.
    """
    reasons = list(_reasons(cfg, plan))
    if reasons:
        raise ValueError("this version plans this configuration but cannot train it:\n- " + "\n- ".join(reasons))


def _reasons(cfg: RunConfig, plan: Plan) -> Iterator[str]:
    policy = cfg.actor_rollout_ref
    if plan.world_size > 1:
        yield (
            f"{plan.world_size} devices (trainer.nnodes={cfg.trainer.nnodes} x trainer.n_gpus_per_node="
            f"{cfg.trainer.n_gpus_per_node}): training runs on one. Set both to 1; "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1 goes with it."
        )
    if policy.model.dtype == "float64":
        yield "actor_rollout_ref.model.dtype=float64: the rollout engine samples in float32 or bfloat16."
    if policy.rollout.name != "transformers":
        yield f"actor_rollout_ref.rollout.name={policy.rollout.name}: the engine here is transformers."
    for role, fsdp in (("actor", policy.actor.fsdp_config), ("ref", policy.ref.fsdp_config)):
        if fsdp.param_offload or fsdp.optimizer_offload or fsdp.offload_policy:
            yield f"actor_rollout_ref.{role}.fsdp_config offload: on one device weights stay where they are; set false."
