"""The rules of lengths, data and validation: what cannot make a step is refused before a load. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.config import RunConfig
from tasks.geometry.numbers import Facts, Numbers
from tasks.geometry.problems import Draft, Rule, Try
from tasks.geometry.shape_rules import GEN_BATCH, ROLLOUT, TRAIN_BATCH

# ------------------------------------------------------------------------------------------------ lengths and data


def _check_lengths(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    engine, longest = cfg.actor_rollout_ref.rollout.prompt_length, cfg.data.max_prompt_length
    key, total = f"{ROLLOUT}.prompt_length", numbers.padded_sequence_tokens
    if engine is not None and engine < longest:
        yield Draft(
            "PROMPT_LENGTH",
            (key, "data.max_prompt_length"),
            f"{key}={engine} is shorter than data.max_prompt_length={longest}: prompts between the two would pass the "
            "data set's filter and not fit the engine.",
            f"{engine} must be >= {longest}",
            (Try(key, engine, (), (longest,)), Try("data.max_prompt_length", longest, (engine,))),
        )
    context_key, context = f"{ROLLOUT}.max_model_len", cfg.actor_rollout_ref.rollout.max_model_len
    if context is not None and total > context:
        yield _context_draft("CONTEXT", numbers, context_key, context, (Try(context_key, context, (), (total,)),), cfg)
    limit = facts.model.max_position_embeddings
    if limit is not None and total > limit:
        yield _context_draft("MODEL_CONTEXT", numbers, "the model's max_position_embeddings", limit, (), cfg)
    if limit is not None and context is not None and context > limit:
        yield Draft(
            "ENGINE_CONTEXT",
            (context_key,),
            f"{context_key}={context} is more than the model's max_position_embeddings {limit}.",
            f"{context} must be <= {limit}",
            (Try(context_key, context, (limit,)),),
        )


def _context_draft(code: str, numbers: Numbers, what: str, limit: int, tries: tuple[Try, ...], cfg: RunConfig) -> Draft:
    """Prompt and response that do not fit a context together."""
    prompt, response = numbers.prompt_length, numbers.response_length
    rollout = cfg.actor_rollout_ref.rollout
    prompt_key = f"{ROLLOUT}.prompt_length" if rollout.prompt_length else "data.max_prompt_length"
    response_key = f"{ROLLOUT}.response_length" if rollout.response_length else "data.max_response_length"
    return Draft(
        code,
        (response_key, prompt_key, f"{ROLLOUT}.max_model_len"),
        f"a prompt of {prompt} and a response of {response} tokens do not fit {what}={limit} together.",
        f"{prompt} + {response} = {prompt + response} must be <= {limit}",
        (
            *tries,
            Try(response_key, response, (limit - prompt,) if limit > prompt else ()),
            Try(prompt_key, prompt, (limit - response,) if limit > response else ()),
        ),
    )


def _check_overlong_buffer(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    buffer, key = cfg.reward_model.overlong_buffer, "reward_model.overlong_buffer.len"
    if buffer.enable and not 0 < buffer.len <= numbers.response_length:
        yield Draft(
            "OVERLONG_BUFFER",
            (key, "data.max_response_length"),
            f"{key}={buffer.len} must lie within the response of at most {numbers.response_length} tokens whose end "
            "it penalises.",
            f"0 < {buffer.len} <= {numbers.response_length}",
            (
                Try(
                    key,
                    buffer.len,
                    (numbers.response_length,) if buffer.len > 0 else (),
                    (1,) if buffer.len < 1 else (),
                ),
            ),
        )


def _check_data_size(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    rows = numbers.train_prompts
    needed = max(numbers.prompts_per_step, numbers.gen_batch_prompts)
    if rows is not None and rows < needed:
        key = TRAIN_BATCH if needed == cfg.data.train_batch_size else GEN_BATCH
        yield Draft(
            "DATA_TOO_SMALL",
            (key, "data.train_files", "data.train_max_samples"),
            f"{rows} training prompts are fewer than the {needed} of one batch, so an epoch has no step.",
            f"{rows} >= {needed}",
            (Try(key, needed, range(rows, 0, -1)),),
        )
    if cfg.trainer.val_only and not cfg.data.val_files:
        yield Draft(
            "NOTHING_TO_VALIDATE",
            ("data.val_files", "trainer.val_only"),
            "trainer.val_only=true validates and ends, but data.val_files names no file.",
            "validation needs data.val_files",
        )
    if cfg.data.val_files and numbers.val_prompts == 0:
        yield Draft(
            "NO_VAL_PROMPTS",
            ("data.val_files", "data.val_max_samples"),
            "data.val_files leaves 0 validation prompts. Leave it empty to train without validation.",
            "0 > 0",
        )


# ----------------------------------------------------------------------------------------------------------- sampling


def _check_validation_sampling(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    val, where = cfg.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if val.do_sample and val.temperature == 0:
        yield Draft(
            "VAL_TEMPERATURE",
            (f"{where}.temperature", f"{where}.do_sample"),
            f"{where}.do_sample=true asks for sampling and {where}.temperature=0 for greedy. Set a temperature above "
            "0, or do_sample=false.",
            "do_sample=true needs temperature > 0",
        )


CONTENT_RULES: tuple[Rule, ...] = (
    _check_lengths,
    _check_overlong_buffer,
    _check_data_size,
    _check_validation_sampling,
)
