"""verl's keys and values that are not accepted as they are, with another name here or no counterpart, and TRL's keys.

Looked at only when a key or a value is refused, so that the answer is better than "unknown". A reason says what is
missing here, then what to do instead, where there is something.
"""

from __future__ import annotations

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"

_NO_EFFECT = "has no effect here. Leave it out."
_NO_CRITIC = "a critic is not offered: advantages come from groups. Leave it out."
_NO_MEGATRON = "Megatron is not offered. Use actor.strategy=fsdp2 and its fsdp_config."
_NO_TOOLS = "tools and several turns are not offered: a response is one turn."
_NO_REWARD_MODEL = "model-based rewards are not offered. Call the model from custom_reward_function."
_NO_IMAGES = "images and other media are not offered."
_NO_PROFILER = "profilers are not offered. Stage timings are in every manifest and in MLflow (timing_s/*)."

RENAMED = {
    f"{_ACTOR}.loss_mode": f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.clip_cov_ratio": f"{_ACTOR}.policy_loss.clip_cov_ratio",
    f"{_ACTOR}.clip_cov_lb": f"{_ACTOR}.policy_loss.clip_cov_lb",
    f"{_ACTOR}.clip_cov_ub": f"{_ACTOR}.policy_loss.clip_cov_ub",
    f"{_ACTOR}.kl_cov_ratio": f"{_ACTOR}.policy_loss.kl_cov_ratio",
    f"{_ACTOR}.ppo_kl_coef": f"{_ACTOR}.policy_loss.ppo_kl_coef",
    f"{_ACTOR}.clip_ratio_lower": f"{_ACTOR}.clip_ratio_low",
    f"{_ACTOR}.clip_ratio_upper": f"{_ACTOR}.clip_ratio_high",
    f"{_ACTOR}.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_decay_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.fsdp_config.model_dtype": f"{_MODEL}.dtype",
    f"{_ACTOR}.fsdp_config.dtype": f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.fsdp_config.strategy": f"{_ACTOR}.strategy",
    f"{_MODEL}.torch_dtype": f"{_MODEL}.dtype",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.target_modules": f"{_MODEL}.target_modules",
    f"{_MODEL}.lora.exclude_modules": f"{_MODEL}.exclude_modules",
    f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
    f"{_ROLLOUT}.micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size",
    f"{_REF}.micro_batch_size": f"{_REF}.log_prob_micro_batch_size",
    "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_rs": "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_rs_threshold": "algorithm.rollout_correction.rollout_rs_threshold",
    "data.batch_size": "data.train_batch_size",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "trainer.n_gpus": "trainer.n_gpus_per_node",
}
"""A key under another name -> its name here; the value means the same."""

RENAMED_SECTIONS = {
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
    "reward.custom_reward_function": "custom_reward_function",
    "reward_model.custom_reward_function": "custom_reward_function",
}
"""A section under another name -> its name here."""

