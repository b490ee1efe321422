"""The CRC-32 of files against zlib's."""

import random
import zlib
from pathlib import Path

import pytest

from platon.deploy import checksum, sparse_kernel

LENGTHS = [0, 1, 63, 64, 65, 127, 128, 192, 4096, 4097, 12345, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 600_001]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("compiled", [True, False])
def test_it_is_zlibs(length: int, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setenv("PLATON_KERNEL", "")
        monkeypatch.setattr(sparse_kernel, "installed", sparse_kernel.installed.__wrapped__)  # looks again at each call
        assert isinstance(sparse_kernel.installed(), str), "without the kernel, zlib computes it"
    elif isinstance(sparse_kernel.find(), str):
        pytest.skip("no kernel")
    monkeypatch.setattr(checksum, "_PIECE", 1 << 12)  # most files are several pieces; the kernel's have 2^18 bytes
    data = random.Random(length).randbytes(length)
    file = tmp_path / "file"
    file.write_bytes(data)
    assert checksum.crc32(file) == zlib.crc32(data)
