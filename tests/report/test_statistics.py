"""Means, the paired test and variability: by hand, and against scipy."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from platon.report.statistics import density, deviation, mean, mean_variability, paired, variability

PAIRS = st.lists(st.tuples(*[st.floats(0, 100, width=32)] * 2), min_size=2, max_size=8)


def test_by_hand() -> None:
    """Differences 3, 1, 2: mean 2, deviation 1, t = 2 / (1/√3) = 2√3 with 2 degrees of freedom.

    For 2 degrees of freedom the distribution is known: P(|T| > t) = 1 - t / √(t² + 2) = 1 - √12 / √14.
    """
    test = paired({0: 67.0, 1: 66.0, 2: 71.0}, {0: 64.0, 1: 65.0, 2: 69.0})
    assert test is not None
    assert (test.difference, test.seeds) == (2.0, 3)
    assert test.p == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-12)
    assert mean([64.0, 65.0, 69.0]) == 66.0
    assert deviation([64.0, 65.0, 69.0]) == pytest.approx(math.sqrt((4 + 1 + 9) / 2))


@given(PAIRS)
def test_as_scipy(pairs: list[tuple[float, float]]) -> None:
    values, others = [first for first, _ in pairs], [second for _, second in pairs]
    differences = np.subtract(values, others)
    assume(differences.std(ddof=1) > 1e-3)
    test = paired(dict(enumerate(values)), dict(enumerate(others)))
    expected = stats.ttest_rel(values, others)
    assert test is not None
    assert test.p == pytest.approx(float(expected.pvalue), rel=1e-6, abs=1e-12)
    assert test.difference == pytest.approx(differences.mean(), abs=1e-9)
    assert deviation(values) == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)


def test_only_shared_seeds_count() -> None:
    test = paired({0: 1.0, 1: 2.0, 2: 4.0, 7: 99.0}, {0: 0.0, 1: 0.0, 2: 0.0, 8: -99.0})
    assert test == paired({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_there_is_no_p_where_there_is_no_test() -> None:
    alone = paired({0: 3.0}, {0: 1.0})
    assert alone is not None
    assert (alone.difference, alone.p) == (2.0, None)
    same = paired({0: 61.1, 1: 61.2, 2: 61.3}, {0: 60.1, 1: 60.2, 2: 60.3})  # equal but for rounding
    assert same is not None
    assert same.p is None
    assert deviation([1.0]) is None


def test_variability_by_hand() -> None:
    """1, 10, 100, 10 and a zero, which has no logarithm: jumps of one decade each."""
    found = variability([1.0, 10.0, 100.0, 10.0, 0.0])
    assert found is not None
    assert found.jump == pytest.approx(1.0)
    assert found.span == pytest.approx(np.quantile([0, 1, 2, 1], 0.95) - np.quantile([0, 1, 2, 1], 0.05))
    assert found.variation == pytest.approx(np.std([1, 10, 100, 10, 0], ddof=1) / 24.2)
    assert variability([0.0, 0.0, 1.0, 1.0]) is None
    both = mean_variability([[1.0, 10.0, 1.0], [1.0, 1000.0, 1.0], [0.0, 0.0, 0.0]])
    assert both is not None
    assert both.jump == pytest.approx(2.0)


def test_variability_does_not_depend_on_the_unit() -> None:
    values = (10 ** np.random.default_rng(0).normal(0, 1, 50)).tolist()
    ours, scaled = variability(values), variability([1e-7 * value for value in values])
    assert ours is not None
    assert scaled is not None
    assert vars(ours) == pytest.approx(vars(scaled))


def test_density_is_a_gaussian_estimate() -> None:
    values = np.random.default_rng(1).normal(-3, 1, 200)
    found = density(values.tolist())
    expected = stats.gaussian_kde(values, bw_method="scott")([place for place, _ in found])
    np.testing.assert_allclose([height for _, height in found], expected / expected.max(), rtol=1e-6)
    assert max(height for _, height in density([2.0])) == 1.0
