"""What each token id stands for, read from the run's tokenizer without loading a tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from storage import Run, StorageError

_ANCHORS = ("a", "x", "e", "0", "1")
"""Tokens of one character. A token is decoded behind one, because decoders drop the space before a first token."""


@dataclass(frozen=True)
class Pieces:
    """Texts of token ids.

    Attributes:
        texts: by id. Bytes where the token is a part of a character.
        special: ids of special tokens, such as the end token.
        why_none: why there are no texts; None: there are.
    """

    texts: dict[int, str | bytes] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    why_none: str | None = None


def pieces_of(run: Run, ids: Sequence[int], tokenizer: Path | None = None) -> Pieces:
    """Texts of the given ids from a run's tokenizer. Nothing is fetched, and no remote code is run.

    Args:
        run: the run, whose configuration names its tokenizer.
        ids: token ids, each once.
        tokenizer: a folder with a tokenizer.json, or this file, instead of the run's.

    Raises:
        StorageError: there is none at the path that is given.
    """
    try:
        return _decoded(_tokenizer_file(run, tokenizer), ids)
    except StorageError as error:
        if tokenizer is not None:
            raise
        return Pieces(why_none=str(error))


def _tokenizer_file(run: Run, given: Path | None) -> Path:
    """The tokenizer.json, which is the truth about ids; see tasks/tokenizer.py."""
    if given is not None:
        file = given / "tokenizer.json" if given.is_dir() else given
        if not file.is_file():
            raise StorageError(f"--tokenizer {given}: there is no tokenizer.json")
        return file
    from flows.run_folder import config_of

    model = config_of(run, run.lineage).actor_rollout_ref.model
    source = model.tokenizer_path or model.path
    if not source:
        raise StorageError("the run's configuration names no tokenizer")
    folder = Path(source).expanduser()
    if folder.is_dir():
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
        raise StorageError(f"{folder.name} has no tokenizer.json")
    return _cached(source) or _not_here(folder.name)


def _cached(source: str) -> Path | None:
    """The file of a hub model that was fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(source, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _not_here(name: str) -> Path:
    raise StorageError(f"the run's tokenizer ({name}) is not on this machine; --tokenizer names a folder with it")


def _decoded(file: Path, ids: Sequence[int]) -> Pieces:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise StorageError(f"{file.name} cannot be read as a tokenizer: {error}") from error
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    anchor = next((number for text in _ANCHORS if (number := tokenizer.token_to_id(text)) is not None), None)
    before = [] if anchor is None else [anchor]
    lead = tokenizer.decode(before, skip_special_tokens=False) if before else ""
    known = [number for number in ids if number >= 0 and tokenizer.id_to_token(number) is not None]
    decoded = tokenizer.decode_batch([[*before, number] for number in known], skip_special_tokens=False)
    texts: dict[int, str | bytes] = {}
    for number, text in zip(known, decoded, strict=True):
        if text.startswith(lead):
            text = text[len(lead) :]
        texts[number] = _whole(tokenizer, number, text)
    return Pieces(texts, frozenset(special))


def _whole(tokenizer: Any, number: int, text: str) -> str | bytes:
    """The text, or its bytes where it is not whole characters."""
    if "\ufffd" not in text:
        return text
    name = tokenizer.id_to_token(number)
    if len(name) == 6 and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    table = _byte_of_letter()
    return bytes(table[letter] for letter in name) if all(letter in table for letter in name) else text


@cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter: printable Latin-1 as itself, others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
