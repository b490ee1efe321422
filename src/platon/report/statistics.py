"""Statistics of tables and figures: means over seeds, the paired test, and how much a score varies.

The test is Student's paired t-test, two-sided, on the differences of runs with the same seed. A rank test cannot be
significant with the three to five seeds that studies have: Wilcoxon's smallest p is 2^(1-n), 0.25 for three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; summed exactly, so that the order of the values does not matter."""
    return fmean(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample (n - 1 in the denominator); `None` for fewer than two values."""
    return stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Paired:
    """How two methods differ over the seeds that both have.

    Args:
        difference: mean of first minus second.
        seeds: number of seeds that both have.
        p: two-sided; `None` if there is no test: fewer than two seeds, or equal differences.
    """

    difference: float
    seeds: int
    p: float | None


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    """The paired t-test by seed; `None` if no seed is in both."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    differences = [first[seed] - second[seed] for seed in seeds]
    spread, middle = deviation(differences), mean(differences)
    # Rounding gives equal differences a tiny spread, and then a p near 0.
    if spread is None or spread <= 1e-9 * max(1.0, *map(abs, differences)):
        return Paired(middle, len(seeds), None)
    test = stats.ttest_rel([first[seed] for seed in seeds], [second[seed] for seed in seeds])
    return Paired(middle, len(seeds), float(test.pvalue))


@dataclass(frozen=True)
class Variability:
    """How much a positive number varies over a training.

    Args:
        variation: coefficient of variation, standard deviation / mean.
        span: decades between the 5th and the 95th percentile.
        jump: decades from one measurement to the next, on average.
    """

    variation: float
    span: float
    jump: float


def variability(values: ArrayLike) -> Variability | None:
    """Of one weight's score over the measurements; `None` if fewer than three are positive.

    Zeros count in `variation`; they have no logarithm, so `span` and `jump` leave them out.
    """
    every = np.asarray(values, dtype=np.float64)
    logs = np.log10(every[every > 0])
    if len(logs) < 3:
        return None
    low, high = np.quantile(logs, [0.05, 0.95])
    return Variability(float(every.std(ddof=1) / every.mean()), float(high - low), float(np.abs(np.diff(logs)).mean()))


def mean_variability(weights: Sequence[ArrayLike] | NDArray[np.float64]) -> Variability | None:
    """The mean over the weights that have one; `None` if none has."""
    found = [one for values in weights if (one := variability(values)) is not None]
    if not found:
        return None
    return Variability(
        mean([one.variation for one in found]), mean([one.span for one in found]), mean([one.jump for one in found])
    )


def density(values: ArrayLike, points: int = 40) -> list[tuple[float, float]]:
    """The outline of a violin: (value, density with a peak of 1), a Gaussian kernel estimate with Scott's bandwidth.

    Values that are all (nearly) the same become a narrow triangle.
    """
    every = np.asarray(values, dtype=np.float64)
    narrow = 1e-3
    width = float(every.std(ddof=1)) * len(every) ** -0.2 if len(every) > 1 else 0.0
    if width < narrow:
        middle = float(np.median(every))
        return [(middle - narrow, 0.0), (middle, 1.0), (middle + narrow, 0.0)]
    grid = np.linspace(every.min() - width, every.max() + width, points)
    height = stats.gaussian_kde(every, bw_method="scott")(grid)
    return [(float(x), float(y)) for x, y in zip(grid, height / height.max(), strict=True)]
