"""The prompt source: files of prompts as token ids, and their order as a pure function of (seed, epoch).

Rows are read in verl's form (`prompt`, `data_source`, `reward_model{ground_truth}`, `extra_info`, …), in TRL's
(`prompt` and columns), or under other names by `data.prompt_key` and `data.ground_truth_key`. The chat template is
applied once, here; later stages read token ids.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import Ragged, build_table
from storage.durable import sha256_file, sha256_json
from storage.schema import escape_surrogates
from tasks.config import DataConfig, RunConfig
from tasks.json_values import json_text, jsonable
from tasks.seeds import hashed

logger = logging.getLogger(__name__)

BATCH_ROWS = 2_000
"""Rows that are read, templated and tokenised together."""
ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
"""Where the reference answer is looked for when the row has no `reward_model.ground_truth`."""
EXAMPLES_SHOWN = 3


class DataError(ValueError):
    """The files cannot give the prompts that the configuration asks for."""


@dataclass(frozen=True)
class SourceFile:
    """A file of prompts as it was read."""

    path: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class PreparedPrompts:
    """All prompts of a run, ready to be drawn from.

    Attributes:
        table: one row per prompt: the columns of the `prompts` artifact without `group_id`.
        counts: rows by what became of them: `read` (of those that `data.train_max_samples` allows); `filtered_overlong`
            and `filtered_no_room` were dropped, in this order; `cut` were shortened; `kept` are in the table.
        files: what was read.
        digest: SHA-256 over the files' content, what was done with it, and the token ids that came out.
        rows: [prompts] which row of the files each prompt is, counted over all files in their order; None: not known.
    """

    table: pa.Table
    counts: dict[str, int]
    files: tuple[SourceFile, ...]
    digest: str
    rows: np.ndarray | None = None


def prepare_prompts(cfg: RunConfig, which: Literal["train", "val"], tokenizer: Any) -> PreparedPrompts:
    """Read, template, tokenise and filter the prompts of `data.train_files` or `data.val_files`.

    A prompt is over-long above `data.max_prompt_length` (or `rollout.prompt_length`, if that is less). It is dropped
    with `data.filter_overlong_prompts`; else `data.truncation` refuses the data or cuts it: `left` keeps the end,
    `right` the start, `middle` both ends. A prompt that leaves the model's context no room for one token is always
    dropped. The counts go to the log.

    Raises:
        DataError: no files, a file or column that is not there, an empty prompt, over-long prompts with
            `truncation=error`, or fewer prompts left than make a step (training) or none (validation).
    """
    paths = cfg.data.train_files if which == "train" else cfg.data.val_files
    if not paths:
        raise DataError(f"data.{which}_files names no files of prompts.")
    limit = cfg.data.train_max_samples if which == "train" else cfg.data.val_max_samples
    collected = _Collected(cfg, tokenizer, _context_tokens(cfg))
    rows = _read_files(paths, f"data.{which}_files", collected.rows_of_file)
    wanted = rows if limit < 0 else islice(rows, limit)  # the first ones, in file order
    while batch := list(islice(wanted, BATCH_ROWS)):
        collected.add(batch)
    return _finished(collected, which)


def prompt_order(seed: int, epoch: int, rows: int, shuffle: bool) -> np.ndarray:
    """[rows] int64 row numbers in the order in which an epoch takes them.

    Rows are sorted by the raw words of a Philox stream that is keyed by (seed, epoch): the stream is fixed by its paper
    (Salmon et al., SC 2011), so that no version of NumPy can change the order, as it may with `shuffle`.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    words = np.random.Philox(key=hashed("prompt order", seed, epoch)).random_raw(rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def steps_per_epoch(rows: int, train_batch_size: int) -> int:
    """Whole steps of an epoch; the prompts left over are not used in it, as in verl."""
    return rows // train_batch_size


def step_rows(step: int, rows: int, train_batch_size: int, seed: int, shuffle: bool) -> tuple[int, np.ndarray]:
    """The epoch of a training step, from 0, and the rows of the data set it takes: no loader state is needed.

    Args:
        step: number of the step, from 1.
        rows: rows of the data set.

    Raises:
        DataError: the data set does not fill a step.
    """
    per_epoch = steps_per_epoch(rows, train_batch_size)
    if step < 1 or per_epoch < 1:
        raise DataError(f"step {step} of {rows} prompts with data.train_batch_size={train_batch_size} has no prompts")
    epoch, place = divmod(step - 1, per_epoch)
    start = place * train_batch_size
    return epoch, prompt_order(seed, epoch, rows, shuffle)[start : start + train_batch_size]


@dataclass
class _Row:
    """A row of a file, in our words."""

    where: str
    prompt: Any
    data_source: str
    ground_truth: str | None
    extra_info: str


@dataclass
class _Collected:
    """What has been read and tokenised so far."""

    cfg: RunConfig
    tokenizer: Any
    context_tokens: int | None
    rows_of_file: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("read", "filtered_overlong", "filtered_no_room", "cut", "kept"), 0)
    )
    overlong: list[tuple[str, int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {
            name: []
            for name in ("prompt_index", "data_source", "prompt", "prompt_text", "ground_truth", "extra_info", "ids")
        }
    )

    @property
    def longest(self) -> int:
        """Tokens that a prompt may have."""
        return min(self.cfg.data.max_prompt_length, self.cfg.prompt_length)

    def add(self, batch: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Tokenise a batch of rows and keep those that pass the filters."""
        rows = [_parse(where, row, self.cfg.data) for where, row in batch]
        texts = _texts(rows, self.cfg.data, self.tokenizer)
        all_ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        first = self.counts["read"]
        self.counts["read"] += len(rows)
        for number, (row, text, ids) in enumerate(zip(rows, texts, all_ids, strict=True), first):
            self._keep(number, row, text, ids)

    def _keep(self, number: int, row: _Row, text: str, ids: list[int]) -> None:
        if not ids:
            raise DataError(f"{row.where} has an empty prompt: nothing to generate from. Remove the row.")
        if len(ids) > self.longest:
            if self.cfg.data.filter_overlong_prompts:
                self.counts["filtered_overlong"] += 1
                return
            if self.cfg.data.truncation == "error":
                self.overlong.append((row.where, len(ids)))
                return
            ids = cut(ids, self.longest, self.cfg.data.truncation)
            text = self.tokenizer.decode(ids)
            self.counts["cut"] += 1
        if self.context_tokens is not None and len(ids) >= self.context_tokens:
            self.counts["filtered_no_room"] += 1
            return
        index = self.counts["kept"]
        self.counts["kept"] += 1
        self.rows.append(number)
        values = (index, row.data_source, json_text(row.prompt), text, row.ground_truth, row.extra_info)
        for name, value in zip(self.columns, (*values, np.asarray(ids, dtype=np.int32)), strict=True):
            self.columns[name].append(value)


def cut(ids: list[int], length: int, truncation: str) -> list[int]:
    """Shorten a prompt to `length` tokens: `left` drops its start, `right` its end, `middle` what is between."""
    if truncation == "left":
        return ids[-length:]
    if truncation == "right":
        return ids[:length]
    start = length // 2
    return ids[:start] + ids[start - length :]


def _finished(collected: _Collected, which: Literal["train", "val"]) -> PreparedPrompts:
    counts, cfg = collected.counts, collected.cfg
    _refuse_overlong(collected, which)
    least = cfg.data.train_batch_size if which == "train" else 1
    if counts["kept"] < least:
        need = f"data.train_batch_size={least}" if which == "train" else "validation"
        raise DataError(
            f"{which} data: {counts['kept']} prompts are left, too few for {need}. {_story(counts, collected)}. "
            f"Add data, raise data.max_prompt_length, or lower data.train_batch_size."
        )
    logger.info("%s data: %s", which, _story(counts, collected))
    columns: dict[str, Any] = dict(collected.columns)
    ids = Ragged.from_rows(columns.pop("ids"), np.int32)
    columns |= {"prompt_ids": ids, "group_id": [""] * counts["kept"]}
    table = build_table("prompts", columns).drop_columns(["group_id"])
    files = tuple(
        SourceFile(path, rows, sha256_file(Path(path).expanduser())) for path, rows in collected.rows_of_file.items()
    )
    digest = _digest(files, ids, cfg.data, collected)
    return PreparedPrompts(table, dict(counts), files, digest, np.asarray(collected.rows, dtype=np.int64))


def _story(counts: Mapping[str, int], collected: _Collected) -> str:
    """The counts before and after each filter, as a sentence."""
    after_overlong = counts["read"] - counts["filtered_overlong"]
    filtering = "on" if collected.cfg.data.filter_overlong_prompts else "off"
    return (
        f"{counts['read']} rows read; "
        f"data.filter_overlong_prompts ({filtering}, longest {collected.longest} tokens) {counts['read']} -> "
        f"{after_overlong}; room for a response in the model's context "
        f"({collected.context_tokens or 'not known'} tokens) {after_overlong} -> {counts['kept']}; "
        f"{counts['cut']} cut by data.truncation={collected.cfg.data.truncation}"
    )


def _refuse_overlong(collected: _Collected, which: str) -> None:
    if not collected.overlong:
        return
    examples = ", ".join(f"{where} with {tokens} tokens" for where, tokens in collected.overlong[:EXAMPLES_SHOWN])
    raise DataError(
        f"{which} data: {len(collected.overlong)} of {collected.counts['read']} prompts are longer than "
        f"{collected.longest} tokens (data.max_prompt_length), and data.truncation is error: {examples}. Raise "
        "data.max_prompt_length, set data.filter_overlong_prompts=true, or set data.truncation to left, right or "
        "middle."
    )


def _digest(files: Sequence[SourceFile], ids: Ragged, data: DataConfig, collected: _Collected) -> str:
    tokens = hashlib.sha256(np.ascontiguousarray(ids.values).tobytes())
    tokens.update(ids.offsets.tobytes())
    settings = data.model_dump(mode="json", exclude={"train_files", "val_files", "train_batch_size", "seed", "shuffle"})
    return sha256_json([[file.sha256 for file in files], settings, collected.counts, tokens.hexdigest()])


# ------------------------------------------------------------------------------------------------------ reading files


def _read_files(paths: Sequence[str], key: str, rows_of_file: dict[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of all files with where they stand; counts the rows of each file as it goes."""
    for path in paths:
        file = Path(path).expanduser()
        if not file.is_file():
            raise DataError(f"{key}: there is no file {file}")
        rows_of_file[path] = 0
        for row in _read_file(file, key):
            rows_of_file[path] += 1
            yield f"{file.name} row {rows_of_file[path] - 1}", row


def _read_file(file: Path, key: str) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix in (".jsonl", ".json", ".ndjson"):
        return _read_json(file)
    raise DataError(f"{key}: {file} is neither .parquet nor .jsonl, .ndjson or .json")


def source_table(paths: Sequence[str], rows: np.ndarray) -> pa.Table:
    """Rows of files of prompts as they stand there, in the order of the files; columns that a file lacks are null.

    Args:
        paths: files of prompts.
        rows: which rows, counted over all files, ascending.

    Raises:
        DataError: the columns of the files do not fit together, or JSON rows have no common types.
    """
    tables, first = [], 0
    for path in paths:
        file = Path(path).expanduser()
        try:
            table = pq.read_table(file) if file.suffix == ".parquet" else _json_table(list(_read_json(file)))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"the rows of {file} cannot be one table: {error}. Give it as parquet.") from error
        own = rows[(rows >= first) & (rows < first + table.num_rows)] - first
        # Metadata of other libraries describes the columns that they wrote, which may not be all there will be.
        tables.append(table.take(pa.array(own)).replace_schema_metadata(None))
        first += table.num_rows
    try:
        return pa.concat_tables(tables, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"the columns of {', '.join(paths)} do not fit together: {error}") from error


def _json_table(rows: list[dict[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is no readable parquet file: {error}") from error


def _read_json(file: Path) -> Iterator[dict[str, Any]]:
    """Lines of JSON objects, or one list of them."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            first = lines.read(1)
            lines.seek(0)
            if first == "[":
                yield from _objects(((1, value) for value in _parse_json(lines.read(), file, 1)), file)
            else:
                yield from _objects(
                    ((n, _parse_json(line, file, n)) for n, line in enumerate(lines, 1) if line.strip()), file
                )
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: {error}") from error


def _objects(values: Iterator[tuple[int, Any]], file: Path) -> Iterator[dict[str, Any]]:
    for number, value in values:
        if not isinstance(value, dict):
            raise DataError(f"{file} line {number}: a row must be a JSON object, not {type(value).__name__}")
        yield value


def _parse_json(text: str, file: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} line {line} is no JSON: {error}") from error


# ------------------------------------------------------------------------------------------------------- reading rows


def _parse(where: str, row: Mapping[str, Any], data: DataConfig) -> _Row:
    """Read one row: its prompt, reference answer, data source, and all its other columns as `extra_info`."""
    if data.prompt_key in row and row[data.prompt_key] is None:
        raise DataError(f"{where} has no prompt: its column {data.prompt_key!r} (data.prompt_key) is null.")
    if data.prompt_key not in row:
        raise DataError(
            f"{where} has no column {data.prompt_key!r} (data.prompt_key); it has {', '.join(row)}. "
            "Set data.prompt_key to the column that holds the prompt."
        )
    taken = {data.prompt_key, data.reward_fn_key, "reward_model", "extra_info"}
    own_extra = row.get("extra_info")
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping):
        reward_model = {k: v for k, v in reward_model.items() if k != "ground_truth"}
    extra = {
        **{name: value for name, value in row.items() if name not in taken},
        **({"reward_model": reward_model} if reward_model else {}),
        **(own_extra if isinstance(own_extra, Mapping) else {} if own_extra is None else {"extra_info": own_extra}),
    }
    answer = _ground_truth(where, row, data)
    return _Row(
        where,
        _prompt(where, row[data.prompt_key], data),
        _data_source(where, row, data),
        None if answer is None else json_text(jsonable(answer, None)[0]),
        json_text(jsonable(extra, None)[0]),
    )


def _prompt(where: str, value: Any, data: DataConfig) -> Any:
    """A text, or messages without the empty fields that columnar files add."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if data.text_as_user_message else value
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value):
        return [_message(where, message) for message in value]
    raise DataError(f"{where}: column {data.prompt_key!r} must hold a text or a list of messages, not {value!r:.80}")


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """One message; a content of several text parts becomes one text, because templates print what they do not know."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise DataError(f"{where}: a message holds other parts than texts, such as images; only texts can be used")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and not message.get("tool_calls"):
        raise DataError(f"{where}: a message of role {message['role']!r} has no content")
    kept = {name: value for name, value in message.items() if value is not None and name != "content"}
    return jsonable({**kept, **({} if content is None else {"content": content})}, None)[0]


def _ground_truth(where: str, row: Mapping[str, Any], data: DataConfig) -> Any:
    if data.ground_truth_key is not None:
        if data.ground_truth_key not in row:
            raise DataError(
                f"{where} has no column {data.ground_truth_key!r} (data.ground_truth_key); it has {', '.join(row)}"
            )
        return row[data.ground_truth_key]
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)


def _data_source(where: str, row: Mapping[str, Any], data: DataConfig) -> str:
    """The configured source, the row's own, or the file's name without ending."""
    if data.data_source is not None:
        return data.data_source
    value = row.get(data.reward_fn_key)
    return str(value) if value is not None else Path(where.rsplit(" row ", 1)[0]).stem


def _texts(rows: Sequence[_Row], data: DataConfig, tokenizer: Any) -> list[str]:
    """Every prompt's text after the chat template; a text prompt is used as it is."""
    talks = [row.prompt for row in rows if not isinstance(row.prompt, str)]
    if talks and not tokenizer.chat_template:
        raise DataError(
            "prompts are messages but the tokenizer has no chat template. Set actor_rollout_ref.model."
            "custom_chat_template, or use prompts that are texts."
        )
    next_talk = iter(_templated(talks, rows, data, tokenizer))
    texts = [row.prompt if isinstance(row.prompt, str) else next(next_talk) for row in rows]
    # A tokenizer takes UTF-8 alone, which has no form for half a surrogate pair.
    return [escape_surrogates(text) or "" for text in texts]


def _templated(talks: list[Any], rows: Sequence[_Row], data: DataConfig, tokenizer: Any) -> list[str]:
    if not talks:
        return []
    options = data.apply_chat_template_kwargs
    try:
        return tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:
        raise DataError(
            f"the chat template does not take a prompt between {rows[0].where} and {rows[-1].where}: {error}. Look at "
            "the prompts' messages, actor_rollout_ref.model.custom_chat_template and data.apply_chat_template_kwargs."
        ) from error


def _context_tokens(cfg: RunConfig) -> int | None:
    """Tokens of the model's context: `rollout.max_model_len`, else what a local model folder says; None: not known."""
    if cfg.actor_rollout_ref.rollout.max_model_len is not None:
        return cfg.actor_rollout_ref.rollout.max_model_len
    path = cfg.actor_rollout_ref.model.path
    file = Path(path).expanduser() / "config.json"
    if not path or not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    text_config = config.get("text_config") or config
    return text_config.get("max_position_embeddings")
