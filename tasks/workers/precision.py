"""Numeric settings of a computation: float64 kept, layers computed again, and what suits a processor."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(dtype: torch.dtype, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function within `computing()`, keep no intermediate value, and call it again in the backward pass.

    There is no dropout, so no random state has to be kept. Function modes do not reach into the backward pass: the one
    that belongs to the weights' type is entered again.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    contexts = functools.partial(_recompute_contexts, dtype)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _recompute_contexts(dtype: torch.dtype) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return contextlib.nullcontext(), KeepFloat64() if dtype == torch.float64 else contextlib.nullcontext()


class KeepFloat64(TorchFunctionMode):
    """Keep float64 where model code rounds to float32, in norms and softmax.

    That rounding is larger than the differences float64 is chosen to show.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ROUNDING and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


_ROUNDING = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.softmax, torch.softmax, torch.nn.functional.softmax}


SMALL_MODEL = 10_000_000
"""Parameters below which a second thread waits more than it works."""


def use_one_thread_for_a_small_model(module: torch.nn.Module) -> None:
    """Compute a small model on one thread, unless OMP_NUM_THREADS says otherwise: a thread that waits for another one,
    which a busy neighbour holds up, makes a small product many times slower."""
    if "OMP_NUM_THREADS" not in os.environ and sum(p.numel() for p in module.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)


@functools.cache
def use_fast_float32_products() -> bool:
    """Let oneDNN compute float32 matrix products where it computes them as exactly as torch's default library.

    oneDNN is reached through a setting that allows it to round to bfloat16. A processor with AVX-512 and without AMX
    does not take that leave, and on AMD's it is about twice as fast. The product is checked, and the setting taken back
    if it rounds.
    """
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    if not torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        return False
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((64, 128, 96), (1024, 384, 128), (7, 513, 33)):
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(columns, inner, generator=generator)
        exact = a.double() @ b.double().T
        if (torch.nn.functional.linear(a, b) - exact).abs().max() > 1e-5 * exact.abs().max():
            setting.fp32_precision = before
            return False
    return True
