"""The fused passes against their eager twins, and the bits that masks are kept in.

Updates agree bit for bit. Scores agree bit for bit among the passes of one kind, which is what makes a selection exact:
the cut is taken in one pass and applied in another. Between the kinds they differ in the last digits, because eager
square roots come from a library that does not always round to the nearest.

One test a pass, over all its sizes, so that each is compiled once.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import platon
from platon.engine.ranking import compiling, scored
from platon.engine.ranking.bits import PIECE, pack, unpack, zero_pruned
from platon.engine.ranking.compiling import worth_compiling
from platon.engine.ranking.passes import BLOCK
from platon.engine.ranking.scored import ScoredWeights, block_values, names_read, preview, values_at
from platon.engine.ranking.select import find_cut

CPU = torch.device("cpu")
SIZES = [1000, 2 * BLOCK, 2 * BLOCK + 1, 4096, 2 * PIECE + 77]  # blocks, bytes and pieces, met and missed
PIVOTS = torch.tensor([1e-1, 1e-4, 1e-38])

needs_compiler = pytest.mark.skipif(not compiling.can_compile("cpu"), reason="no C++ compiler for torch.compile")


def make(
    score: platon.Score, size: int, dtype: torch.dtype, fused: bool, start: int = 0
) -> tuple[ScoredWeights, Tensor]:
    """A matrix in the middle of its training, the same one each time, and a gradient.

    Scores reach from 0 over denormal numbers to 1e8, and equal ones are among them.
    """
    source = torch.Generator().manual_seed(size)

    def numbers() -> Tensor:
        powers = torch.randint(-44, 4, (size,), generator=source).float()
        wide = torch.randn(size, generator=source) * 10**powers
        few = torch.randint(0, 4, (size,), generator=source) / 4
        return torch.where(torch.rand(size, generator=source) < 0.5, wide, few)

    weight, gradient = numbers().to(dtype), numbers().to(dtype)
    state = score.init(size, CPU)
    for tensor in state.values():
        tensor.copy_(numbers().abs() if tensor.dim() else torch.tensor(2.0))
    return ScoredWeights(score, weight, state, start, fused), gradient


def twins(
    score: platon.Score, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[ScoredWeights, ScoredWeights, Tensor]]:
    """Fused and eager, with their gradient, at all sizes."""
    for size in SIZES:
        fused, gradient = make(score, size, dtype, fused=True)
        yield fused, make(score, size, dtype, fused=False)[0], gradient


def same_state(one: ScoredWeights, other: ScoredWeights) -> bool:
    return one.state.keys() == other.state.keys() and all(torch.equal(one.state[k], other.state[k]) for k in one.state)


def all_values(matrix: ScoredWeights) -> Tensor:
    return values_at([matrix], [torch.arange(matrix.size)])


# --- fused and eager --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("window", [1, 3])
def test_update(window: int) -> None:
    for fused, eager, gradient in twins(platon.Platon(window=window)):
        for _ in range(3):
            fused.update(gradient, 0)
            eager.update(gradient, 0)
            assert same_state(fused, eager)


@needs_compiler
@pytest.mark.parametrize(
    ("window", "phase", "dtype"), [(1, 0, torch.float32), (1, 0, torch.bfloat16), (3, 1, torch.float32)]
)
def test_update_and_count(window: int, phase: int, dtype: torch.dtype) -> None:
    for fused, eager, gradient in twins(platon.Platon(window=window), dtype):
        for matrix in (fused, eager):
            found = matrix.update(gradient, phase, PIVOTS)
            assert found.tolist() == [int((all_values(matrix) >= pivot).sum()) for pivot in PIVOTS]
            assert found[1] > found[0] > 0
        assert same_state(fused, eager)


@needs_compiler
def test_values() -> None:
    for fused, eager, _ in twins(platon.Platon(window=1)):
        # Two square roots that may each be the next number but one, and a product: a few parts in 2²⁴. Denormal numbers
        # are coarser than that.
        torch.testing.assert_close(all_values(fused), all_values(eager), rtol=4e-7, atol=3e-45)


@needs_compiler
def test_count() -> None:
    for matrix in (matrix for fused, eager, _ in twins(platon.Platon(window=1)) for matrix in (fused, eager)):
        value = all_values(matrix)
        for pivots in (PIVOTS, value[:3], value[-3:], torch.tensor([torch.inf, 0.0, -torch.inf])):
            assert matrix.count(pivots)[:-1].tolist() == [int((value >= pivot).sum()) for pivot in pivots]


@needs_compiler
def test_bracket() -> None:
    for matrix in (matrix for fused, eager, _ in twins(platon.Platon(window=1)) for matrix in (fused, eager)):
        value = all_values(matrix)
        for low, high in [(PIVOTS[1], PIVOTS[0]), (value[3], value[3]), (value[-1], value[-1]), (PIVOTS[0], PIVOTS[1])]:
            inside = (value >= low) & (value <= high)
            blocks = torch.nn.functional.pad(inside.float(), (0, -matrix.size % BLOCK)).view(-1, BLOCK).sum(1)
            numbers, within = matrix.bracket(low, high)
            assert numbers[:3].tolist() == [int((value > high).sum()), int(inside.sum()), int((blocks > 0).sum())]
            assert torch.equal(within, blocks)


@needs_compiler
@pytest.mark.parametrize(
    ("score", "dtype"),
    [(platon.Platon(window=1), torch.float32), (platon.Magnitude(), torch.bfloat16)],
    ids=["32", "16"],
)
def test_mask(score: platon.Score, dtype: torch.dtype) -> None:
    for matrix in (matrix for fused, eager, _ in twins(score, dtype) for matrix in (fused, eager)):
        size = matrix.size
        value, before = all_values(matrix), matrix.weight.clone()
        cut = value.median()
        after = torch.nextafter(cut, torch.tensor(torch.inf))
        last = torch.tensor(size // 3, dtype=torch.int32)
        kept = torch.where(torch.arange(size) < last, value >= cut, value > cut)
        bits, scratch = torch.full((-(-size // 8),), 0xFF, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        matrix.mask(cut, after, last, bits, scratch)
        assert torch.equal(unpack(bits, size), kept)
        assert torch.equal(matrix.weight, torch.where(kept, before, 0))
        assert matrix.weight.dtype == dtype


@needs_compiler
@pytest.mark.parametrize("fused", [True, False])
def test_selection_is_exact(fused: bool) -> None:
    """All passes in a row, at cuts of every kind: among large, equal, small, denormal scores and zeros."""
    total = sum(size for size, _ in _places())
    for k in [1, *range(3001, total, 8111), total]:
        shards = [make(platon.Platon(window=1), size, torch.float32, fused, start)[0] for size, start in _places()]
        value = torch.cat([all_values(shard) for shard in shards])
        bits = [torch.zeros(-(-shard.size // 8), dtype=torch.uint8) for shard in shards]
        find_cut(shards, k, total).apply(shards, bits)
        kept = torch.cat([unpack(b, shard.size) for b, shard in zip(bits, shards, strict=True)])
        expected = torch.zeros_like(kept)
        expected[value.sort(descending=True, stable=True).indices[:k]] = True
        assert torch.equal(kept, expected), f"k = {k}"


def _places() -> Iterator[tuple[int, int]]:
    start = 0
    for size in (40_000, 1000, 4096, 70_001):
        yield size, start
        start += size


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("size", [0, 1])
def test_fused_passes_on_nothing_and_on_one_weight(size: int, window: int) -> None:
    # The compiler makes code of its own for these two sizes. A rank's shard may have either.
    score = platon.Platon(window=window)
    fused, gradient = make(score, size, torch.float32, fused=True)
    eager, _ = make(score, size, torch.float32, fused=False)
    for phase in (0, 1) if window > 1 else (0,):
        fused.update(gradient, phase)
        eager.update(gradient, phase)
        assert torch.equal(fused.update(gradient, phase, PIVOTS), eager.update(gradient, phase, PIVOTS))
        assert same_state(fused, eager)
    assert torch.equal(fused.count(PIVOTS), eager.count(PIVOTS))
    for one, other in zip(fused.bracket(PIVOTS[1], PIVOTS[0]), eager.bracket(PIVOTS[1], PIVOTS[0]), strict=True):
        assert torch.equal(one, other)
    for matrix in (fused, eager):
        bits = torch.zeros(size, dtype=torch.uint8)
        scratch = torch.empty(size, dtype=torch.uint8)
        matrix.mask(PIVOTS[1], PIVOTS[0], torch.tensor(size, dtype=torch.int32), bits, scratch)
    assert torch.equal(fused.weight, eager.weight)


# --- eager, in pieces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("window", [1, 3])
def test_pieces_do_what_the_whole_does(window: int, phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    score = platon.Platon(window=window)
    found = []
    for piece in (BLOCK, 1 << 20):
        monkeypatch.setattr(scored, "PIECE", piece)
        matrix, gradient = make(score, 1000, torch.float32, fused=False)
        counts = matrix.update(gradient, phase, PIVOTS)
        numbers, within = matrix.bracket(PIVOTS[1], PIVOTS[0])
        bits = torch.zeros(125, dtype=torch.uint8)
        matrix.mask(
            PIVOTS[0], PIVOTS[0], torch.tensor(500, dtype=torch.int32), bits, torch.empty(1000, dtype=torch.uint8)
        )
        found.append([counts, numbers, within, bits, matrix.weight, *matrix.state.values()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("window", [1, 3])
def test_preview_sees_what_update_will_bring(window: int, phase: int) -> None:
    score = platon.Platon(window=window)
    made = [make(score, size, torch.float32, fused=False) for size in (500, 70, 1)]
    matrices, gradients = [m for m, _ in made], [g for _, g in made]
    gradients[1] = None
    index = [torch.arange(0, matrix.size, 3) for matrix in matrices]
    states = [{name: tensor.clone() for name, tensor in matrix.state.items()} for matrix in matrices]
    found = preview(matrices, index, gradients, phase)
    for matrix, state in zip(matrices, states, strict=True):
        assert all(torch.equal(matrix.state[name], state[name]) for name in state)  # nothing has changed
    for matrix, gradient in zip(matrices, gradients, strict=True):
        matrix.update(gradient, phase)
    # Matrices without a gradient come last; as a sample it has no order.
    assert torch.equal(found, values_at([matrices[i] for i in (0, 2, 1)], [index[i] for i in (0, 2, 1)]))


def test_block_values_ends_in_nan() -> None:
    matrix, _ = make(platon.Platon(window=1), 150, torch.float32, fused=False)
    value = values_at([matrix], [torch.arange(150)])
    rows = block_values([matrix], [torch.tensor([2, 0])])
    assert torch.equal(rows[1], value[:64])
    assert torch.equal(rows[0, :22], value[128:])
    assert rows[0, 22:].isnan().all()


# --- bits -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=200))
def test_pack_and_unpack(kept: list[bool]) -> None:
    mask = torch.tensor(kept, dtype=torch.bool)
    bits = pack(mask)
    assert bits.dtype == torch.uint8
    assert bits.tolist() == [sum(bit << j for j, bit in enumerate(kept[i : i + 8])) for i in range(0, len(kept), 8)]
    assert torch.equal(unpack(bits, len(kept)), mask)
    out = torch.full_like(bits, 0x55)
    pack(mask.to(torch.uint8), out)
    assert torch.equal(out, bits)


@pytest.mark.parametrize("size", [1, 8, 1001, 2 * PIECE + 3])
def test_zero_pruned(size: int) -> None:
    source = torch.Generator().manual_seed(0)
    mask = torch.rand(size, generator=source) < 0.3
    weight = torch.ones(size)
    zero_pruned(weight, pack(mask))
    assert torch.equal(weight, mask.float())


# --- the choice -------------------------------------------------------------------------------------------------------


def test_compiling_is_chosen_by_size() -> None:
    assert not worth_compiling(compiling.COMPILE_FROM - 1, CPU)
    assert worth_compiling(compiling.COMPILE_FROM, CPU) == compiling.can_compile("cpu")
    assert worth_compiling(100 * compiling.COMPILE_FROM, CPU) == compiling.can_compile("cpu")


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """`can_compile` remembers its answer; forget it before and after."""
    compiling.can_compile.cache_clear()
    yield
    compiling.can_compile.cache_clear()


@pytest.mark.usefixtures("fresh_probe")
def test_no_compiler_no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert not worth_compiling(compiling.COMPILE_FROM, CPU)


@pytest.mark.usefixtures("fresh_probe")
def test_a_broken_compiler_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(compiling, "_compile", fail)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/c++")
    assert not worth_compiling(compiling.COMPILE_FROM, CPU)


@pytest.mark.usefixtures("fresh_probe")
def test_the_choice_is_the_same_each_time_and_random_state_stays() -> None:
    before = torch.get_rng_state()
    answers = []
    threads = torch.get_num_threads()
    for number in (1, 2):
        compiling.can_compile.cache_clear()
        torch.set_num_threads(number)
        answers.append(worth_compiling(compiling.COMPILE_FROM, CPU))
    torch.set_num_threads(threads)
    assert answers[0] == answers[1]
    assert torch.equal(torch.get_rng_state(), before)


@dataclass(frozen=True)
class _Stacked(platon.Score):
    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        return torch.stack([weight, weight]).amax(0)


@dataclass(frozen=True)
class _Unchanged(platon.Score):
    def value(self, state: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        return weight


def test_what_a_score_reads_is_known() -> None:
    """The empty name stands for the weights."""
    assert names_read(platon.Platon()) == ("sensitivity", "uncertainty")
    assert names_read(platon.Movement()) == names_read(platon.HardConcrete()) == ("score",)
    assert names_read(platon.Magnitude()) == names_read(_Stacked()) == names_read(_Unchanged()) == ("",)
