"""The compiled kernel against float64, at every instruction set that this machine runs; also run under sanitizers.

The bound is that of float32 sums: an error is small beside the sum of the absolute terms, whatever cancels.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernel_levels import HERE, at, levels, needs_kernel
from platon.deploy import sparse_kernel
from platon.deploy.sparse_kernel import LEVELS, SparseKernel
from platon.deploy.sparse_matrix import ROW_BLOCK, WIDEST, from_dense, panel_width, to_dense

pytestmark = needs_kernel

ORACLE = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def draw(rows: int, columns: int, tokens: int, density: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A sparse matrix, a bias and tokens."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random)
    weight[torch.rand(rows, columns, generator=random) >= density] = 0
    return weight, torch.randn(rows, generator=random), torch.randn(tokens, columns, generator=random)


def assert_right(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
    """Within a few roundings of the float64 result; none of the activations is steeper than 1.13."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(weight.shape[0]).double() if bias is None else bias.double()
    want = ORACLE[activation](x @ weight.t() + bias)
    terms = x.abs() @ weight.abs().t() + bias.abs()
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert bool(((got - want).abs() <= 3e-6 * terms + 1e-30).all()), ((got - want).abs() - 3e-6 * terms).max()


# --- the product ------------------------------------------------------------------------------------------------------


@levels
@given(
    rows=st.integers(0, 150),
    columns=st.integers(0, 520),
    tokens=st.integers(0, 140),
    density=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
    activation=st.sampled_from(sorted(ORACLE)),
    has_bias=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_any_shape_and_density(
    level: int,
    rows: int,
    columns: int,
    tokens: int,
    density: float,
    activation: str,
    has_bias: bool,
    threads: int,
    seed: int,
) -> None:
    weight, bias, x = draw(rows, columns, tokens, density, seed)
    given_bias = bias if has_bias else None
    got = at(level).linear(x, from_dense(weight), given_bias, activation, threads=threads)
    assert_right(got, x, weight, given_bias, activation)


@levels
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 200])
def test_every_tile_and_tail(level: int, tokens: int) -> None:
    weight, bias, x = draw(130, 300, tokens, 0.2)
    assert_right(at(level).linear(x, from_dense(weight), bias, "gelu"), x, weight, bias, "gelu")


@levels
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 300])
@pytest.mark.parametrize("tokens", [3, 64, 200])
def test_several_threads_give_the_same_bits(level: int, threads: int, tokens: int) -> None:
    """Big enough for all of them to be used, and uneven: a third of the rows holds nearly all of the weights."""
    weight, bias, x = draw(900, 700, tokens, 0.4)
    weight[300:] *= torch.rand(600, 700, generator=torch.Generator().manual_seed(1)) < 0.02
    packed = from_dense(weight)
    got = at(level).linear(x, packed, bias, threads=threads)
    assert_right(got, x, weight, bias)
    assert torch.equal(got, at(level).linear(x, packed, bias, threads=1))


@levels
@pytest.mark.parametrize("density", [0.03, 0.2, 0.6])
@pytest.mark.parametrize("tokens", [1, 40])
def test_only_what_a_row_keeps_is_read(level: int, tokens: int, density: float) -> None:
    """Several weights are multiplied at once: what the next row keeps must not reach this one."""
    weight, bias, x = draw(130, 300, tokens, density)
    for column, number in ((5, torch.nan), (200, torch.inf)):
        x[:, column] = number
    got = at(level).linear(x, from_dense(weight), bias)
    untouched = (weight[:, 5] == 0) & (weight[:, 200] == 0)
    assert 0 < int(untouched.sum()) < 130
    assert_right(got[:, untouched], x.nan_to_num(0, 0), weight[untouched], bias[untouched])
    assert not got[:, ~untouched].isfinite().any()


@levels
@pytest.mark.parametrize("width", [1, 33, 64, 65, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("density", [0.02, 0.1, 1.0])
def test_one_token_and_panels_of_any_width(level: int, width: int, density: float) -> None:
    weight, bias, x = draw(70, 2 * width + 1, 1, density)
    assert_right(at(level).linear(x, from_dense(weight, width), bias), x, weight, bias)


def test_without_openmp_one_thread_does_it_all() -> None:
    alone = at(HERE[-1])
    alone._parallel = None
    weight, bias, x = draw(900, 700, 130, 0.4)
    assert_right(alone.linear(x, from_dense(weight), bias, threads=4), x, weight, bias)


def test_empty_rows_and_matrices() -> None:
    weight, bias, x = draw(200, 300, 40, 0.3)
    weight[7] = weight[64:128] = weight[:, 100:] = 0
    for matrix in (weight, torch.zeros_like(weight)):
        assert_right(at(HERE[-1]).linear(x, from_dense(matrix), bias), x, matrix, bias)
    one = torch.zeros_like(weight)
    one[199, 299] = 2.5
    assert_right(at(HERE[-1]).linear(x, from_dense(one), None), x, one, None)


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other": lambda x: torch.repeat_interleave(x, 2, 1)[:, ::2],
    "a slice of wider tokens": lambda x: F.pad(x, (3, 5))[:, 3:-5],
    "every third token": lambda x: torch.repeat_interleave(x, 3, 0)[::3],
    "one token, repeated": lambda x: x[:1].expand(50, -1),
    "batches": lambda x: x.view(5, 2, 5, -1),
    "swapped batches": lambda x: x.view(5, 10, -1).transpose(0, 1),
    "no batch": lambda x: x[0],
    "no tokens": lambda x: x[:0],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(view: str) -> None:
    weight, bias, x = draw(70, 260, 50, 0.2)
    seen = VIEWS[view](x)
    got = at(HERE[-1]).linear(seen, from_dense(weight), bias)
    assert got.shape == (*seen.shape[:-1], 70)
    assert_right(got.view(-1, 70), seen.reshape(-1, 260), weight, bias)


@levels
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_activations_to_the_last_digits(level: int, activation: str) -> None:
    x = torch.cat([torch.linspace(-14, 14, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])])[:, None]
    got = at(level).linear(x, from_dense(torch.ones(1, 1)), None, activation)
    want = ORACLE[activation](x.double())
    assert bool(((got - want).abs() <= 3e-6 * want.abs() + 3e-7 * x.abs().clamp(max=8)).all())
    special = torch.tensor([[float("nan")], [float("inf")]])
    out = at(level).linear(special, from_dense(torch.ones(1, 1)), None, activation).flatten()
    assert out[0].isnan()
    assert out[1] == float("inf")


# --- the packed matrix ------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(0, 150),
    columns=st.integers(0, 600),
    density=st.floats(0, 1),
    width=st.sampled_from([None, 7, 256]),
)
def test_packing_loses_nothing(rows: int, columns: int, density: float, width: int | None) -> None:
    weight, _, _ = draw(rows, columns, 0, density)
    packed = from_dense(weight, width)
    assert torch.equal(to_dense(packed), weight)
    assert packed.values.numel() == packed.columns.numel() == int(weight.count_nonzero())
    assert 1 <= packed.width <= WIDEST
    assert packed.counts.numel() % ROW_BLOCK == 0


def test_a_part_is_at_most_a_byte_wide() -> None:
    for columns, kept in itertools.product((0, 1, 191, 192, 193, 255, 257, 768, 3072, 5000), (0.0, 0.05, 0.1, 1.0)):
        width = panel_width(columns, kept)
        assert 1 <= width <= WIDEST
        assert width * -(-columns // width) - columns < -(-columns // width) + 1, "parts are equally wide"
    assert panel_width(3072, 0.05) > panel_width(3072, 0.1), "a row with few non-zeros is divided less"


@pytest.mark.parametrize(("rows", "columns"), [(768, 3072), (3072, 768), (768, 768), (384, 384), (1536, 384)])
def test_a_tenth_takes_less_than_a_quarter_of_the_bytes(rows: int, columns: int) -> None:
    weight, _, _ = draw(rows, columns, 0, 0.1)
    assert from_dense(weight).nbytes < 0.14 * weight.nbytes


# --- other builds -----------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(bool(os.environ.get("LD_PRELOAD")), reason="built and run once, without sanitizers")


@needs_compiler
@pytest.mark.skipif(len(HERE) < 2, reason="lowered to AVX2, which this machine has not")
def test_the_widest_variant_is_right_when_lowered(tmp_path: Path) -> None:
    """A machine without AVX-512 runs its source all the same: with AVX2 for instructions, only these are not shown."""
    problem = sparse_kernel.build(tmp_path / "lowered.so", '-DWIDEST="avx2,fma"')
    if problem:
        pytest.skip(problem)
    lowered = SparseKernel(tmp_path / "lowered.so")
    lowered.level = LEVELS.index("avx512")
    for tokens, activation in itertools.product([1, 16, 17, 32, 33, 64, 100, 192], ORACLE):
        weight, bias, x = draw(130, 300, tokens, 0.2)
        assert_right(lowered.linear(x, from_dense(weight), bias, activation, threads=2), x, weight, bias, activation)


@needs_compiler
@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """This file's other tests, on a build that checks every address and every undefined operation."""
    library = tmp_path / "checked.so"
    flags = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-shared-libasan")
    problem = sparse_kernel.build(library, *flags) and sparse_kernel.build(library, *flags[:-1])
    if problem:
        pytest.skip(problem)
    compiler = os.environ.get("CC") or "cc"
    names = ("libasan.so", "libubsan.so")
    runtime = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = {
        **os.environ,
        "PLATON_KERNEL": str(library),
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-s", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