UNSUPPORTED = {
    f"{_ACTOR}.calculate_entropy": "the entropy of every token is always computed, and stored with the old log-probs.",
    f"{_ACTOR}.calculate_sum_pi_squared": _NO_EFFECT,
    f"{_ACTOR}.checkpoint": "a checkpoint always holds weights, optimizer and random state. Leave it out.",
    f"{_ACTOR}.clip_higher": f"set {_ACTOR}.clip_ratio_high.",
    f"{_ACTOR}.entropy_checkpointing": _NO_EFFECT,
    f"{_ACTOR}.entropy_from_logits_with_chunking": "entropy is always computed in chunks. Leave it out.",
    f"{_ACTOR}.freeze_vision_tower": _NO_IMAGES,
    f"{_ACTOR}.fsdp_config": "FSDP2 here has no such setting. Leave it out.",
    f"{_ACTOR}.load_weight": _NO_EFFECT,
    f"{_ACTOR}.megatron": _NO_MEGATRON,
    f"{_ACTOR}.optim.optimizer": "the optimizer is AdamW.",
    f"{_ACTOR}.optim.optimizer_impl": "the optimizer is torch's AdamW.",
    f"{_ACTOR}.optim.override_optimizer_config": "the optimizer is AdamW; its settings are beside it in optim.",
    f"{_ACTOR}.policy_loss.only_use_rollout": "set algorithm.rollout_correction.bypass_mode.",
    f"{_ACTOR}.profile": _NO_PROFILER,
    f"{_ACTOR}.profiler": _NO_PROFILER,
    f"{_ACTOR}.recompute_old_log_prob": "set algorithm.rollout_correction.bypass_mode.",
    f"{_ACTOR}.router_replay": "routing of mixture-of-experts models is not replayed.",
    f"{_ACTOR}.use_fused_kernels": _NO_EFFECT,
    f"{_ACTOR}.use_token_level_loss": f"set {_ACTOR}.loss_agg_mode=token-mean or seq-mean-token-mean.",
    f"{_ACTOR}.use_torch_compile": "the policy is not compiled. Leave it out.",
    "actor_rollout_ref.nccl_timeout": _NO_EFFECT,
    f"{_MODEL}.enable_activation_offload": "activations are not offloaded; enable_gradient_checkpointing saves memory.",
    f"{_MODEL}.external_lib": "no library is imported for a model. Leave it out.",
    f"{_MODEL}.fused_kernel_options": _NO_EFFECT,
    f"{_MODEL}.hf_config_path": "the config is read from model.path.",
    f"{_MODEL}.lora": "of LoRA, lora_rank, lora_alpha, target_modules, exclude_modules and lora_adapter_path are "
    "offered.",
    f"{_MODEL}.mtp": "multi-token prediction is not offered.",
    f"{_MODEL}.use_fused_kernels": "log-probs are always computed in chunks of tokens. Leave it out.",
    f"{_MODEL}.use_liger": _NO_EFFECT,
    f"{_MODEL}.use_shm": "weights are read from where they lie. Leave it out.",
    f"{_REF}.entropy_checkpointing": _NO_EFFECT,
    f"{_REF}.entropy_from_logits_with_chunking": _NO_EFFECT,
    f"{_REF}.load_weight": _NO_EFFECT,
    f"{_REF}.megatron": _NO_MEGATRON,
    f"{_REF}.model": "the reference is the policy as it was at the start.",
    f"{_REF}.profiler": _NO_PROFILER,
    f"{_REF}.router_replay": "routing of mixture-of-experts models is not replayed.",
    f"{_REF}.use_torch_compile": "the reference is not compiled. Leave it out.",
    f"{_ROLLOUT}.agent": "there are no agent-loop workers, so num_workers divides nothing. Leave it out.",
    f"{_ROLLOUT}.checkpoint_engine": _NO_EFFECT,
    f"{_ROLLOUT}.cudagraph_capture_sizes": _NO_EFFECT,
    f"{_ROLLOUT}.disable_log_stats": _NO_EFFECT,
    f"{_ROLLOUT}.dtype": f"the engine computes in the policy's type: set "
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype.",
    f"{_ROLLOUT}.enable_prefix_caching": "the engine's own default is kept.",
    f"{_ROLLOUT}.enable_rollout_routing_replay": "routing of mixture-of-experts models is not replayed.",
    f"{_ROLLOUT}.expert_parallel_size": "expert parallelism is not offered.",
    f"{_ROLLOUT}.layered_summon": _NO_EFFECT,
    f"{_ROLLOUT}.limit_images": _NO_IMAGES,
    f"{_ROLLOUT}.logprobs_mode": "the artifact says which log-probs it holds. Leave it out.",
    f"{_ROLLOUT}.mtp": "multi-token prediction is not offered.",
    f"{_ROLLOUT}.multi_stage_wake_up": _NO_EFFECT,
    f"{_ROLLOUT}.multi_turn": _NO_TOOLS,
    f"{_ROLLOUT}.over_sample_rate": "every response asked for is sampled to its end.",
    f"{_ROLLOUT}.profiler": _NO_PROFILER,
    f"{_ROLLOUT}.prometheus": "metrics go to MLflow. Leave it out.",
    f"{_ROLLOUT}.quantization": "the engine samples from unquantised weights.",
    f"{_ROLLOUT}.scheduling_policy": _NO_EFFECT,
    f"{_ROLLOUT}.skip_rollout": "stored rollouts are never sampled twice. Leave it out.",
    f"{_ROLLOUT}.skip_tokenizer_init": _NO_EFFECT,
    f"{_ROLLOUT}.trace": "every sample is a row of the rollouts artifact: `grpoflow show RUN --step K --sample ID`.",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": _NO_EFFECT,
    f"{_ROLLOUT}.use_fire_sampling": _NO_EFFECT,
    "algorithm.pf_ppo": "PF-PPO is not offered.",
    "algorithm.rollout_correction": "of rollout correction the keys in `grpoflow schema` are offered.",
    "algorithm.rollout_token_veto_threshold": "removed from verl. Use algorithm.rollout_correction.rollout_rs.",
    "algorithm.use_pf_ppo": "PF-PPO is not offered.",
    "critic": _NO_CRITIC,
    "data.audio_key": _NO_IMAGES,
    "data.custom_cls": "data set classes are not offered. Name the columns with prompt_key, ground_truth_key and "
    "data_source.",
    "data.datagen": "data is not generated while training.",
    "data.dataloader_num_workers": "there is no loader: the order of prompts is a pure function. Leave it out.",
    "data.filter_overlong_prompts_workers": _NO_EFFECT,
    "data.image_key": _NO_IMAGES,
    "data.image_patch_size": _NO_IMAGES,
    "data.mm_kwargs": _NO_IMAGES,
    "data.return_full_prompt": _NO_EFFECT,
    "data.return_multi_modal_inputs": _NO_IMAGES,
    "data.return_raw_chat": "the prompt as the file has it is always kept. Leave it out.",
    "data.return_raw_input_ids": "prompt ids are always kept. Leave it out.",
    "data.sampler": "the order of prompts is a pure function of (seed, epoch).",
    "data.tokenizer": "set actor_rollout_ref.model.tokenizer_path.",
    "data.tool_config_path": _NO_TOOLS,
    "data.trust_remote_code": f"set {_MODEL}.trust_remote_code.",
    "data.use_shm": "files are read from where they lie. Leave it out.",
    "data.video_key": _NO_IMAGES,
    "global_profiler": _NO_PROFILER,
    "ray_kwargs": "one process on one machine needs no Ray. Leave it out.",
    "reward_manager": "set reward_model.reward_manager.",
    "reward_model": _NO_REWARD_MODEL,
    "reward_model.launch_reward_fn_async": "rewards always run beside the log-prob passes. Leave it out.",
    "reward_model.num_workers": "set reward.num_workers.",
    "reward_model.reward_kwargs": "pass arguments with custom_reward_function.reward_kwargs.",
    "reward_model.reward_kwargs.max_resp_len": "the overlong buffer ends at data.max_response_length. Leave it out.",
    "reward_model.reward_loop_module_name": _NO_EFFECT,
    "reward_model.sandbox_fusion": "no sandbox service is offered. Call it from custom_reward_function.",
    "reward_model.use_reward_loop": _NO_EFFECT,
    "trainer.balance_batch_keep_minibatch": "mini-batches always consist of whole groups. Leave it out.",
    "trainer.critic_warmup": _NO_CRITIC,
    "trainer.default_hdfs_dir": "checkpoints stay in the run's folder.",
    "trainer.del_local_ckpt_after_load": "set trainer.max_actor_ckpt_to_keep.",
    "trainer.esi_redundant_time": "a kill at any moment loses at most the stage in flight. Leave it out.",
    "trainer.log_val_generations": "every validation response is in the run's folder. Leave it out.",
    "trainer.logger": "metrics always go to MLflow: see tracking.*. Leave it out.",
    "trainer.max_critic_ckpt_to_keep": _NO_CRITIC,
    "trainer.npu_profile": _NO_PROFILER,
    "trainer.profile_steps": _NO_PROFILER,
    "trainer.ray_wait_register_center_timeout": _NO_EFFECT,
    "trainer.remove_previous_ckpt_in_save": "set trainer.max_actor_ckpt_to_keep=1.",
    "trainer.resume_from_path": "a run goes on from its own folder: set trainer.default_local_dir.",
    "trainer.rl_logging_board_dir": "metrics go to MLflow: see tracking.*.",
    "trainer.rollout_data_dir": "every rollout is in the run's folder. Leave it out.",
    "trainer.tensorboard_dir": "metrics go to MLflow: see tracking.*.",
    "trainer.use_legacy_worker_impl": "there is one worker. Leave it out.",
    "trainer.val_generations_to_log_to_wandb": "every validation response is in the run's folder. Leave it out.",
    "trainer.validation_data_dir": "every validation response is in the run's folder. Leave it out.",
    "transfer_queue": "stages hand over through the run's folder. Leave it out.",
}
"""A key, or a section with everything in it -> why it is not offered. The longest match speaks."""

