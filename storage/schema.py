"""One Arrow schema per artifact: every column's type, meaning, unit and alignment. Types never come from the data.

List columns named after tokens are aligned with `response_ids`: the same length in every row. Log-probs are natural
logarithms. Offsets are 64-bit, because a batch can pass 2^31 tokens or bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from storage.ragged import Ragged

FORMAT_VERSION = 1
"""Version of the artifact format as a whole: folder layout, manifest, schemas."""

TEXT = pa.large_string()
TOKEN_IDS = pa.large_list(pa.int32())
TOKEN_FLOATS = pa.large_list(pa.float32())
TOKEN_FLAGS = pa.large_list(pa.bool_())
PARTS = pa.map_(pa.string(), pa.float64())


def _column(name: str, kind: pa.DataType, doc: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"doc": doc})


def _schema(name: str, *columns: pa.Field) -> pa.Schema:
    return pa.schema(columns, metadata={"grpoflow.schema": f"{name}/{FORMAT_VERSION}"})


_SAMPLE = (
    _column("sample_id", TEXT, "names one response of one step"),
    _column("group_id", TEXT, "names the prompt instance it answers"),
)

SCHEMAS: dict[str, pa.Schema] = {
    "prompts": _schema(
        "prompts",
        _column("group_id", TEXT, "names this prompt in this step; two equal prompts have two"),
        _column("prompt_index", pa.int64(), "row of the prepared data set"),
        _column("data_source", TEXT, "chooses the reward function"),
        _column("prompt", TEXT, "the prompt as the file has it: JSON text of messages or of a string"),
        _column("prompt_text", TEXT, "text after the chat template"),
        _column("prompt_ids", TOKEN_IDS, "token ids given to the policy"),
        _column("ground_truth", TEXT, "reference answer: JSON text", nullable=True),
        _column("extra_info", TEXT, "the row's other columns: JSON object"),
    ),
    "rollouts": _schema(
        "rollouts",
        *_SAMPLE,
        _column("sample_index", pa.int32(), "number of the response within its group, from 0"),
        _column("response_ids", TOKEN_IDS, "token ids as sampled; the truth about the response"),
        _column("response_text", TEXT, "decoded without special tokens; lone surrogates escaped as \\udxxx"),
        _column("rollout_log_probs", TOKEN_FLOATS, "engine's log-probs of response_ids", nullable=True),
        _column("finish_reason", TEXT, "stop (end token or stop text) | length"),
        _column("seed", pa.int64(), "seed of this response's random stream"),
        _column("policy_version", pa.int64(), "policy it was sampled from"),
    ),
    "old_log_probs": _schema(
        "old_log_probs",
        *_SAMPLE,
        _column("old_log_probs", TOKEN_FLOATS, "log-probs of response_ids: the denominator of the ratio"),
        _column(
            "entropy",
            TOKEN_FLOATS,
            "entropy at each response position, nats; null: the pass was skipped",
            nullable=True,
        ),
        _column(
            "sum_pi_squared",
            TOKEN_FLOATS,
            "sum over the vocabulary of squared probabilities, if asked for",
            nullable=True,
        ),
    ),
    "ref_log_probs": _schema(
        "ref_log_probs",
        *_SAMPLE,
        _column("ref_log_probs", TOKEN_FLOATS, "log-probs of response_ids under the frozen reference policy"),
    ),
    "rewards": _schema(
        "rewards",
        *_SAMPLE,
        _column("score", pa.float64(), "weighted sum of the parts; null: no verdict", nullable=True),
        _column("status", TEXT, "ok | error | timeout | unparsed | not_applicable"),
        _column("parts", PARTS, "score by reward function; null: none for this sample"),
        _column("extracted", TEXT, "the answer that was found in the response", nullable=True),
        _column("extra", TEXT, "other values the function returned: JSON object"),
        _column("message", TEXT, "why there is no verdict", nullable=True),
        _column("seconds", pa.float32(), "time the functions took, s"),
    ),
    "advantages": _schema(
        "advantages",
        *_SAMPLE,
        _column("token_rewards", TOKEN_FLOATS, "reward of each token, after KL where KL is in the reward"),
        _column("advantages", TOKEN_FLOATS, "advantage of each token"),
        _column("returns", TOKEN_FLOATS, "return of each token"),
        _column("loss_mask", TOKEN_FLAGS, "true: the token takes part in the loss"),
        _column("group_mean", pa.float64(), "mean score of the group's verdicts", nullable=True),
        _column("group_std", pa.float64(), "standard deviation (ddof 1) of the group's verdicts", nullable=True),
        _column("rollout_is_weights", TOKEN_FLOATS, "importance weights of rollout correction", nullable=True),
        _column("no_signal", TEXT, "why this sample teaches nothing; null: it does", nullable=True),
    ),
    "updates": _schema(
        "updates",
        _column("update_index", pa.int32(), "number of the optimizer step within the step, from 0"),
        _column("epoch", pa.int32(), "pass over the step's mini-batches, from 0"),
        _column("sequences", pa.int64(), "sequences of the mini-batch, all ranks"),
        _column("tokens", pa.int64(), "response tokens in the loss, all ranks"),
        _column("micro_batches", pa.int32(), "forward/backward passes on this rank"),
        _column("loss", pa.float64(), "what was differentiated; null, as all that follow: skipped", nullable=True),
        _column("pg_loss", pa.float64(), "policy loss", nullable=True),
        _column("pg_clipfrac", pa.float64(), "share of tokens whose ratio was clipped", nullable=True),
        _column("pg_clipfrac_lower", pa.float64(), "share of tokens held by the dual clip", nullable=True),
        _column("ppo_kl", pa.float64(), "mean of old minus new log-prob, nats", nullable=True),
        _column("ratio_max", pa.float64(), "largest ratio of new to old probability", nullable=True),
        _column("log_ratio_max", pa.float64(), "largest |log ratio| of new to old probability", nullable=True),
        _column("kl_loss", pa.float64(), "KL to the reference before its weight", nullable=True),
        _column("kl_clamped", pa.int64(), "tokens whose KL was held at its bound", nullable=True),
        _column("entropy", pa.float64(), "mean entropy, nats; null: not computed", nullable=True),
        _column("grad_norm", pa.float64(), "gradient norm before clipping", nullable=True),
        _column("lr", pa.float64(), "learning rate used"),
        _column("skipped", TEXT, "why no optimizer step was made; null: it was", nullable=True),
        _column("seconds", pa.float32(), "time of this optimizer step, s"),
        _column("policy_version_in", pa.int64(), "policy before the step"),
        _column("policy_version_out", pa.int64(), "policy after the step"),
        _column("weights_digest", TEXT, "SHA-256 of the weights after the last optimizer step", nullable=True),
    ),
}

KIND = {
    "greedy_rollouts": "rollouts",
    "greedy_rewards": "rewards",
    "val_prompts": "prompts",
    "val_rollouts": "rollouts",
    "val_rewards": "rewards",
}
"""Artifacts that share another one's schema."""

