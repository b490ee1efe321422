"""Mapped tensors against those that safetensors reads."""

import io
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from platon.deploy.mapping import mapped

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def test_they_are_what_safetensors_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = [(), (0, 3), (1,), (3,), (5, 7)]
    tensors = {f"{dtype} {shape}": (100 * torch.randn(shape)).to(dtype) for dtype in DTYPES for shape in shapes}
    file = tmp_path / "tensors.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    found, expected = mapped(file), load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].is_contiguous()
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_tensors_that_are_not_aligned(tmp_path: Path) -> None:
    """The format allows any place in the file."""
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    numbers = torch.tensor([1.5, -2.5])
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + numbers.numpy().tobytes())
    assert torch.equal(mapped(file)["b"], numbers)


def test_a_tensor_is_pickled_without_the_rest_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tensors.safetensors"
    save_file({"small": torch.ones(3), "large": torch.ones(100_000)}, file)
    pickled = io.BytesIO()
    torch.save(mapped(file)["small"], pickled)
    assert len(pickled.getvalue()) < 10_000


def test_the_file_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "tensors.safetensors"
    save_file({"a": torch.ones(3)}, file)
    before = file.read_bytes()
    mapped(file)["a"].fill_(7)
    assert file.read_bytes() == before


@pytest.mark.parametrize("length", [0, 7, 8, 60, -1])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    file = tmp_path / "tensors.safetensors"
    save_file({"a": torch.ones(30)}, file)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(SafetensorError):
        mapped(file)
