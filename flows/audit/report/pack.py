"""Arrays and JSON as text inside an HTML file: deflated, then base64. templates/data.js reads them back."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

_LARGEST_HALF = 65504.0


def pack_json(value: Any) -> str:
    """JSON, deflated, as base64."""
    return _text(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())


def pack_array(array: np.ndarray) -> str:
    """An array's little-endian bytes, deflated, as base64.

    The first bytes of all values come first, then their second bytes, and so on: sign and exponent repeat from token to
    token and deflate well when they are side by side.
    """
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return _text(little.view(np.uint8).reshape(-1, little.dtype.itemsize).T.tobytes())


def halves(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Numbers as 16-bit floats and what to multiply them by: 3 significant digits from the largest down to its 2^-29th.

    The factor is a power of two, so that it costs no digit. NaN stays NaN; an infinity becomes the largest number.
    """
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max()) if len(finite) else 0.0
    factor = 2.0 ** (np.ceil(np.log2(top)) - 15) if top > 0 else 1.0
    return np.clip(values / factor, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16), float(factor)


def smallest_ints(values: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 up in the narrowest unsigned type that holds them."""
    top = int(values.max()) if len(values) else 0
    return values.astype(np.uint8 if top < 2**8 else np.uint16 if top < 2**16 else np.uint32)


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()