_ROUND = re.compile(r"-[0-9]{2,}$")


def round_of(stage: str, number: int) -> str:
    """Name of the artifact of one generate call out of several: `rollouts-02`. It has the schema of `rollouts`."""
    return f"{stage}-{number:02d}"


def without_round(stage: str) -> str:
    """`rollouts` of `rollouts-02`."""
    return _ROUND.sub("", stage)


def schema_of(stage: str) -> pa.Schema:
    """The schema of an artifact by its name.

    Raises:
        ValueError: no such artifact.
    """
    try:
        whole = without_round(stage)
        return SCHEMAS[KIND.get(whole, whole)]
    except KeyError:
        known = ", ".join([*SCHEMAS, *KIND])
        raise ValueError(f"no artifact is called {stage!r}; there are {known}") from None


def build_table(stage: str, columns: Mapping[str, Any]) -> pa.Table:
    """Make an artifact's table from lists, NumPy arrays, Ragged rows or Arrow arrays.

    Raises:
        ValueError: a column is missing, unknown, of the wrong type, of another length, or null where it may not be.
    """
    schema = schema_of(stage)
    if set(columns) != set(schema.names):
        missing, unknown = set(schema.names) - set(columns), set(columns) - set(schema.names)
        raise ValueError(f"artifact {stage}: missing columns {sorted(missing)}, unknown columns {sorted(unknown)}")
    arrays = [_array(stage, field, columns[field.name]) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(stage: str, field: pa.Field, value: Any) -> pa.Array | pa.ChunkedArray:
    try:
        if isinstance(value, Ragged):
            array = value.to_arrow().cast(field.type)
        elif isinstance(value, pa.Array | pa.ChunkedArray):
            array = value.cast(field.type)
        elif isinstance(value, np.ndarray):
            array = pa.array(value, type=field.type, from_pandas=False)
        else:
            rows = [escape_surrogates(row) for row in value] if field.type == TEXT else list(value)
            array = pa.array(rows, type=field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise ValueError(f"artifact {stage}, column {field.name} of type {field.type}: {error}") from error
    if array.null_count and not field.nullable:
        raise ValueError(f"artifact {stage}, column {field.name} holds {array.null_count} nulls but may hold none")
    return array


_SURROGATE = re.compile("[\ud800-\udfff]")


def escape_surrogates(text: str | None) -> str | None:
    r"""Replace each lone surrogate, which Arrow cannot hold, by its six-character escape `\udxxx`."""
    if text is None or text.isascii() or not _SURROGATE.search(text):
        return text
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
