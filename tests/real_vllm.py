"""Where a real vLLM is: GRPOFLOW_VLLM_PYTHON, or the environment that `make vllm-env` makes."""

import os
from pathlib import Path

import pytest

_NAMED = os.environ.get("GRPOFLOW_VLLM_PYTHON")
PYTHON = Path(_NAMED or Path(__file__).parent.parent / ".venv-vllm/bin/python")

# Where the variable is set, as `make test-vllm` and CI set it, an environment that is missing fails the tests.
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(not _NAMED and not PYTHON.exists(), reason=f"no vLLM at {PYTHON}; make vllm-env"),
]
