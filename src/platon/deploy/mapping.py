"""The tensors of a safetensors file in one mapping of it, which takes a few microseconds a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; what is not read takes no memory.

    Raises:
        SafetensorError: the file is damaged.
    """
    # safetensors checks the header: every tensor lies in the file and has as many bytes as its shape needs.
    with safe_open(path, framework="pt") as checked, path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        data = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        found = {}
        for name in checked.keys():  # noqa: SIM118  # it is no dict
            dtype = _DTYPES.get(header[name]["dtype"])
            (start, end), shape = header[name]["data_offsets"], header[name]["shape"]
            start, end = 8 + length + start, 8 + length + end
            if dtype is None or start % dtype.itemsize:  # a rare type, or not aligned
                found[name] = checked.get_tensor(name)
            else:  # a storage of its own: whoever copies or pickles the tensor does not take the whole file with it
                found[name] = torch.empty(0, dtype=dtype).set_(data[start:end])
                if len(shape) != 1:
                    found[name] = found[name].view(shape)
    return found
