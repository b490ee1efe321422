"""The numbers behind tables and figures: means over seeds, the paired test, and how much a score varies.

The test is Student's paired t-test, two-sided, on the differences of runs with the same seed. A rank test cannot be
significant with the three to five seeds that studies have: Wilcoxon's smallest p is 2^(1-n), 0.25 for three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


def mean(values: Sequence[float]) -> float:
    """The same whatever the order of the values."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample, n - 1 below; `None` for fewer than two."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Paired:
    """How two methods differ over the seeds that they share.

    Args:
        difference: mean of first minus second.
        seeds: how many they share.
        p: two-sided; `None` where there is no test: fewer than two seeds, or differences that are all the same.
    """

    difference: float
    seeds: int
    p: float | None


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    """The paired t-test, by seed; `None` if no seed is shared."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    differences = [first[seed] - second[seed] for seed in seeds]
    spread, middle = deviation(differences), mean(differences)
    # Of equal differences rounding may leave a spread, and a p that is 0.
    if spread is None or spread <= 1e-9 * max(1.0, *map(abs, differences)):
        return Paired(middle, len(seeds), None)
    t = middle / (spread / math.sqrt(len(seeds)))
    return Paired(middle, len(seeds), float(2 * stats.t.sf(abs(t), len(seeds) - 1)))


@dataclass(frozen=True)
class Variability:
    """How much one number varies over a training; zeros, which have no logarithm, are left out of the logarithms.

    Args:
        variation: coefficient of variation, standard deviation / mean.
        span: decades between the 5th and the 95th percentile.
        jump: decades from one look to the next, on average.
    """

    variation: float
    span: float
    jump: float


def variability(values: Sequence[float]) -> Variability | None:
    """Of a weight's score over the looks; `None` where it is positive less than three times."""
    every = np.asarray(values, dtype=np.float64)
    logs = np.log10(every[every > 0])
    if len(logs) < 3:
        return None
    low, high = np.quantile(logs, [0.05, 0.95])
    return Variability(float(every.std(ddof=1) / every.mean()), float(high - low), float(np.abs(np.diff(logs)).mean()))


def mean_variability(weights: Sequence[Sequence[float]]) -> Variability | None:
    """The mean over weights, of those that have one."""
    found = [one for values in weights if (one := variability(values)) is not None]
    if not found:
        return None
    return Variability(
        mean([one.variation for one in found]), mean([one.span for one in found]), mean([one.jump for one in found])
    )


def density(values: Sequence[float], points: int = 40) -> list[tuple[float, float]]:
    """A smooth outline of how values are spread: (value, density with a peak of 1), by Gaussians of Scott's width."""
    every = np.asarray(values, dtype=np.float64)
    spread = float(every.std(ddof=1)) if len(every) > 1 else 0.0
    width = max(spread * len(every) ** -0.2, 1e-3)
    grid = np.linspace(every.min() - width, every.max() + width, points)
    height = np.exp(-0.5 * ((grid[:, None] - every) / width) ** 2).sum(1)
    return [(float(x), float(y)) for x, y in zip(grid, height / height.max(), strict=True)]
