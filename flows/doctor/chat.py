"""The tokenizer that a configuration names: does its chat template keep messages, special tokens and texts whole?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.doctor.finding import Finding
from flows.doctor.subject import Subject

QUESTION = "Ann has 12 apples and buys 15. How many apples?"


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Load it, render one message, and read the rendered text back."""
    from tasks.tokenizer import TokenizerError, load_tokenizer

    cfg = subject.cfg
    model = cfg.actor_rollout_ref.model if cfg else None
    source = (model.tokenizer_path or model.path) if model else ""
    if cfg is None or model is None or not source:
        yield Finding("tokenizer", "skipped", "no model is named")
        return
    looks_like_folder = source.startswith((".", "/", "~")) or source.count("/") > 1
    if not looks_like_folder and not Path(source).is_dir() and not subject.deep:
        yield Finding("tokenizer", "skipped", f"{source} is no folder here; nothing is downloaded without --deep")
        return
    try:
        tokenizer = load_tokenizer(model)
    except TokenizerError as error:
        yield Finding("tokenizer", "error", str(error), "Mend actor_rollout_ref.model.path or .tokenizer_path.")
        return
    yield _end_token(tokenizer, source)
    yield _template(tokenizer, _prompts_are_messages(subject), cfg.data.apply_chat_template_kwargs)


def _end_token(tokenizer: Any, source: str) -> Finding:
    found = f"{type(tokenizer).__name__} of {source}, {len(tokenizer)} tokens"
    if tokenizer.eos_token_id is None:
        advice = "Without one, every response runs to its length limit. Set eos_token in tokenizer_config.json."
        return Finding("tokenizer", "warn", f"{found}; it has no end token", advice)
    return Finding("tokenizer", "ok", f"{found}; ends with {tokenizer.eos_token!r}")


def _template(tokenizer: Any, messages: bool | None, options: dict[str, Any]) -> Finding:
    """Whether the template exists where it is needed, and does what the data pipeline relies on.

    Args:
        tokenizer: the tokenizer.
        messages: prompts are chat messages; None: not known.
        options: `data.apply_chat_template_kwargs`.
    """
    name, key = "tokenizer/chat_template", "actor_rollout_ref.model.custom_chat_template"
    if not tokenizer.chat_template:
        if messages:
            return Finding(name, "error", "none, but the prompts are chat messages", f"Set {key}, or use text prompts.")
        if messages is None:
            return Finding(name, "warn", "none", f"Prompts that are chat messages need one: set {key}.")
        return Finding(name, "ok", "none, and none is needed: the prompts are texts")
    conversation = [{"role": "user", "content": QUESTION}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **options)
    # A template is a program of its own; whatever it raises is its fault.
    except Exception as error:
        found = f"it fails on one user message: {type(error).__name__}: {error}"
        return Finding(name, "error", found, f"Mend it, {key} or data.apply_chat_template_kwargs.")
    if QUESTION not in text:
        found = f"it does not keep the message: {text[-200:]!r}"
        return Finding(name, "error", found, f"Mend it or set {key}.")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if broken := _broken_tokens(tokenizer, text, ids):
        found = f"special tokens in its text become several ids: {', '.join(broken)}"
        return Finding(name, "error", found, "Save the tokenizer with these as special tokens, or mend the template.")
    if (back := tokenizer.decode(ids)) != text:
        return Finding(name, "error", f"its text {text!r} is read back as {back!r}", "Use the model's own tokenizer.")
    if text == tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False, **options):
        found = f"one message is {len(ids)} tokens; it opens no turn of the assistant"
        return Finding(name, "warn", found, "The model may go on with the question: add a generation prompt to it.")
    return Finding(name, "ok", f"one message is {len(ids)} tokens, special tokens whole, read back as it was")


def _broken_tokens(tokenizer: Any, text: str, ids: list[int]) -> list[str]:
    """Special tokens whose id occurs less often than their text does."""
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [token for token, number in {**named, **added}.items() if ids.count(number) < text.count(token)]


def _prompts_are_messages(subject: Subject) -> bool | None:
    """Whether the first training prompt is chat messages; None: it cannot be told."""
    assert subject.cfg is not None
    data = subject.cfg.data
    files = [Path(name).expanduser() for name in data.train_files]
    if data.text_as_user_message:
        return True
    try:
        row = next(itertools.chain.from_iterable(map(_first_row, files)), None)
    except (OSError, ValueError):
        return None
    value = row.get(data.prompt_key) if isinstance(row, dict) else None
    return None if value is None else not isinstance(value, str)


def _first_row(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as parquet:
            yield from next(parquet.iter_batches(batch_size=1)).to_pylist()
    else:
        with file.open(encoding="utf-8-sig") as lines:
            yield json.loads(next(lines))
