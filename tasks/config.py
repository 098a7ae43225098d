"""The configuration: verl's words as frozen pydantic models, one section per class, a docstring under each field.

Units: `data.train_batch_size`, `data.gen_batch_size` and `actor.ppo_mini_batch_size` count prompts over all devices;
`*_micro_batch_size_per_gpu` counts sequences on one data-parallel rank; `*_token_len_per_gpu` tokens on one device.
What follows from them is the plan's business (tasks/geometry.py). Nothing here loads a file, a model or a tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tasks.algorithms.variants import ESTIMATORS, LOSSES

if TYPE_CHECKING:
    Estimator = str
    LossMode = str
else:
    Estimator = Literal[tuple(ESTIMATORS)]
    LossMode = Literal[tuple(LOSSES)]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]
KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
Dtype = Annotated[
    Literal["float32", "bfloat16", "float64"],
    BeforeValidator(lambda name: _SHORT_DTYPES.get(name, name) if isinstance(name, str) else name),
]
"""verl writes both `bf16` and `bfloat16`."""


def _without_password(address: str) -> str:
    if urlsplit(address).password is not None:
        raise ValueError(
            "it has a password in it, and a configuration is kept with its run for everybody to read. Leave it out and "
            "give it by the environment: PGPASSWORD or ~/.pgpass (PostgreSQL), MLFLOW_TRACKING_USERNAME and _PASSWORD "
            "(MLflow), PREFECT_API_AUTH_STRING (Prefect)"
        )
    return address


Address = Annotated[str, AfterValidator(_without_password)]
"""URL of a server or database."""

MOST_PROMPTS = 2**20
"""More prompts in a step, or responses to one, are a slip of the finger."""
MOST_REWARD = 1e30
"""Largest reward in absolute value: advantages are float32, which ends at 3.4e38, and sums and differences must fit."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        validate_default=True,
    )


# ------------------------------------------------------------------------------------------------------------- data


class DataConfig(Section):
    """`data`: where prompts come from, how long they may be, how many make a step."""

    train_files: tuple[str, ...] = ()
    """Parquet or JSONL files of training prompts; one path or a list."""
    val_files: tuple[str, ...] = ()
    """Files of validation prompts; empty: no validation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of chat messages, or text that is used as it is."""
    ground_truth_key: str | None = None
    """Column of the reference answer; null: `reward_model.ground_truth`, `ground_truth`, `answer` or `solution`."""
    reward_fn_key: str = "data_source"
    """Column that names the data source, by which a reward function is chosen."""
    data_source: str | None = None
    """Data source of every row, for files that have no such column."""
    text_as_user_message: bool = False
    """Wrap a text prompt as one user message and apply the chat template to it."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking`."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt, in tokens, after the chat template."""
    max_response_length: int = Field(512, ge=1)
    """Longest response, in tokens."""
    train_batch_size: int = Field(1024, ge=1, le=MOST_PROMPTS)
    """Prompts per training step, over all devices."""
    gen_batch_size: int | None = Field(None, ge=1, le=MOST_PROMPTS)
    """Prompts generated at a time when groups are filtered; null: `train_batch_size`, its only value without."""
    val_batch_size: int | None = Field(None, ge=1)
    """verl's word for the prompts of a validation batch; the engine cuts its calls by `rollout.max_num_seqs`."""
    train_max_samples: int = -1
    """Use at most this many training rows; -1: all."""
    val_max_samples: int = -1
    """Use at most this many validation rows; -1: all."""
    shuffle: bool = True
    """Shuffle the prompts of every epoch; the order is a pure function of (seed, epoch)."""
    seed: int | None = None
    """Seed of the prompt order; null: `trainer.seed`."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length`; the number dropped is logged."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """An over-long prompt that is not filtered: refuse the data set, or keep its end, its start, or both ends."""

    @model_validator(mode="before")
    @classmethod
    def _one_path_is_a_list(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            for key in ("train_files", "val_files"):
                if values.get(key) is None and key in values:
                    values[key] = ()
                elif isinstance(values.get(key), str):
                    values[key] = (values[key],) if values[key] else ()
        return values


# ------------------------------------------------------------------------------------------------- actor_rollout_ref


class ModelConfig(Section):
    """`actor_rollout_ref.model`: the policy's weights and how they are held."""

    path: str = ""
    """Folder in Hugging Face format, or a hub name."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; null: `path`."""
    dtype: Dtype = "float32"
    """Type of the resident weights. Mixed precision is `actor.fsdp_config.mixed_precision.param_dtype`."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; null: eager on CPU, sdpa on CUDA."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's folder."""
    custom_chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    use_remove_padding: bool = True
    """Spend no computation on padding."""
    lora_rank: int = Field(0, ge=0, le=512)
    """Rank of LoRA adapters; 0: train all weights. With LoRA the reference is the model with its adapter off."""
    lora_alpha: float = 16.0
    """LoRA scale: the update is multiplied by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Modules that never get an adapter."""
    lora_adapter_path: str | None = None
    """Folder of an adapter to start from."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's own config."""


