"""The rules of the algorithm: estimators, losses, filtered groups, rollout correction and rewards that cannot do what
their settings say are refused before a load. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.algorithms.correction_rules import loss_mode, parse_band, parse_rules
from tasks.algorithms.variants import ESTIMATORS
from tasks.config import MOST_REWARD, RolloutConfig, RolloutCorrectionConfig, RunConfig
from tasks.geometry.numbers import Facts, Numbers
from tasks.geometry.problems import Draft, Rule, Try
from tasks.geometry.shape_rules import ACTOR, ROLLOUT, SAMPLES, TRAIN_BATCH, samples_try

CORRECTION = "algorithm.rollout_correction"
FILTER = "algorithm.filter_groups"
STANDARD_METRICS = ("score", "reward", "seq_reward", "seq_final_reward")
"""What `algorithm.filter_groups.metric` may name whatever the reward functions are."""
RETURNED_VALUES = {"math_dapo": ("acc",)}
"""Numbers that built-in reward functions return beside their scores."""
BELOW_ZERO = ("math_dapo", "repetition", "length")
"""Built-in reward functions whose scores may lie below 0."""
KL_CTRL = "algorithm.kl_ctrl"


def loss_in_force(cfg: RunConfig) -> str:
    """Name of the policy loss that is trained on."""
    return loss_mode(cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction)


def reward_names(cfg: RunConfig) -> tuple[str, ...] | None:
    """Names of the configured reward functions, as the reward stage keeps their parts; None: each row has the built-in
    function of its data source."""
    if cfg.custom_reward_function.path is not None:
        return (cfg.custom_reward_function.name,)
    if not cfg.reward.functions:
        return None
    seen: dict[str, int] = {}
    names = []
    for function in cfg.reward.functions:
        name = function.name.rpartition(":")[2]
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(names)


def normalised_one_by_one(cfg: RunConfig) -> str | None:
    """The setting by which each reward function's values are normalised by themselves; None: only their sum is."""
    name, mode = cfg.algorithm.adv_estimator, cfg.algorithm.multi_objective_aggregation
    if "reward_parts" in ESTIMATORS[name].needs:
        return f"algorithm.adv_estimator={name}"
    if mode == "normalize_then_sum" and "multi_objective_aggregation" in ESTIMATORS[name].reads:
        return f"algorithm.multi_objective_aggregation={mode}"
    return None


def users_of_rollout_log_probs(cfg: RunConfig) -> list[str]:
    """Keys of rollout correction that are on: each reads the engine's log-probs."""
    correction = cfg.algorithm.rollout_correction
    return [
        f"{CORRECTION}.{name}"
        for name, on in (
            ("bypass_mode", correction.bypass_mode),
            ("rollout_is", correction.rollout_is),
            ("rollout_rs", correction.rollout_rs),
        )
        if on
    ]


# ------------------------------------------------------------------------------------------------------------- groups


