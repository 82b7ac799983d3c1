"""Reads a safetensors file as numpy arrays, one-byte and two-byte floats included."""

from __future__ import annotations

import json
import pathlib
import struct

import ml_dtypes
import numpy as np

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": np.uint8,
}


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a file by name; E8M0 scales as uint8 bytes.

    Raises:
      KeyError: a dtype that these files do not use.
    """
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors
