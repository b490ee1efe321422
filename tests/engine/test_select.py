"""Exact selection against a brute-force stable sort; what it reads from the device; shards on two real processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import forked
import platon
from platon.engine.ranking.bits import unpack
from platon.engine.ranking.scored import ScoredWeights
from platon.engine.ranking.select import Cut, Ranks, find_cut, pick_pivots, sample_index
from platon.engine.score import Score

LEAST = float(np.float32(1e-45))  # the smallest denormal float32


@dataclass(frozen=True)
class Given(Score):
    """Scores as they are given: any number, also negative and infinite ones."""

    def value(self, state: dict[str, Tensor], weight: Tensor) -> Tensor:
        """What the state holds."""
        return state["given"]


def shard(scores: Tensor, sizes: list[int]) -> list[ScoredWeights]:
    """One flat tensor of scores as many matrices; every weight is 1, so that what is zeroed can be seen."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert starts[-1] == scores.numel()
    return [
        ScoredWeights(Given(), torch.ones(size), {"given": scores[start : start + size]}, int(start))
        for start, size in zip(starts, sizes, strict=False)
    ]


def keep(shards: list[ScoredWeights], cut: Cut) -> Tensor:
    """Who stays, by the bits; the weights must say the same."""
    bits = [torch.full((-(-matrix.size // 8),), 0xAA, dtype=torch.uint8) for matrix in shards]
    cut.apply(shards, bits)
    kept = torch.cat([unpack(packed, matrix.size) for packed, matrix in zip(bits, shards, strict=True)])
    assert torch.equal(torch.cat([matrix.weight for matrix in shards]), kept.float())
    return kept


def sort_and_keep(scores: Tensor, k: int) -> Tensor:
    """The k best: sorted, and equal ones in the order in which they stand."""
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.sort(descending=True, stable=True).indices[:k]] = True
    return kept


def check(scores: Tensor, sizes: list[int], ks: list[int]) -> None:
    ranking = scores.sort(descending=True, stable=True)
    for k in ks:
        shards = shard(scores, sizes)
        cut = find_cut(shards, k, scores.numel())
        kept = keep(shards, cut)
        expected = torch.zeros_like(kept)
        expected[ranking.indices[:k]] = True
        assert int(kept.sum()) == k
        assert torch.equal(kept, expected), f"k = {k} of {sizes}"
        assert cut.value == ranking.values[k - 1]
        assert cut.position == ranking.indices[k - 1]


def some_ks(n: int, share: float) -> list[int]:
    """The ends, the middle, and one where the share says."""
    return sorted({1, n, max(1, n // 2), max(1, min(n, round(share * n)))})


# --- scores of many kinds ---------------------------------------------------------------------------------------------

Kind = Callable[[np.random.Generator, int], np.ndarray]


def smooth(random: np.random.Generator, n: int) -> np.ndarray:
    return random.random(n)


def negative(random: np.random.Generator, n: int) -> np.ndarray:
    return random.normal(size=n)


def heavy_tailed(random: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(12 * random.normal(size=n).clip(-6, 6))


def all_equal(random: np.random.Generator, n: int) -> np.ndarray:
    return np.full(n, random.choice([0.0, -0.0, 1.0, -3.5, LEAST, math.inf, -math.inf]))


def discrete(random: np.random.Generator, n: int) -> np.ndarray:
    return random.integers(0, random.integers(1, 9), n) / 4


def mostly_zero(random: np.random.Generator, n: int) -> np.ndarray:
    return random.random(n) * (random.random(n) < 0.05)


def denormal(random: np.random.Generator, n: int) -> np.ndarray:
    return random.integers(0, 1000, n) * LEAST


def signed_zeros(random: np.random.Generator, n: int) -> np.ndarray:
    return random.choice([0.0, -0.0, LEAST, -LEAST], n)


def infinite(random: np.random.Generator, n: int) -> np.ndarray:
    values = random.normal(size=n)
    return np.where(random.random(n) < 0.4, random.choice([math.inf, -math.inf], n), values)


def two_heaps(random: np.random.Generator, n: int) -> np.ndarray:
    """Kept and pruned weights after a while of pruning: far apart, nothing between."""
    return np.where(random.random(n) < random.choice([0.1, 0.5, 0.9]), 1 + random.random(n), 1e-9 * random.random(n))


def ascending(random: np.random.Generator, n: int) -> np.ndarray:
    return np.arange(n) / n


def descending(random: np.random.Generator, n: int) -> np.ndarray:
    return -np.arange(n) / n


def periodic(random: np.random.Generator, n: int) -> np.ndarray:
    return (np.arange(n) % random.integers(2, 300)) + 0.0


def one_cluster(random: np.random.Generator, n: int) -> np.ndarray:
    """Very many scores within a few float32 numbers of each other, among wide ones."""
    near = 1 + random.integers(0, 4, n) * 2.0**-23
    return np.where(random.random(n) < 0.8, near, random.random(n) * 2)


KINDS: list[Kind] = [
    smooth,
    negative,
    heavy_tailed,
    all_equal,
    discrete,
    mostly_zero,
    denormal,
    signed_zeros,
    infinite,
    two_heaps,
    ascending,
    descending,
    periodic,
    one_cluster,
]


def make_scores(kind: Kind, n: int, seed: int = 0) -> Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(kind(np.random.default_rng(seed), n).astype(np.float32))


def split(n: int, parts: int, seed: int) -> list[int]:
    """Sizes of so many matrices, uneven, empty ones among them."""
    inner = np.sort(np.random.default_rng(seed).integers(0, n + 1, parts - 1))
    return np.diff(np.concatenate([[0], inner, [n]])).tolist()


# --- against the sort -------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=True), min_size=1, max_size=80),
    parts=st.integers(1, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
@example(values=[0.0], parts=1, share=1.0, seed=0)
@example(values=[math.inf] * 5, parts=1, share=0.4, seed=0)
@example(values=[-math.inf] * 5, parts=1, share=0.4, seed=0)
@example(values=[0.0, -0.0, 0.0, -0.0], parts=2, share=0.5, seed=0)
def test_any_floats(values: list[float], parts: int, share: float, seed: int) -> None:
    check(torch.tensor(values), split(len(values), parts, seed), some_ks(len(values), share))


@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 4096),
    parts=st.integers(1, 6),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_few_enough_to_collect(kind: Kind, n: int, parts: int, share: float, seed: int) -> None:
    check(make_scores(kind, n, seed), split(n, parts, seed), some_ks(n, share))


@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(4097, 40_000),
    parts=st.integers(1, 6),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_sample_and_bracket(kind: Kind, n: int, parts: int, share: float, seed: int) -> None:
    # More than 4096 scores go through sample, bracket and search.
    check(make_scores(kind, n, seed), split(n, parts, seed), some_ks(n, share))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [131_072, 300_007])
def test_several_pieces(kind: Kind, n: int) -> None:
    # Eager passes work through 131,072 elements at a time.
    check(make_scores(kind, n), split(n, 3, 1), [1, n // 10, n - 1])


@pytest.mark.parametrize("kind", [smooth, heavy_tailed, mostly_zero, all_equal, two_heaps, denormal])
def test_a_million(kind: Kind) -> None:
    n = 1_000_003
    check(make_scores(kind, n), split(n, 4, 2), [1, n // 5, n])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_million(kind: Kind) -> None:
    n = 10_000_019
    check(make_scores(kind, n), split(n, 7, 3), [1, n // 10, n // 2, n - 1, n])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 4095, 4096, 4097, 8191, 131_073])
def test_sizes_around_blocks_bytes_and_pieces(n: int) -> None:
    for kind in (smooth, discrete):
        check(make_scores(kind, n), [n], some_ks(n, 0.3))


@pytest.mark.parametrize("n", [1, 300, 4500])
def test_many_matrices_of_one_weight(n: int) -> None:
    check(make_scores(discrete, n, 5), [1] * n, [max(1, n // 3)])


@pytest.mark.parametrize("others", [0, 1, 5000])
@pytest.mark.parametrize("equal", [4097, 20_000])
def test_more_ties_at_the_cut_than_can_be_collected(equal: int, others: int) -> None:
    scores = torch.cat([torch.rand(others, generator=torch.Generator().manual_seed(0)) + 1, torch.full((equal,), 0.5)])
    scores = scores[torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(1))]
    n = scores.numel()
    check(scores, split(n, 4, 4), [others + 1, others + equal // 2, n])


def test_more_ties_than_can_be_collected_among_large_scores() -> None:
    n = 3_000_000  # room for 5859 candidates
    scores = make_scores(smooth, n)
    scores[::7] = 0.25
    check(scores, split(n, 3, 5), [int((scores > 0.25).sum()) + 6000])


@pytest.mark.parametrize("k", [1000, 30_000])
def test_a_gap_exactly_at_k(k: int) -> None:
    n = 60_000
    scores = torch.full((n,), 1e-12) * make_scores(smooth, n)
    large = torch.randperm(n, generator=torch.Generator().manual_seed(2))[:k]
    scores[large] = 1 + make_scores(smooth, k, 1)
    check(scores, split(n, 3, 6), [k - 1, k, k + 1])


@pytest.mark.parametrize("n", [30_000, 700_001])
def test_large_scores_hidden_from_the_sample(n: int) -> None:
    """The sample sees only small scores, as if the cut were far below where it is."""
    scores = 1 + make_scores(smooth, n)
    scores[sample_index(n, n, scores.device)] *= 1e-6
    check(scores, [n], [1, n // 10, n // 2, n - 1])


@pytest.mark.parametrize("n", [30_000, 700_001])
def test_the_sample_sees_one_value_only(n: int) -> None:
    scores = make_scores(smooth, n)
    scores[sample_index(n, n, scores.device)] = 0.5
    check(scores, [n], [1, n // 10, n // 2, n // 2 + 2, n - 1])


@pytest.mark.parametrize("n", [30_000, 700_001])
def test_the_sample_is_upside_down(n: int) -> None:
    """Between any two sampled scores lies the opposite of what they promise."""
    scores = make_scores(ascending, n)
    index = sample_index(n, n, scores.device)
    scores[index] = 1 - scores[index]
    check(scores, [n], [1, n // 3, n - 1])


@pytest.mark.parametrize("k", [1, 5000, 9000, 9999])
def test_wrong_pivots_cost_passes_and_not_the_result(k: int) -> None:
    """The pruner hands in pivots from a preview; here they come from scores of another world."""
    n = 10_000
    scores = make_scores(smooth, n)
    pivots = pick_pivots(make_scores(heavy_tailed, 2000, 3)[None], k, n)
    shards = shard(scores, [n])
    counts = torch.tensor([int((scores >= pivot).sum()) for pivot in pivots.value[0]])[None]
    assert torch.equal(keep(shards, find_cut(shards, k, n, pivots.counted(counts))), sort_and_keep(scores, k))


@pytest.mark.parametrize("n", [700, 147_456])
@pytest.mark.parametrize("sizes", [1, 2])
def test_parts_are_cut_together_as_each_by_itself(n: int, sizes: int) -> None:
    """Also where some of them need a search, or have more equal scores at the cut than can be collected."""
    parts = [make_scores(kind, n, 3) for kind in (smooth, all_equal, heavy_tailed, mostly_zero, infinite)]
    own = [n] if sizes == 1 else [n // 3, n - n // 3]
    for k in (1, n // 10, n - 1):
        shards = shard(torch.cat(parts), own * len(parts))
        cut = find_cut(shards, k, n, parts=len(parts))
        assert torch.equal(keep(shards, cut), torch.cat([sort_and_keep(part, k) for part in parts]))
        assert cut.value.tolist() == [part.sort(descending=True).values[k - 1].item() for part in parts]


@pytest.mark.parametrize("k", [0, -1, 11])
def test_impossible_k(k: int) -> None:
    with pytest.raises(ValueError, match="k must be between 1 and the number of units, 10, got"):
        find_cut(shard(torch.rand(10), [10]), k, 10)


@pytest.mark.parametrize("n", [100, 20_000])
def test_nan_scores_have_no_order(n: int) -> None:
    scores = make_scores(smooth, n)
    scores[::2] = math.nan
    with pytest.raises(ValueError, match=r"a score of .* is NaN"):
        find_cut(shard(scores, [n]), n // 2 + 1, n)


# --- what it does not touch, and what it reads ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [smooth, all_equal])
def test_the_random_state_is_left_alone(kind: Kind) -> None:
    scores = make_scores(kind, 50_000)
    before = torch.get_rng_state()
    shards = shard(scores, [20_000, 30_000])
    keep(shards, find_cut(shards, 7000, 50_000))
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_are_only_read() -> None:
    scores = make_scores(smooth, 50_000)
    copy = scores.clone()
    shards = shard(scores, [50_000])
    keep(shards, find_cut(shards, 7000, 50_000))
    assert torch.equal(scores, copy)


class _Methods(TorchFunctionMode):
    """Python methods that wait for the device and give numbers to the host, each call one read.

    On a CPU `tolist` never reaches the dispatcher (it reads memory by itself), so it has to be seen here.
    """

    READS = frozenset(
        {"tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"}
    )

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name not in self.READS:
            return function(*args, **(kwargs or {}))
        self.reads.append(name)
        with torch.utils._python_dispatch._disable_current_modes():  # the same read, not one more
            return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Operators whose result, or its size, the host must wait for, however they were called."""

    READS = frozenset(
        {
            "_local_scalar_dense",
            "nonzero",
            "nonzero_numpy",
            "masked_select",
            "is_nonzero",
            "equal",
            "_unique2",
            "unique_consecutive",
            "unique_dim",
            "bincount",
        }
    )

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in self.READS:
            self.reads.append(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            # A mask as an index hides a `nonzero`.
            masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
            self.reads.extend(["index by mask"] * len(masks))
        return function(*args, **(kwargs or {}))


@contextmanager
def device_reads() -> Iterator[list[str]]:
    """The names of all reads of device memory by the host; copies between devices do not count, a CPU has none."""
    reads: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_Operators(reads))
        stack.enter_context(_Methods(reads))
        yield reads


def test_device_reads_are_seen() -> None:
    numbers = torch.arange(4.0)
    calls: dict[str, Callable[[], object]] = {
        "tolist": numbers.tolist,
        "item": lambda: numbers[0].item(),
        "__bool__": lambda: bool(numbers[0]),
        "__float__": lambda: float(numbers[0]),
        "__int__": lambda: int(numbers[0]),
        "nonzero": numbers.nonzero,
        "index by mask": lambda: numbers[numbers > 1],
        "masked_select": lambda: numbers.masked_select(numbers > 1),
        "equal": lambda: torch.equal(numbers, numbers),
    }
    for name, call in calls.items():
        with device_reads() as reads:
            call()
        assert reads == [name]


def test_selection_reads_the_device_once() -> None:
    scores = make_scores(heavy_tailed, 5_000_000)
    shards = shard(scores, [2_000_000, 0, 2_999_999, 1])
    bits = [torch.zeros(-(-matrix.size // 8), dtype=torch.uint8) for matrix in shards]
    with device_reads() as reads:
        find_cut(shards, 500_000, 5_000_000).apply(shards, bits)
    assert reads == ["tolist"]
    assert sum(int(matrix.weight.sum()) for matrix in shards) == 500_000


@pytest.mark.parametrize("timing", ["after", "before"])
def test_a_mask_step_of_the_pruner_reads_the_device_once(timing: str) -> None:
    """Beyond the look for non-finite gradients, which has to come before the optimizer moves."""
    source = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(1000, 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = platon.Units({"weight": model.weight})
    score = platon.Platon(timing=timing, window=1)
    platon.Pruner(model, optimizer, score=score, schedule=platon.Constant(0.1), units=units)
    for step in range(1, 6):
        model.weight.grad = torch.randn(500, 1000, generator=source)
        with device_reads() as reads:
            optimizer.step()
        if step > 1:  # the first one also makes sure that the optimizer leaves the gradients alone
            assert reads == ["__bool__", "tolist"]
    assert int((model.weight != 0).sum()) == 50_000


# --- two processes ----------------------------------------------------------------------------------------------------

# name: kind, matrices (rows, columns, rows on rank 0), ks
SHARDED: dict[str, tuple[Kind, list[tuple[int, int, int]], list[int]]] = {
    "smooth": (smooth, [(500, 40, 123), (300, 77, 300), (10, 10, 0)], [1, 4000, 43_200]),
    "heavy": (heavy_tailed, [(500, 40, 499), (300, 77, 1)], [5, 20_000, 43_000]),
    "equal": (all_equal, [(500, 40, 250), (10, 10, 10), (300, 77, 100)], [1, 9999, 10_000, 20_050, 30_000]),
    "discrete": (discrete, [(200, 100, 7), (1, 3, 1), (100, 99, 50)], [1, 12_345, 29_903]),
    "negative": (negative, [(100, 100, 0), (100, 100, 100)], [500, 10_000, 15_000]),
    "zeros": (mostly_zero, [(300, 100, 11), (300, 100, 290)], [1000, 40_000]),
    "infinite": (infinite, [(100, 100, 60), (50, 100, 20)], [100, 7500, 14_999]),
    "few": (discrete, [(3, 5, 1), (1, 1, 0), (4, 2, 4)], [1, 5, 24]),
    "parts": (smooth, [(200, 100, 7)] * 3, [1, 4000, 19_999]),
    "equal parts": (all_equal, [(200, 100, 120)] * 2, [1, 4000]),
    "parts of one rank": (heavy_tailed, [(80, 100, 0)] * 2, [100, 7999]),
}


def shard_for_rank(name: str, rank: int | None) -> list[ScoredWeights]:
    """One rank's rows of every matrix, or the whole matrices for `None`."""
    kind, matrices, _ = SHARDED[name]
    scores = make_scores(kind, sum(rows * columns for rows, columns, _ in matrices), 11)
    found, start = [], 0
    for rows, columns, first in matrices:
        ends = {None: (0, rows), 0: (0, first), 1: (first, rows)}[rank]
        low, high = (start + row * columns for row in ends)
        found.append(ScoredWeights(Given(), torch.ones(high - low), {"given": scores[low:high]}, low))
        start += rows * columns
    return found


def cuts_of_rank(rank: int | None, ranks: Ranks) -> dict[str, list[tuple[list[float], list[int], list[Tensor]]]]:
    """For every case and k: the cut, its position, and each matrix's mask."""
    found: dict[str, list[tuple[list[float], list[int], list[Tensor]]]] = {}
    for name, (_, matrices, ks) in SHARDED.items():
        parts = len(matrices) if "parts" in name else 1  # each matrix by itself
        total = sum(rows * columns for rows, columns, _ in matrices) // parts
        found[name] = []
        for k in ks:
            shards = shard_for_rank(name, rank)
            cut = find_cut(shards, k, total, ranks=ranks, parts=parts)
            kept = keep(shards, cut).split([matrix.size for matrix in shards])
            found[name].append((cut.value.tolist(), cut.position.tolist(), list(kept)))
    return found


def test_two_ranks_make_the_cut_of_one(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        torch.save(cuts_of_rank(rank, Ranks(torch.distributed.group.WORLD)), tmp_path / f"{rank}.pt")
        torch.distributed.destroy_process_group()

    forked.run_ranks(work, 2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    whole = cuts_of_rank(None, Ranks())
    for name, (_, _, ks) in SHARDED.items():
        for k, one, left, right in zip(ks, whole[name], first[name], second[name], strict=True):
            assert left[:2] == right[:2] == one[:2], f"{name}, k = {k}"
            together = [torch.cat(halves) for halves in zip(left[2], right[2], strict=True)]
            assert all(map(torch.equal, together, one[2])), f"{name}, k = {k}"
            assert sum(int(mask.sum()) for mask in together) == k * len(one[0])