def _check_groups(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    estimator, n = cfg.algorithm.adv_estimator, numbers.samples_per_prompt
    if ESTIMATORS[estimator].relative and n < 2:
        alone = [name for name, variant in ESTIMATORS.items() if not variant.relative]
        yield Draft(
            "GROUP_OF_ONE",
            (SAMPLES, "algorithm.adv_estimator"),
            f"algorithm.adv_estimator={estimator} compares a response with others of its prompt, and {SAMPLES}=1 "
            "leaves none (verl then takes the raw reward for the advantage). "
            f"{' and '.join(alone)} {'works' if len(alone) == 1 else 'work'} with one.",
            f"{SAMPLES} {n} must be >= 2",
            (samples_try(numbers),),
        )
    rollout = cfg.actor_rollout_ref.rollout
    if n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        cause = f"{ROLLOUT}.temperature=0" if rollout.temperature == 0 else f"{ROLLOUT}.do_sample=false"
        yield Draft(
            "GREEDY_GROUP",
            (f"{ROLLOUT}.temperature" if rollout.temperature == 0 else f"{ROLLOUT}.do_sample", SAMPLES),
            f"{cause} samples greedily, so the {n} responses of a prompt are identical and no group has a signal. Set "
            f"{ROLLOUT}.do_sample=true and a temperature above 0.",
            f"{SAMPLES} {n} > 1 needs do_sample=true and temperature > 0",
        )


def _check_filtered_groups(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    filtered, n = cfg.algorithm.filter_groups, numbers.samples_per_prompt
    if not filtered.enable:
        return
    if n < 2:
        yield Draft(
            "FILTER_GROUP_OF_ONE",
            (f"{FILTER}.enable", SAMPLES),
            f"{FILTER}.enable=true keeps groups whose responses differ in {filtered.metric}, and with {SAMPLES}=1 no "
            f"group can (verl keeps all of them). Set {FILTER}.enable=false, or sample more responses.",
            f"{SAMPLES} {n} must be >= 2",
            (samples_try(numbers),),
        )
    if filtered.max_num_gen_batches < 0:
        key, most = f"{FILTER}.max_num_gen_batches", filtered.max_num_gen_batches
        yield Draft(
            "FILTER_MOST",
            (key,),
            f"{key}={most} is no number of generate calls. 0 means one pass over the training prompts.",
            f"{most} must be >= 0",
            (Try(key, most, (), (0,)),),
        )
    known = _filter_metrics(cfg)
    if known is not None and filtered.metric not in known:
        yield Draft(
            "FILTER_METRIC",
            (f"{FILTER}.metric", "reward.functions"),
            f"{FILTER}.metric={filtered.metric} names no value of a response. Use one of {', '.join(known)}, or add a "
            "reward function of that name.",
            f"{filtered.metric} must be one of them",
        )


def _filter_metrics(cfg: RunConfig) -> tuple[str, ...] | None:
    """What groups can be filtered by; None: unknown, for a user's own function may return values of any name."""
    names = reward_names(cfg)
    own = cfg.custom_reward_function.path is not None or any(":" in one.name for one in cfg.reward.functions)
    if names is None or own:
        return None
    returned = (value for one in cfg.reward.functions for value in RETURNED_VALUES.get(one.name, ()))
    return tuple(dict.fromkeys((*STANDARD_METRICS, *returned, *names)))


# ------------------------------------------------------------------------------------------------------------ rewards


def _check_reward_parts(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    algorithm, known = cfg.algorithm, reward_names(cfg)
    by = normalised_one_by_one(cfg)
    if by is None:
        return
    shaped = (
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward),
        ("reward_model.overlong_buffer.enable", cfg.reward_model.overlong_buffer.enable),
        ("reward.clip_low", cfg.reward.clip_low is not None),
        ("reward.clip_high", cfg.reward.clip_high is not None),
        ("reward.scale", cfg.reward.scale != 1),
        ("reward.stop_properly_coef", cfg.reward.stop_properly_coef is not None),
    )
    if lost := [key for key, on in shaped if on]:
        yield Draft(
            "REWARD_PARTS",
            (*lost, "algorithm.adv_estimator"),
            f"{by} normalises what each reward function returned, so {', '.join(lost)} would change nothing. Leave it "
            "out, make it a reward function, or use an estimator of the whole reward.",
            f"{by} takes no shaped reward",
        )
    keys_key, weights_key = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    unknown = [name for name in keys or () if known is not None and name not in known]
    if unknown:
        yield Draft(
            "GDPO_KEYS",
            (keys_key, "reward.functions"),
            f"{keys_key} names {', '.join(unknown)}, but the reward functions are {', '.join(known or ())}. Name some "
            "of them, or leave the key out for all of them.",
            f"{', '.join(unknown)} must be among {', '.join(known or ())}",
        )
    if keys and len(set(keys)) < len(keys):
        yield Draft(
            "GDPO_KEYS_TWICE",
            (keys_key,),
            f"{keys_key} names {', '.join(sorted({key for key in keys if keys.count(key) > 1}))} more than once. Name "
            f"each function once; {weights_key} weighs it.",
            "no name may be repeated",
        )
    if weights and not any(weights):
        yield Draft(
            "GDPO_WEIGHTS_ZERO",
            (weights_key,),
            f"the weights in {weights_key} are all 0, so every advantage is 0. Give one another value, or leave the "
            "key out for weights of 1.",
            "one weight must not be 0",
        )
    names = keys or known
    if weights and names is None:
        yield Draft(
            "GDPO_WEIGHTS",
            (weights_key, keys_key),
            f"{weights_key} weighs functions in order, but each row has the built-in one of its data source, and a "
            f"step need not have rows of each. Name them in {keys_key}.",
            f"{weights_key} needs {keys_key} or reward.functions",
        )
    if weights and names is not None and len(weights) != len(names):
        named = keys_key if keys else "reward functions"
        yield Draft(
            "GDPO_WEIGHTS",
            (weights_key, keys_key),
            f"{weights_key} has {len(weights)} weights for the {len(names)} of {named}: {', '.join(names)}. Give one "
            "weight for each, or leave the key out for weights of 1.",
            f"{len(weights)} must be {len(names)}",
        )


def _check_reward_shaping(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    low, high = cfg.reward.clip_low, cfg.reward.clip_high
    if low is not None and high is not None and low >= high:
        yield Draft(
            "REWARD_BOUNDS",
            ("reward.clip_low", "reward.clip_high"),
            f"reward.clip_low={low:g} is not below reward.clip_high={high:g}, so no two rewards can differ. Exchange "
            "them, or set one to null.",
            f"{low:g} must be < {high:g}",
        )
    if cfg.reward.scale == 0:
        yield Draft(
            "REWARD_SCALE",
            ("reward.scale",),
            "reward.scale=0 makes every reward 0. Leave it out for rewards as they are.",
            "reward.scale must not be 0",
        )
    if abs(cfg.reward.scale) > MOST_REWARD:
        yield Draft(
            "REWARD_SCALE_BEYOND_FLOAT32",
            ("reward.scale",),
            f"reward.scale={cfg.reward.scale:g} makes rewards whose differences float32 does not hold. Set it nearer "
            "to 0: most estimators divide by a deviation, so that the scale of rewards is lost anyway.",
            f"{abs(cfg.reward.scale):g} must be <= {MOST_REWARD:g}",
        )


# ------------------------------------------------------------------------------------------------------------------ KL


def _check_kl(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    actor, control, in_reward = cfg.actor_rollout_ref.actor, cfg.algorithm.kl_ctrl, cfg.algorithm.use_kl_in_reward
    weights = (
        (f"{ACTOR}.kl_loss_coef", actor.kl_loss_coef, actor.use_kl_loss),
        (f"{KL_CTRL}.kl_coef", control.kl_coef, in_reward),
        (f"{ACTOR}.policy_loss.ppo_kl_coef", actor.policy_loss.ppo_kl_coef, loss_in_force(cfg) == "kl_cov"),
    )
    for key, value, used in weights:
        if used and value < 0:
            yield Draft(
                "KL_WEIGHT",
                (key,),
                f"{key}={value:g} rewards the policy for moving away. Set it to 0 or above.",
                f"{value:g} must be >= 0",
            )
    if not in_reward or control.type != "adaptive":
        return
    if control.kl_coef == 0:
        yield Draft(
            "KL_ADAPTIVE_ZERO",
            (f"{KL_CTRL}.kl_coef", f"{KL_CTRL}.type"),
            f"{KL_CTRL}.type=adaptive multiplies the weight after each step, and {KL_CTRL}.kl_coef=0 stays 0. Set "
            "kl_coef above 0, or algorithm.use_kl_in_reward=false.",
            f"{KL_CTRL}.kl_coef must be > 0",
        )
    sequences, key = numbers.sequences_per_step, f"{KL_CTRL}.horizon"
    if 5 * control.horizon <= sequences:
        yield Draft(
            "KL_HORIZON",
            (key, TRAIN_BATCH, SAMPLES),
            f"{KL_CTRL}.type=adaptive multiplies the weight by as little as 1 - 0.2 * {sequences} sequences / "
            f"{key}={control.horizon} after a step, which is not above 0: KL would then be rewarded.",
            f"5 * {control.horizon} must be > {sequences}",
            (Try(key, control.horizon, (), (sequences // 5 + 1,)),),
        )


# ---------------------------------------------------------------------------------------- rollout correction and losses


def _check_rollout_correction(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    correction, used = cfg.algorithm.rollout_correction, users_of_rollout_log_probs(cfg)
    key = f"{ROLLOUT}.calculate_log_probs"
    if used and not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        yield Draft(
            "ROLLOUT_LOG_PROBS",
            (key, *used),
            f"{' and '.join(used)} reads the engine's log-probs, which {key}=false does not keep. Set it to true.",
            "rollout correction needs rollout_log_probs",
        )
    if used and _behind_filters(cfg.actor_rollout_ref.rollout):
        keys = tuple(f"{ROLLOUT}.{name}" for name in ("temperature", "top_p", "top_k"))
        yield Draft(
            "ROLLOUT_LOG_PROBS_FILTERED",
            (*keys, *used),
            f"{' and '.join(used)} compares the engine's log-probs with ours, but at a temperature other than 1 "
            "vLLM can only say those after top_p and top_k. Set temperature to 1, or top_p=1 and top_k=-1.",
            "log-probs of the same distribution on both sides",
        )
    if correction.rollout_is is not None and (fault := _fault_of_band(correction)) is not None:
        yield Draft(
            "ROLLOUT_IS_THRESHOLD",
            (f"{CORRECTION}.rollout_is_threshold",),
            f"{fault}.",
            "one upper bound above 0, or low_high with 0 < low <= 1 <= high",
        )
    if correction.rollout_rs is not None and (fault := _fault_of_rules(correction)) is not None:
        yield Draft(
            "ROLLOUT_RS",
            (f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"),
            f"{fault}.",
            "rules that there are, and one bound for each or one for all: for k1 low_high with low <= 1 <= high or one "
            "ratio, for k2 and k3 one in nats",
        )


def _behind_filters(rollout: RolloutConfig) -> bool:
    """Whether the engine's log-probs are of the distribution that is left after top-p and top-k."""
    filtered = rollout.top_p < 1 or rollout.top_k > 0
    return rollout.name == "vllm" and rollout.do_sample and rollout.temperature not in (0, 1) and filtered


def _fault_of_band(correction: RolloutCorrectionConfig) -> str | None:
    """What is wrong with the bounds of importance weights; None: nothing. One bound below 1 that truncates is legal."""
    try:
        band = parse_band(correction.rollout_is_threshold, correction.rollout_is_mode)
    except ValueError as error:
        return str(error)
    if (band.low or 0) > 1 or (band.high < 1 and (band.masks or band.low is not None)):
        effect = "sets to 0" if band.masks else "changes"
        return (
            f"{CORRECTION}.rollout_is_threshold={correction.rollout_is_threshold} leaves out 1, the weight where "
            f"sampler and policy agree, and so {effect} every weight that is as it should be"
        )
    return None


def _fault_of_rules(correction: RolloutCorrectionConfig) -> str | None:
    """What is wrong with the rejection rules; None: nothing."""
    assert correction.rollout_rs is not None
    try:
        rules = parse_rules(correction.rollout_rs, correction.rollout_rs_threshold)
    except ValueError as error:
        return str(error)
    for rule in rules:
        if (rule.low or 0) > 0 or rule.high < 0:
            return (
                f"{CORRECTION}.rollout_rs_threshold={correction.rollout_rs_threshold} for {rule.name} leaves out 1, "
                "the ratio where sampler and policy agree, and so rejects exactly what is as it should be"
            )
    return None


def _check_token_baseline(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    if cfg.algorithm.rollout_correction.bypass_mode and cfg.estimator_needs("sum_pi_squared"):
        estimator = cfg.algorithm.adv_estimator
        yield Draft(
            "TOKEN_BASELINE_IN_BYPASS",
            (f"{CORRECTION}.bypass_mode", "algorithm.adv_estimator"),
            f"algorithm.adv_estimator={estimator} reads squared probabilities of the old log-prob pass, which "
            f"{CORRECTION}.bypass_mode=true skips. Set it to false, or use another estimator.",
            f"{estimator} needs bypass_mode=false",
        )


def _check_loss(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    loss, settings, where = loss_in_force(cfg), cfg.actor_rollout_ref.actor.policy_loss, f"{ACTOR}.policy_loss"
    if loss == "dro" and settings.dro_beta is None:
        key = f"{where}.dro_beta"
        yield Draft("DRO_BETA", (key,), f"policy_loss.loss_mode=dro needs {key}, such as 0.1.", f"{key} must be > 0")
    low, high = settings.clip_cov_lb, settings.clip_cov_ub
    if loss == "clip_cov" and low >= high:
        yield Draft(
            "CLIP_COV_BOUNDS",
            (f"{where}.clip_cov_lb", f"{where}.clip_cov_ub"),
            f"{where}.clip_cov_lb={low:g} is not below clip_cov_ub={high:g}, so no token lies between them and none is "
            "selected. Exchange them, or set loss_mode=vanilla.",
            f"{low:g} must be < {high:g}",
        )


ALGORITHM_RULES: tuple[Rule, ...] = (
    _check_groups,
    _check_filtered_groups,
    _check_reward_parts,
    _check_reward_shaping,
    _check_kl,
    _check_rollout_correction,
    _check_token_baseline,
    _check_loss,
)
