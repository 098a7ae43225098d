"""What a report's file holds, unpacked in Python as templates/data.js does in the browser."""

import base64
import json
import re
import zlib

import numpy as np


def blobs(text: str) -> dict[str, tuple[str, str, float]]:
    """Base64 text, type and factor of everything the script unpacks, by id without `data-`."""
    pattern = (
        r'<script type="text/plain" id="data-([^"]+)"(?: data-type="(\w+)" data-factor="([^"]+)")?>([A-Za-z0-9+/=]*)<'
    )
    return {name: (data, kind, float(factor or 1)) for name, kind, factor, data in re.findall(pattern, text)}


def unpacked(text: str, name: str):
    """A JSON value, or an array with its factor applied."""
    data, kind, factor = blobs(text)[name]
    raw = zlib.decompress(base64.b64decode(data))
    if not kind:
        return json.loads(raw)
    size = np.dtype(kind).itemsize
    values = np.frombuffer(np.frombuffer(raw, np.uint8).reshape(size, -1).T.tobytes(), kind)
    return values.astype(np.float64) * factor if kind.startswith("float") else values
