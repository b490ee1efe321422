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
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from platon.deploy.sparse_matrix import SparseMatrix
from platon.deploy.sparse_structure import Attention, Encoder, Heads, Layer, sized

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "sparse.c", *sorted(_HERE.glob("sparse*.h")))
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")
_BUILD_SECONDS = 120

LEVELS = ("baseline", "avx2", "avx512")
_NO_MEMORY, _BAD_ARRAYS = 1, 2  # what the entry points of sparse.c return, besides 0


class SparseKernel:
    """The loaded library. `level` is the instruction set in use: the best that this processor has.

    The arrays of all matrices have to be contiguous and on the CPU. Whatever they contain, the kernel stays inside
    them: it gets their sizes in bytes, so that an array of another precision or length is refused.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path.absolute()))  # a bare name would be searched for in the library folders
        library.platon_digest.restype = ctypes.c_char_p
        self.path = path
        self.digest: str = library.platon_digest().decode()
        self.level: int = library.platon_level()
        self._parallel = _openmp()
        pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        tokens, engine = (pointer, number, number, pointer, integer), (integer, pointer, integer)
        self._linears, self._chain = library.platon_sparse_linears, library.platon_sparse_chain
        self._dense = library.platon_dense_linear
        self._dense.argtypes = [pointer, number, number, pointer, number, number, pointer, pointer, *engine]
        self._dense.restype = None
        self._problem = library.platon_sparse_problem
        self._problem.argtypes = [ctypes.POINTER(Layer)]
        self._fold = library.platon_fold
        self._fold.argtypes = [integer, number, pointer]
        self._linears.argtypes = [*tokens, pointer, *engine]
        added, norm = (pointer, number), (integer, pointer, number, pointer, number, ctypes.c_float)
        self._chain.argtypes = [*tokens, *added, *norm, pointer, *engine]
        self._attention = library.platon_attention
        self._attention.argtypes = [ctypes.POINTER(Attention), *engine]
        self._encoder = library.platon_encoder
        self._encoder.argtypes = [pointer, integer, pointer, number, number, pointer, pointer, *engine]

    def content_problem(self, matrix: SparseMatrix) -> int:
        """As `sparse_matrix.content_problem`."""
        found: int = self._problem(ctypes.byref(Layer.of(matrix, None, "none")))
        return found

    def fold(self, file: int, length: int) -> bytes | None:
        """16 bytes in place of the first `length` of a file, with the same CRC-32; `None` if that cannot be done here.

        Args:
            file: its descriptor.
            length: a multiple of 64, not 0.

        The register that the CRC-32 is computed in holds zeros before the 16 bytes.
        """
        folded = (ctypes.c_char * 16)()
        return folded.raw if self._fold(file, length, folded) else None

    def linear(
        self, x: Tensor, matrix: SparseMatrix, bias: Tensor | None, activation: str = "none", threads: int | None = None
    ) -> Tensor:
        """activation(x Wᵀ + bias) for float32 tokens `x` [..., columns], on PyTorch's number of threads."""
        return self.linears(x, [Layer.of(matrix, bias, activation)], threads)[0]

    def linears(self, x: Tensor, layers: Sequence[Layer], threads: int | None = None) -> list[Tensor]:
        """What each of the layers makes of the same tokens, which are read once."""
        x, shape, stride = _as_tokens(x)
        threads = threads or torch.get_num_threads()
        outs = [torch.empty(*shape, layer.rows) for layer in layers]
        count = len(layers)
        failed = self._linears(
            *(x.data_ptr(), math.prod(shape), stride, _pointers(layers), count),
            (ctypes.c_void_p * count)(*[out.data_ptr() for out in outs]),
            *(threads, self._parallel, self.level),
        )
        if failed:
            raise _error(failed, layers, threads)
        return outs

    def chain(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        added: Tensor | None = None,
        norm: tuple[Tensor | None, Tensor | None, float] | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """norm(last(… first(x)) + added): layers one after the other, a sum, and a layer norm (weight, bias, ε)."""
        same = added is x
        x, shape, stride = _as_tokens(x)
        other, _, added_stride = (x, shape, stride) if same else (None, None, 0) if added is None else _as_tokens(added)
        weight, bias, epsilon = norm or (None, None, 0.0)
        threads = threads or torch.get_num_threads()
        out = torch.empty(*shape, layers[-1].rows)
        failed = self._chain(
            *(x.data_ptr(), math.prod(shape), stride, _pointers(layers), len(layers)),
            *(0 if other is None else other.data_ptr(), added_stride),
            *(norm is not None, *sized(weight), *sized(bias), epsilon),
            out.data_ptr(),
            *(threads, self._parallel, self.level),
        )
        if failed:
            raise _error(failed, layers, threads)
        return out

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None, threads: int | None = None) -> Tensor:
        """The product x Wᵀ + bias with a dense matrix [rows, columns], for a few tokens `x` [..., columns]."""
        x, shape, stride = _as_tokens(x)
        out = torch.empty(*shape, weight.shape[0])
        self._dense(
            *(x.data_ptr(), math.prod(shape), stride, weight.data_ptr(), *weight.shape),
            *(None if bias is None else bias.data_ptr(), out.data_ptr()),
            *(threads or torch.get_num_threads(), self._parallel, self.level),
        )
        return out

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        is_causal: bool = False,
        threads: int | None = None,
    ) -> Tensor:
        """softmax(scale · q kᵀ + mask) v, as [rows, tokens, heads, features]; 0 for a query that sees no key.

        Args:
            q: float32 [rows, heads, tokens, features], as `k` and `v`, each with contiguous features.
            k: the keys; they may have fewer heads, each for as many heads of `q` in a row.
            v: the values, with as many heads as `k`.
            mask: [rows, heads, queries, keys]: bool, True for keys that are seen, or float32, added to the scores.
            scale: of the scores.
            is_causal: without a mask, whether a query sees the keys up to its own place alone.
            threads: PyTorch's number by default.
        """
        rows, heads, queries, features = q.shape
        keys, value_features = v.shape[2:]
        threads = threads or torch.get_num_threads()
        out = torch.empty(rows, queries, heads, value_features)
        if not out.numel() or not keys:
            return out.zero_()
        given = Attention(Heads.of(q), Heads.of(k), Heads.of(v), out=out.data_ptr(), scale=scale)
        given.rows, given.heads, given.queries, given.keys = rows, heads, queries, keys
        given.features, given.value_features, given.sharing = features, value_features, heads // k.shape[1]
        given.set_mask(mask, is_causal=is_causal)
        if self._attention(ctypes.byref(given), threads, self._parallel, self.level):
            raise MemoryError(f"no memory for attention to {keys} tokens on {threads} threads; use fewer threads")
        return out

    def encode(self, x: Tensor, layers: Sequence[Encoder], mask: Tensor | None, threads: int | None = None) -> Tensor:
        """Encoder layers, one after the other, for tokens `x` [rows, tokens, features]; the mask is as for `attend`."""
        x, out, seen = x.contiguous(), torch.empty(x.shape), Attention()
        seen.set_mask(mask)
        threads = threads or torch.get_num_threads()
        failed = self._encoder(
            *(_pointers(layers), len(layers), x.data_ptr(), x.shape[0], x.shape[1]),
            *(ctypes.addressof(seen), out.data_ptr()),
            *(threads, self._parallel, self.level),
        )
        if failed:
            matrices = [one.contents for layer in layers for one in (layer.inward[0], layer.out)]
            raise _error(failed, matrices, threads)
        return out


