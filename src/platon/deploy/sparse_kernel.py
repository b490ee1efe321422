"""The compiled sparse kernel (sparse.c): found beside this file or built once, loaded with ctypes, and called.

The environment variable PLATON_KERNEL names another library to load; an empty value turns the compiled kernel off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from platon.deploy.sparse_matrix import SparseMatrix

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "sparse.c", _HERE / "sparse_tile.h")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared")
_BUILD_SECONDS = 120

ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # as in sparse.c
LEVELS = ("baseline", "avx2", "avx512")
_NO_MEMORY, _BAD_ARRAYS = 1, 2  # what platon_sparse_linear returns, besides 0


class SparseKernel:
    """The loaded library. `level` is the instruction set in use: the best that this processor has."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.platon_digest.restype = ctypes.c_char_p
        self.path = path
        self.digest: str = library.platon_digest().decode()
        self.level: int = library.platon_level()
        self._parallel = _openmp()
        self._run = library.platon_sparse_linear
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [
            *(pointer, number, number),  # x, tokens, stride
            *(pointer, number) * 5,  # values, columns, counts, starts, bias: each with its size in bytes
            *(number, number, number, ctypes.c_int),  # rows, columns, panel width, activation
            *(pointer, number),  # out, stride
            *(ctypes.c_int, pointer, ctypes.c_int),  # threads, parallel, level
        ]

    def linear(
        self, x: Tensor, matrix: SparseMatrix, bias: Tensor | None, activation: str = "none", threads: int | None = None
    ) -> Tensor:
        """activation(x Wᵀ + bias) for float32 tokens `x` [..., columns], on PyTorch's number of threads.

        The arrays of the matrix have to be contiguous and on the CPU. Whatever they contain, the kernel stays inside
        them: it gets their sizes in bytes, so that an array of another precision or length is refused.
        """
        *shape, columns = x.shape
        if len(shape) != 1 or (columns > 1 and x.stride(1) != 1):
            x = x.contiguous()  # then its tokens are evenly spaced, whatever the batch dimensions
        values, places, counts, starts, rows, _, width = matrix
        threads = threads or torch.get_num_threads()
        out = torch.empty(*shape, rows)
        failed = self._run(
            x.data_ptr(),
            math.prod(shape),
            x.stride(0) if len(shape) == 1 else columns,
            values.data_ptr(),
            values.nbytes,
            places.data_ptr(),
            places.nbytes,
            counts.data_ptr(),
            counts.nbytes,
            starts.data_ptr(),
            starts.nbytes,
            0 if bias is None else bias.data_ptr(),
            -1 if bias is None else bias.nbytes,
            rows,
            columns,
            width,
            ACTIVATIONS[activation],
            out.data_ptr(),
            rows,
            threads,
            self._parallel,
            self.level,
        )
        if failed == _NO_MEMORY:
            raise MemoryError(f"no memory for tokens of {columns} features on {threads} threads; use fewer threads")
        if failed == _BAD_ARRAYS:
            raise ValueError(
                f"the arrays of a sparse matrix do not fit {rows} × {columns} weights in panels of {width} columns; "
                "they were changed after sparsify made them"
            )
        return out


def _openmp() -> int | None:
    """The `GOMP_parallel` of the OpenMP runtime that PyTorch itself uses; `None`: one thread."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:  # dlsym also searches the libraries that this one was linked with
            return ctypes.cast(ctypes.CDLL(str(folder / name)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def find() -> SparseKernel | str:
    """The compiled kernel, or the reason, in a few words, why there is none."""
    named = os.environ.get("PLATON_KERNEL")
    if named is not None:
        return _load(Path(named)) if named else "PLATON_KERNEL is empty, which turns the compiled kernel off"
    digest = source_digest()
    for suffix in EXTENSION_SUFFIXES:
        built = _HERE / f"_sparse{suffix}"
        if built.exists():
            kernel = _load(built)
            if isinstance(kernel, SparseKernel) and kernel.digest == digest:
                return kernel
    target = cache_folder() / f"sparse-{platform.machine()}-{digest}.so"
    if not target.exists():
        problem = build(target)
        if problem:
            return problem
    return _load(target)


def _load(path: Path) -> SparseKernel | str:
    try:
        return SparseKernel(path)
    except (OSError, AttributeError) as error:
        return f"the compiled kernel {path} does not load ({error})"


def source_digest() -> str:
    """A digest of the C sources; a library that was built from other sources has another one and is not used."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:16]


def cache_folder() -> Path:
    """The folder for what is built or measured once on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "platon"


def build(target: Path, *flags: str) -> str | None:
    """Compile the kernel into `target`; returns what went wrong, or `None`."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    compiler = shutil.which(command[0]) or shutil.which("cc")
    if compiler is None:
        return f"there is no C compiler ({command[0]!r} is not found); install one, or name it in CC"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            digest = f'-DDIGEST="{source_digest()}"'
            line = [compiler, *_FLAGS, *flags, digest, str(_SOURCES[0]), "-o", str(made)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
            if done.returncode:
                first = (done.stderr.strip().splitlines() or ["no message"])[0]
                return f"{compiler} cannot compile the kernel ({first})"
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the kernel cannot be built in {target.parent} ({error})"
    return None