_NO_ENGINE = "this engine is not offered; vllm and transformers are."

UNSUPPORTED_VALUES = {
    (f"{_ROLLOUT}.name", "sglang"): _NO_ENGINE,
    (f"{_ROLLOUT}.name", "trtllm"): _NO_ENGINE,
    (f"{_ROLLOUT}.name", "hf"): "verl's hf engine is called transformers here.",
    (f"{_ACTOR}.strategy", "megatron"): _NO_MEGATRON,
    (f"{_REF}.strategy", "megatron"): _NO_MEGATRON,
    (f"{_ACTOR}.strategy", "veomni"): "this backend is not offered; fsdp2 is.",
    ("algorithm.adv_estimator", "gae"): _NO_CRITIC,
    ("reward_model.enable", "true"): _NO_REWARD_MODEL,
    ("reward_model.reward_manager", "prime"): "calls always run in parallel processes; naive is the same here.",
    ("reward_model.reward_manager", "batch"): "a custom_reward_function is called per sample; naive is the nearest.",
    ("reward_model.reward_manager", "collabllm"): _NO_TOOLS,
    ("trainer.resume_mode", "resume_path"): "a run goes on from its own folder: set trainer.default_local_dir.",
    ("trainer.device", "npu"): "only cpu and cuda are offered.",
}
"""(key, value) of a key that is offered, whose value verl takes and this does not -> why."""

