"""The tokenizer: loaded from the model's folder, and checked against the file that says what every id means.

What transformers builds from a folder depends on the model type in its config.json: a folder that says `qwen2` gets a
Qwen2Tokenizer, whatever its tokenizer.json holds, and then ids change without a word. tokenizer.json is the truth here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tasks.config import ModelConfig

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class TokenizerError(ValueError):
    """There is no tokenizer where the configuration says, or it cannot be trusted."""


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer of `actor_rollout_ref.model`; remote code runs only where `trust_remote_code` is set.

    Returns:
        A transformers tokenizer. Ids that a padded vocabulary has beyond the tokenizer's own decode to nothing.

    Raises:
        TokenizerError: nothing is there, or the tokenizer gives other ids than the folder's tokenizer.json.
    """
    source = _source(model)
    folder = Path(source)
    tokenizer = _load(source, model)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _as_the_file_says(tokenizer, folder)
    # Decoding must not tidy spaces: a reward would read another text than was sampled.
    tokenizer.clean_up_tokenization_spaces = False
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def check_round_trip(tokenizer: Any, text: str) -> None:
    """Refuse a tokenizer that does not give back a text it was given.

    Raises:
        TokenizerError: decoding the text's ids gives another text.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids)
    if back != text:
        raise TokenizerError(
            f"{type(tokenizer).__name__} does not give back what it is given: {text!r} became {back!r}"
        )


def _source(model: ModelConfig) -> str:
    key = "tokenizer_path" if model.tokenizer_path else "path"
    source = model.tokenizer_path or model.path
    if not source:
        raise TokenizerError(
            "no model is named. Set actor_rollout_ref.model.path to a folder in Hugging Face format or a hub name."
        )
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise TokenizerError(
                f"actor_rollout_ref.model.{key}={source} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is "
                "there. Save the tokenizer into this folder, or set actor_rollout_ref.model.tokenizer_path."
            )
        return str(folder)
    if folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise TokenizerError(f"actor_rollout_ref.model.{key}={source} is no folder.")
    return source


def _load(source: str, model: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TokenizerError(
            f"no tokenizer can be loaded from {source} (actor_rollout_ref.model.path or .tokenizer_path): {error} "
            "Name a local folder when there is no connection to the hub."
        ) from error


def _as_the_file_says(tokenizer: Any, folder: Path) -> Any:
    """The tokenizer if it gives the ids of tokenizer.json, else one that is built from that file alone."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    probe = _probe_text(raw)
    wanted = raw.encode(probe, add_special_tokens=False).ids
    if _ids(tokenizer, probe) == wanted:
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    if _ids(plain, probe) != wanted:
        raise TokenizerError(
            f"{folder}: the tokenizer gives other ids than its own tokenizer.json, as {type(tokenizer).__name__} and "
            f"as {type(plain).__name__}. Save the tokenizer again with save_pretrained, or remove the extra files."
        )
    logger.warning(
        "%s: transformers chose %s for this folder, which gives other ids than its tokenizer.json; "
        "the tokenizer is taken from that file instead.",
        folder,
        type(tokenizer).__name__,
    )
    return plain


def _probe_text(raw: Any) -> str:
    """A text that touches tokens from all over the vocabulary, besides ordinary words."""
    size = raw.get_vocab_size()
    spread = list(range(0, size, max(size // 64, 1)))
    return f"Ann has 12 apples.\n#### 7 + x = {raw.decode(spread)}"


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
