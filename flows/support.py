"""What a configuration asks for that this version plans but does not train: refused before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tasks.config import RunConfig
from tasks.engines.vllm_settings import check_supported
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
    separate = not cfg.actor_rollout_ref.hybrid_engine
    if separate and cfg.actor_rollout_ref.rollout.nnodes == 0:
        yield (
            "actor_rollout_ref.hybrid_engine=false: no device samples. Say how many do: "
            "actor_rollout_ref.rollout.nnodes and actor_rollout_ref.rollout.n_gpus_per_node."
        )
    if not separate and cfg.actor_rollout_ref.rollout.nnodes:
        yield (
            f"actor_rollout_ref.rollout.nnodes={cfg.actor_rollout_ref.rollout.nnodes}: nodes of their own for sampling "
            "need actor_rollout_ref.hybrid_engine=false. Set that, or nnodes=0."
        )
    if (plan.world_size > 1 or separate) and find_spec("ray") is None:
        yield (
            f"{plan.world_size} devices (trainer.nnodes={cfg.trainer.nnodes} x trainer.n_gpus_per_node="
            f"{cfg.trainer.n_gpus_per_node}) need Ray, which is not installed: pip install 'grpoflow[ray]'. Or set "
            "both to 1; actor_rollout_ref.rollout.tensor_model_parallel_size=1 goes with it."
        )
    if max(cfg.trainer.nnodes, cfg.actor_rollout_ref.rollout.nnodes) > 1 and cfg.ray.address is None:
        yield (
            f"trainer.nnodes={cfg.trainer.nnodes}, actor_rollout_ref.rollout.nnodes="
            f"{cfg.actor_rollout_ref.rollout.nnodes}: a Ray of the run's own has this machine alone. Start a cluster "
            "(`ray start --head`, then `ray start --address=...` on the others) and set ray.address=auto."
        )
    rollout, replica = cfg.actor_rollout_ref.rollout, cfg.replica_devices
    if cfg.storage.in_object_store and max(cfg.trainer.nnodes, rollout.nnodes) > 1:
        yield (
            f"storage.root={cfg.storage.root} with ranks on several machines: a run in an object store works in a copy "
            "on one machine, which the others cannot read. Set storage.root to a file system that all of them see."
        )
    if rollout.name == "vllm":
        try:
            check_supported(cfg)
        except ValueError as error:
            yield str(error)
    if rollout.name == "vllm" and replica > cfg.sampling_devices[1]:
        yield (
            f"a vLLM replica of {replica} devices on machines with {cfg.sampling_devices[1]}: a replica lives on one "
            "machine. Lower actor_rollout_ref.rollout.tensor_model_parallel_size."
        )
    if cfg.actor_rollout_ref.model.dtype == "float64":
        yield "actor_rollout_ref.model.dtype=float64: the rollout engine samples in float32 or bfloat16."