class OptimConfig(Section):
    """`actor_rollout_ref.actor.optim`: AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of Adam's first and second moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    lr_warmup_steps: int = -1
    """Training steps of linear warm-up; below 0: use `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1)
    """Share of all training steps that is warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warm-up. It advances once per training step, not per optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a share of `lr`."""
    num_cycles: float = Field(0.5, gt=0)
    """Cosine waves until the end; 0.5 falls once."""
    total_training_steps: int = -1
    """Length of the schedule in training steps; -1: the plan's total."""


class MixedPrecisionConfig(Section):
    """`…fsdp_config.mixed_precision`."""

    param_dtype: Dtype | None = None
    """Type of the computation; null: bfloat16 on CUDA, the weights' own type on CPU."""
    reduce_dtype: Dtype = "float32"
    """Type in which gradients are reduced over ranks."""


class FSDPConfig(Section):
    """`…fsdp_config`: how weights are sharded and where they rest."""

    fsdp_size: int = -1
    """Devices that share one copy of the weights; -1: all. Must divide the number of devices."""
    param_offload: bool = False
    """Keep weights in host memory between uses."""
    optimizer_offload: bool = False
    """Keep optimizer states in host memory between updates."""
    offload_policy: bool = False
    """FSDP2's own CPU offload, which replaces the two flags above."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass."""
    forward_prefetch: bool = False
    """Gather the next layer's weights early."""
    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss`."""

    loss_mode: LossMode = "vanilla"
    """Which policy loss; docs/algorithms.md lists them."""
    clip_cov_ratio: float = Field(0.0002, ge=0, le=1)
    """clip_cov: share of tokens whose gradient is dropped, at least one; 0: none."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of the covariance."""
    kl_cov_ratio: float = Field(0.0002, ge=0, le=1)
    """kl_cov: share of tokens that get a KL penalty, at least one; 0: none."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of that penalty."""
    dro_beta: float | None = Field(None, gt=0)
    """dro: weight of the quadratic pull to the old policy; dro needs it."""
    tau_pos: float = Field(1.0, gt=0)
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: temperature of the gate for the others; larger closes faster."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """cispo, sapo: the ratio of each token, or the geometric mean of its sequence's ratios."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: power of the sequence ratio for positive advantages."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """vespo: decay of the sequence ratio for positive advantages."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: power of the sequence ratio for the others."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """vespo: decay of the sequence ratio for the others."""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """Any loss: drop sequences of negative advantage whose mean log ratio of sampler to policy is above this, in nats;
    null: keep all."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Any loss: train on this share of the mini-batch's tokens, those of highest entropy; 1: on all."""


class ActorConfig(Section):
    """`actor_rollout_ref.actor`: the update."""

    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Sharding; both words mean FSDP2 here."""
    ppo_mini_batch_size: int = Field(256, ge=1)
    """Prompts behind one optimizer step, over all devices; times `rollout.n` sequences."""
    ppo_micro_batch_size: int | None = Field(None, ge=1)
    """Deprecated in verl: sequences of one forward/backward over all devices."""
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one forward/backward on one data-parallel rank."""
    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens instead of sequences."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Most tokens of a micro-batch per device, when cut by tokens. A real cap."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the step's mini-batches."""
    shuffle: bool = False
    """Shuffle groups before cutting mini-batches, anew for every epoch."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    clip_ratio: float = Field(0.2, ge=0)
    """PPO's clip range on both sides, where the two below are not set."""
    clip_ratio_low: float | None = Field(None, ge=0)
    """Clip range below 1; null: `clip_ratio`."""
    clip_ratio_high: float | None = Field(None, ge=0)
    """Clip range above 1 (clip-higher); null: `clip_ratio`."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: largest ratio for negative advantages."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one number, over the whole mini-batch."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """seq-mean-token-sum-norm: the constant divisor; null: `data.max_response_length`."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add KL to the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: KLType = "low_var_kl"
    """Estimator of that KL."""
    use_unbiased_kl: bool = False
    """Multiply that KL by the ratio of new to old probability, which makes its gradient unbiased (DeepSeek-V3.2)."""
    mask_truncated_responses: bool = False
    """Leave responses that were cut by their length limit out of the loss; they stay in group statistics."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest gradient norm of an optimizer step."""
    use_prefix_grouper: bool = True
    """Compute a prompt once for the samples of its group that share a micro-batch, where the model allows it."""
    ulysses_sequence_parallel_size: int = Field(1, ge=1)
    """Devices that share one sequence."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()

    @property
    def clip_low(self) -> float:
        """Clip range below 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Clip range above 1 that is in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class ValidationSampling(Section):
    """`actor_rollout_ref.rollout.val_kwargs`: sampling of validation responses."""

    n: int = Field(1, ge=1)
    """Responses per validation prompt."""
    do_sample: bool = False
    """false: greedy, whatever the temperature."""
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1