def _as_tokens(x: Tensor) -> tuple[Tensor, Sequence[int], int]:
    """Tokens whose features are contiguous, the shape of the batch, and the floats between two tokens."""
    *shape, columns = x.shape
    if len(shape) == 1 and (columns <= 1 or x.stride(1) == 1):
        return x, shape, x.stride(0)
    return x.contiguous(), shape, columns  # evenly spaced, whatever the batch dimensions


def _pointers(layers: Sequence[Layer] | Sequence[Encoder]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))


def _error(failed: int, layers: Sequence[Layer], threads: int) -> Exception:
    if failed == _NO_MEMORY:
        columns = max(layer.columns_in for layer in layers)
        return MemoryError(f"no memory for tokens of {columns} features on {threads} threads; use fewer threads")
    sizes = ", ".join(f"{one.rows} × {one.columns_in} weights in panels of {one.width} columns" for one in layers)
    return ValueError(f"the arrays of a sparse matrix do not fit {sizes}; they were changed after sparsify made them")


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
    found = installed()
    return found if found is not None else build(_cached()) or _load(_cached())


@functools.cache
def installed() -> SparseKernel | str | None:
    """The same, and `None` where it would have to be compiled first."""
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
    return _load(_cached()) if _cached().exists() else None


def _cached() -> Path:
    """Where the kernel is that was compiled on this machine."""
    return cache_folder() / f"sparse-{platform.machine()}-{source_digest()}.so"


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