REMOVED_VALUES = {
    (f"{_ROLLOUT}.mode", "sync"): "verl has removed it too. Leave it out, or set async.",
}
"""(key, value) that verl itself refuses by now -> why."""

TRL_KEYS = {
    "beta": f"{_ACTOR}.kl_loss_coef, with {_ACTOR}.use_kl_loss=true",
    "epsilon": f"{_ACTOR}.clip_ratio",
    "epsilon_high": f"{_ACTOR}.clip_ratio_high",
    "learning_rate": f"{_ACTOR}.optim.lr",
    "loss_type": f"{_ACTOR}.policy_loss.loss_mode and {_ACTOR}.loss_agg_mode, as docs/algorithms.md tabulates them",
    "max_completion_length": "data.max_response_length",
    "num_generations": f"{_ROLLOUT}.n",
    "num_iterations": f"{_ACTOR}.ppo_epochs",
    "per_device_train_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu, in sequences (data.train_batch_size and "
    f"{_ACTOR}.ppo_mini_batch_size count prompts)",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo and algorithm.norm_adv_std_over",
}
"""A key of TRL's GRPOConfig, which stands in no section -> the keys here."""


def renamed(key: str) -> str | None:
    """The name here of a key that is called otherwise in verl, now or formerly."""
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED_SECTIONS.items():
        if key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def unsupported_reason(key: str) -> str | None:
    """Why a key of verl's is not offered; None: verl is not known to have it."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        reason = UNSUPPORTED.get(".".join(parts[:length]))
        if reason is not None:
            return reason
    return None