class RolloutConfig(Section):
    """`actor_rollout_ref.rollout`: the engine and its sampling, and the old log-prob pass."""

    name: Literal["transformers", "vllm"] = "transformers"
    """Rollout engine."""
    mode: Literal["async"] = "async"
    """verl's word; it has no other value left."""
    n: int = Field(1, ge=1, le=MOST_PROMPTS)
    """Responses per prompt: the size of a group."""
    do_sample: bool = True
    """false: greedy."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it, in sampling and in every log-prob that is compared with it; 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens that hold this much probability."""
    top_k: int = Field(-1, ge=-1)
    """Sample among this many most likely tokens; -1: all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response; the response keeps them."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    calculate_log_probs: bool = True
    """Keep the engine's log-probs of the sampled tokens."""
    prompt_length: int | None = Field(None, ge=1)
    """Longest prompt the engine takes; null: `data.max_prompt_length`."""
    response_length: int | None = Field(None, ge=1)
    """Longest response the engine makes; null: `data.max_response_length`."""
    max_model_len: int | None = Field(None, ge=1)
    """Context of the engine in tokens; null: the model's."""
    nnodes: int = Field(0, ge=0)
    """Without `hybrid_engine`: nodes that only sample."""
    n_gpus_per_node: int | None = Field(None, ge=1)
    """Without `hybrid_engine`: devices of each of them; null: `trainer.n_gpus_per_node`."""
    tensor_model_parallel_size: int = Field(2, ge=1)
    """Devices that share one copy of the engine's weights. verl's default is 2: set 1 on one device."""
    data_parallel_size: int = Field(1, ge=1)
    """Engine-internal data parallelism of one replica."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Pipeline stages of one replica; only 1 works."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of device memory the engine may take."""
    max_num_seqs: int = Field(256, ge=1)
    """Responses a replica samples at the same time."""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """Tokens a replica computes in one engine iteration."""
    enforce_eager: bool = False
    """vLLM: no graph capture."""
    free_cache_engine: bool = True
    """Free the engine's memory while the policy trains."""
    enable_chunked_prefill: bool = True
    """vLLM: cut long prompts into chunks."""
    load_format: str = "auto"
    """vLLM: how weights are first loaded."""
    engine_python: str | None = None
    """vLLM: the Python it runs with, such as /path/to/venv/bin/python of an environment of its own; null: this one."""
    engine_startup_s: float = Field(600.0, gt=0)
    """vLLM: how long it may take to start, or to load weights, in seconds."""
    engine_silence_s: float = Field(300.0, gt=0)
    """vLLM: how long one iteration of the engine may take, in seconds; an engine that is silent for longer is ended."""
    engine_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the engine, under its name: `engine_kwargs.vllm.kv_cache_memory_bytes=2147483648`."""
    log_prob_micro_batch_size: int | None = Field(None, ge=1)
    """Deprecated in verl: sequences of one old-log-prob forward over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one old-log-prob forward on one data-parallel rank."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut old-log-prob micro-batches by tokens; null: `actor.use_dynamic_bsz`."""
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """Most tokens of such a micro-batch per device; null: `actor.ppo_max_token_len_per_gpu`."""
    val_kwargs: ValidationSampling = ValidationSampling()


