"""The files of a model that go with a step: weights, tokenizer, configuration. No pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage import StorageError
from tasks.config import ModelConfig

SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_NAMES_OF_PLACES = ("_name_or_path", "name_or_path", "base_model_name_or_path")


@dataclass
class ModelFiles:
    """What was found.

    Attributes:
        members: files by their name in the bundle.
        places: keys of `actor_rollout_ref.model` with their values there.
        told: what is not in it.
    """

    members: dict[str, Path | bytes] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def files_of_model(model: ModelConfig) -> ModelFiles:
    """The files behind the paths of a model's configuration; a hub's name stands for what this machine has of it.

    Raises:
        StorageError: a folder is not there, or has no weights that can be read without running code.
    """
    found = ModelFiles()
    for key, place in (("path", "model"), ("tokenizer_path", "tokenizer"), ("lora_adapter_path", "adapter")):
        source = getattr(model, key)
        if not source:
            continue
        folder = _folder(source)
        if folder is None:
            found.places[key] = source
            found.told.append(f"actor_rollout_ref.model.{key}={source}, which is a hub's name and not on this machine")
            continue
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES)
        if key != "tokenizer_path" and not any(path.suffix == ".safetensors" for path in files):
            raise StorageError(
                f"actor_rollout_ref.model.{key}={source} holds no *.safetensors; a bundle takes no pickle"
            )
        found.places[key] = place
        found.members.update({f"{place}/{path.name}": _impersonal(path) for path in files})
    return found


def _folder(source: str) -> Path | None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise StorageError(f"the model in {source} is not there. Say where it is: actor_rollout_ref.model.path=FOLDER")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None


def _impersonal(path: Path) -> Path | bytes:
    """A file; where it says in which folder it once lay, without that."""
    if path.suffix != ".json" or path.stat().st_size > 1 << 20:
        return path
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return path
    named = [key for key in _NAMES_OF_PLACES if isinstance(values, dict) and str(values.get(key, "")).startswith("/")]
    if not named:
        return path
    return json.dumps({**values, **{key: Path(values[key]).name for key in named}}, indent=2).encode()