class RefConfig(Section):
    """`actor_rollout_ref.ref`: the reference log-prob pass."""

    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    log_prob_micro_batch_size: int | None = Field(None, ge=1)
    """Deprecated in verl: sequences of one reference forward over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one reference forward on one data-parallel rank."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut reference micro-batches by tokens; null: `actor.use_dynamic_bsz`."""
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """Most tokens of such a micro-batch per device; null: `actor.ppo_max_token_len_per_gpu`."""
    ulysses_sequence_parallel_size: int | None = Field(None, ge=1)
    """null: the actor's; any other value than the actor's is refused."""
    fsdp_config: FSDPConfig = FSDPConfig()


class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref`: the policy in its three roles."""

    hybrid_engine: bool = True
    """Sample on the devices that train; false: on others, `rollout.nnodes` x `rollout.n_gpus_per_node`."""
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()


# ---------------------------------------------------------------------------------------------------------- algorithm


class KLControlConfig(Section):
    """`algorithm.kl_ctrl`: weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    """Weight, or the adaptive controller's first weight."""
    horizon: int = Field(10000, ge=1)
    """adaptive: how many sequences it takes to react; more than a fifth of a step's, or the weight turns negative."""
    target_kl: float = Field(0.1, gt=0)
    """adaptive: the KL aimed at."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: dynamic sampling (DAPO)."""

    enable: bool = False
    metric: str = "score"
    """Which value must differ within a group: score, reward, a reward function's name, or a value it returns."""
    max_num_gen_batches: int = 0
    """Most generate calls of one step; 0: as many as draw the number of training prompts, one pass over them."""


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: weights and masks for the gap between sampler and trainer."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Level of truncated importance sampling; null: off."""
    rollout_is_threshold: float | str = 2.0
    """Upper bound of a weight, or `low_high`: weights outside are 0."""
    rollout_is_mode: Literal["truncate", "mask"] | None = None
    """A weight outside its bounds is held at them, or set to 0; null: one bound truncates, two mask, as in verl."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the mini-batch's tokens before rejection."""
    rollout_rs: str | None = None
    """Rejection rules, comma-separated: token, seq_sum, seq_mean or seq_max, `_`, k1, k2 or k3; or seq_veto_k1. null:
    off."""
    rollout_rs_threshold: float | str | None = None
    """Their bounds, comma-separated: for k1 `low_high` of the ratio sampler / trainer, for k2 and k3 one in nats."""
    bypass_mode: bool = False
    """Use the engine's log-probs as the ratio's denominator and skip the old-log-prob pass."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass_mode: the loss."""


class AlgorithmConfig(Section):
    """`algorithm`: from scores to advantages."""

    adv_estimator: Estimator = "grpo"
    """How scores become advantages; docs/algorithms.md lists them."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by a standard deviation; false: Dr. GRPO."""
    norm_adv_std_over: Literal["group", "batch"] = "group"
    """Whose deviation: that of the sample's group, or of all samples of the step."""
    gdpo_reward_keys: tuple[str, ...] | None = None
    """gdpo, and grpo with normalize_then_sum: reward functions that are normalised one by one; null: all."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """Their weights, in the same order; null: all 1."""
    use_kl_in_reward: bool = False
    """Subtract KL to the reference from the reward of every token."""
    kl_penalty: KLType = "kl"
    """Estimator of that KL."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    use_leave_one_out_baseline: bool = False
    """grpo: compare a sample with the mean, and scale it by the deviation, of its siblings alone (NeMo-RL)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """grpo: weigh and add several rewards before they are normalised within the group, or after (TRL)."""
    normalize_advantages: bool = False
    """rloo: whiten advantages over the samples of the step (TRL)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount over tokens."""
    lam: float = Field(1.0, ge=0, le=1)
    """verl's GAE word; no critic-free estimator reads it."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


# ------------------------------------------------------------------------------------------------------------- reward


class CustomRewardFunctionConfig(Section):
    """`custom_reward_function`: verl's way to name one reward function."""

    path: str | None = None
    """Python file; null: the built-in function of the row's data source."""
    name: str = "compute_score"
    """Function in that file."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of every call."""

    @model_validator(mode="before")
    @classmethod
    def _null_name_is_the_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name", "") is None:
            return {key: value for key, value in values.items() if key != "name"}
        return values


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer`: soft penalty near the length limit (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = False
    len: int = 0
    """Tokens before the limit in which the penalty grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Penalty at the limit."""
    capped: bool = True
    """Never more than that; false: it grows on for responses beyond the limit, as verl's does."""


class RewardModelConfig(Section):
    """`reward_model`: verl's words that matter for rule rewards."""

    enable: Literal[False] = False
    """Model-based reward; not offered."""
    reward_manager: Literal["naive", "dapo"] = "naive"
    """verl's word; both are the same here, and `overlong_buffer.enable` alone turns the buffer on."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class RewardFunctionConfig(Section):
    """One of several reward functions whose weighted sum is the score."""

    name: str
    """A built-in name, or `module:function`, or `file.py:function`."""
    weight: float = 1.0
    """Its weight in the sum."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of every call."""


class RewardConfig(Section):
    """`reward`: which functions score a response, and how their processes are run."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """Functions to sum; empty: `custom_reward_function`, else the built-in one of each row's data source."""
    num_workers: int = Field(1, ge=1)
    """Processes that score."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit of one sample; the process is killed at it."""
    retries: int = Field(2, ge=0)
    """How often a call that raised is tried again, with a growing pause."""
    clip_low: float | None = None
    """Lowest reward of a response; null: no bound."""
    clip_high: float | None = None
    """Highest reward of a response; null: no bound."""
    scale: float = 1.0
    """Factor of the clipped reward."""
    stop_properly_coef: float | None = Field(None, le=1)
    """Factor of the score of a response that was cut by its length limit; below 0: its reward instead; null: off."""
    max_error_share: float = Field(0.1, ge=0, le=1)
    """Largest share of samples without a verdict through error or time limit; above it the step stops."""


# ------------------------------------------------------------------------------------------------------------ trainer


class AlarmsConfig(Section):
    """`trainer.alarms`: measurements that are said aloud and kept in the ledger when they pass a bound; null: never."""

    rollout_probs_diff_mean: float | None = Field(0.02, gt=0)
    """Largest mean difference between the engine's and the policy's probability of a sampled token."""
    rollout_actor_probs_pearson_corr: float | None = Field(0.98, ge=-1, le=1)
    """Lowest correlation of the two."""
    first_update_log_ratio_max: float | None = Field(0.05, gt=0)
    """Largest |log ratio| of new to old probability at a step's first optimizer step: the policy has not moved."""


class TrainerConfig(Section):
    """`trainer`: how long, on what, and when to save and validate."""

    project_name: str = "grpoflow"
    """MLflow experiment, and first folder under `storage.root`."""
    experiment_name: str = "default"
    """The run's name within the project."""
    default_local_dir: str | None = None
    """The run's folder; null: `storage.root`/`project_name`/`experiment_name`."""
    seed: int = 0
    """The run's seed: prompt order and sampling seeds derive from it."""
    total_epochs: int = Field(30, ge=1)
    """Passes over the training prompts."""
    total_training_steps: int | None = Field(None, ge=1)
    """Steps to train; null: all of `total_epochs`."""
    n_gpus_per_node: int = Field(8, ge=1)
    """Devices per node. verl's default is 8: set 1 on one device, CPU included."""
    nnodes: int = Field(1, ge=1)
    """Nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    save_freq: int = -1
    """Steps between checkpoints; below 1: only the final one."""
    test_freq: int = -1
    """Steps between validations; below 1: never."""
    val_before_train: bool = True
    """Validate before the first step, logged at step 0."""
    val_only: bool = False
    """Validate and end."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto: go on with the run in this folder; disable: start a new run beside it."""
    max_actor_ckpt_to_keep: int | None = Field(None, ge=1)
    """Checkpoints kept; null: all."""
    alarms: AlarmsConfig = AlarmsConfig()
    stop_grace_s: float = Field(10.0, ge=0)
    """How long the stage in flight may take to finish after Ctrl-C or SIGTERM; a second signal ends it at once."""
    balance_batch: bool = True
    """Even out tokens over data-parallel ranks. Mini-batches always consist of whole groups."""


class RetentionConfig(Section):
    """`storage.retention`: which steps keep the rows of their artifacts. What recovery needs is always kept."""

    keep: Literal["all", "last", "every"] = "all"
    """last: the last `steps` finished steps; every: each step whose number `steps` divides."""
    steps: int = Field(10, ge=1)
    """See `keep`."""
    compress: bool = False
    """Compress what is kept and recovery does not need; it reads as before, without a memory map."""


class StorageConfig(Section):
    """`storage`: where artifacts lie, and for how long."""

    root: str = "runs"
    """Folder of all runs; or `s3://bucket/path`: runs work in copies on this machine, which are mirrored there."""
    endpoint: Address | None = None
    """URL of the object store's S3 service; null: `AWS_ENDPOINT_URL` if set, else AWS. Credentials come from the
    environment alone."""
    region: str | None = None
    """Region of the bucket; null: `AWS_REGION` if set, else us-east-1."""
    compression: Literal["none", "zstd"] = "none"
    """Compression inside artifacts' Arrow files."""
    retention: RetentionConfig = RetentionConfig()
    reuse_from: tuple[str, ...] = ()
    """Folders of other runs, or globs of them: what they have made of exactly the same things is taken over."""

    @property
    def in_object_store(self) -> bool:
        """Whether runs lie in an object store."""
        return self.root.startswith("s3:/")

    @property
    def folder(self) -> Path:
        """Folder of all runs on this machine: `root`, or that of its copies."""
        return self.place(self.root)

    def place(self, path: str) -> Path:
        """A path on this machine; that of the copy for `s3://bucket/path`.

        Raises:
            ValueError: it is no place in an object store though it looks like one.
        """
        if not path.startswith("s3:/"):
            return Path(path)
        from storage.copies import local_folder

        return local_folder(path, self.endpoint, self.region)


class TrackingConfig(Section):
    """`tracking`: MLflow."""

    enabled: bool = True
    """false: metrics stay in the run's folder alone, in each step's `step.json`."""
    uri: Address | None = None
    """MLflow tracking URI; null: a SQLite store in `storage.root`."""
    flush_timeout_s: float = Field(60.0, ge=0)
    """How long the end of a run waits for a slow server before it leaves the rest to a later command."""
    report: bool = True
    """Keep a report of the run with it, as `report.html`, and send it to MLflow. It holds prompts and responses."""


class OrchestrationConfig(Section):
    """`orchestration`: Prefect."""

    enabled: bool = True
    """false: run the same stages as plain function calls."""
    api_url: Address | None = None
    """Prefect server to use; null: `PREFECT_API_URL` if set, else one started for the runs in `storage.root`."""
    startup_timeout_s: float = Field(180.0, gt=0)
    """How long such a server may take to start."""
    tags: tuple[str, ...] = ()
    """Tags of the run's flow runs in Prefect, beside `run:<id>`."""


class RayConfig(Section):
    """`ray`: the processes of a run on several devices, one per device. On one device there is no Ray."""

    address: str | None = None
    """Ray cluster: `auto`, or host:port of its head; null: a Ray of the run's own on this machine, ending with it."""
    startup_timeout_s: float = Field(300.0, gt=0)
    """How long Ray and the ranks' processes may take to start; loading the model comes after that."""
    rank_timeout_s: float = Field(60.0, gt=0)
    """How long a rank may give no sign of life before it counts as lost; however long its work takes, it gives one."""
    collective_timeout_s: float = Field(1800.0, gt=0)
    """How long ranks wait for each other in the middle of a computation. One that answers but computes on nothing for
    this and `rank_timeout_s` together counts as lost."""


class RunConfig(Section):
    """Everything a run is made from."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray: RayConfig = RayConfig()
    storage: StorageConfig = StorageConfig()
    tracking: TrackingConfig = TrackingConfig()
    orchestration: OrchestrationConfig = OrchestrationConfig()

    @property
    def needs_ref(self) -> bool:
        """Whether a reference policy is needed: for KL in the loss or in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def sampling_devices(self) -> tuple[int, int]:
        """Nodes that sample, and devices of each."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        if self.actor_rollout_ref.hybrid_engine:
            return trainer.nnodes, trainer.n_gpus_per_node
        return rollout.nnodes, rollout.n_gpus_per_node or trainer.n_gpus_per_node

    @property
    def replica_devices(self) -> int:
        """Devices of one replica of the rollout engine."""
        rollout = self.actor_rollout_ref.rollout
        shards = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
        return shards * rollout.data_parallel_size

    def estimator_needs(self, name: str) -> bool:
        """Whether the advantage estimator reads a field of its input that not every step has."""
        return name in ESTIMATORS[self.algorithm.adv_estimator].needs

    @property
    def prompt_length(self) -> int:
        """Longest prompt in tokens."""
        return self.actor_rollout_ref.rollout.prompt_length or self.data.max_prompt_length

    @property
    def response_length(self) -> int:
        """Longest response in tokens."""
        return self.actor_rollout_ref.rollout.response_length or self.data.max_response_length
