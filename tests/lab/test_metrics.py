"""Every metric against its formula or another library's, and the cases that formulas leave open."""

import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torchmetrics.functional.text import squad as torchmetrics_squad

from platon.lab.tasks import metrics

pairs = st.integers(1, 4).flatmap(
    lambda top: st.lists(st.tuples(st.integers(0, top), st.integers(0, top)), min_size=1, max_size=60)
)
binary = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60)
numbers = st.integers(2, 40).flatmap(
    lambda n: hnp.arrays(np.float64, (2, n), elements=st.one_of(st.integers(0, 5), st.floats(-1e3, 1e3, width=32)))
)


@given(pairs)
def test_accuracy_by_its_formula(rows: list[tuple[int, int]]) -> None:
    said, true = np.array(rows).T
    assert metrics.accuracy(said, true) == pytest.approx(sum(a == b for a, b in rows) / len(rows))


@given(binary)
def test_f1_by_its_formula(rows: list[tuple[int, int]]) -> None:
    said, true = np.array(rows).T
    hits = rows.count((1, 1))
    expected = 2 * hits / (2 * hits + rows.count((1, 0)) + rows.count((0, 1))) if hits else 0.0
    assert metrics.f1(said, true) == pytest.approx(expected)
    assert metrics.f1(said[:, None], true[:, None]) == metrics.f1(said, true)


@given(pairs)
def test_matthews_by_its_formula(rows: list[tuple[int, int]]) -> None:
    """Gorodkin's: (c s - Σ p_k t_k) / √((s² - Σ p_k²)(s² - Σ t_k²)); s rows, c right, p_k said to be k, t_k being k."""
    said, true = np.array(rows).T
    p, t = np.bincount(said, minlength=5), np.bincount(true, minlength=5)
    spread = float((len(rows) ** 2 - p @ p) * (len(rows) ** 2 - t @ t))
    expected = (np.sum(said == true) * len(rows) - p @ t) / np.sqrt(spread) if spread else 0.0
    assert metrics.matthews(said, true) == pytest.approx(expected, abs=1e-12)


@given(numbers)
def test_correlations_by_their_formula(rows: np.ndarray) -> None:
    """numpy's; Spearman's is that of the ranks, where equal values share their mean rank."""
    said, true = rows
    # What is nearly constant is rounding noise in both.
    assume(min(said.std() / (1 + abs(said).max()), true.std() / (1 + abs(true).max())) > 1e-6)
    assert metrics.pearson(said, true) == pytest.approx(np.corrcoef(said, true)[0, 1], abs=1e-9)
    ranks = [[(np.sum(row < x) + np.sum(row <= x)) / 2 for x in row] for row in rows]
    assert metrics.spearman(said, true) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)


@pytest.mark.parametrize("metric", [metrics.matthews, metrics.pearson, metrics.spearman])
@pytest.mark.parametrize("said", [[1, 1, 1, 1], [0, 0, 0, 0]])
def test_constant_predictions_have_no_skill(metric: metrics.Callable[..., float], said: list[int]) -> None:
    assert metric(said, [0, 1, 0, 1]) == 0.0
    assert metric([0, 1, 0, 1], said) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_diverged_predictions_have_no_skill(bad: float) -> None:
    assert metrics.pearson([bad, 1.0, 2.0], [1, 2, 3]) == 0.0
    assert metrics.spearman([bad, 1.0, 2.0], [1, 2, 3]) == 0.0


def test_nan_logits_are_never_right() -> None:
    logits = np.array([[np.nan, np.nan], [0.0, 1.0], [np.nan, 1.0]])
    assert metrics.classes(logits).tolist() == [-1, 1, -1]
    found = metrics.score("validation", logits, np.array([0, 1, 1]), metrics=("accuracy", "f1", "matthews"))
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert all(np.isfinite(value) for value in found.values())


def test_correlation_survives_extreme_scales() -> None:
    said = np.array([1.0, 2.0, 4.0])
    for scale in (1e-200, 1e200):
        assert metrics.pearson(said * scale, [1, 2, 4]) == pytest.approx(1)


def test_models_that_return_more_than_logits() -> None:
    logits = np.array([[0.0, 1.0]])
    assert metrics.score("x", (logits, "hidden states"), np.array([1]), metrics=("accuracy",)) == {"accuracy": 1.0}


def test_chance_is_the_best_constant_answer() -> None:
    mrpc = [1] * 279 + [0] * 129  # the validation split: the paper's 68.4 / 81.2
    assert metrics.chance(mrpc, ("accuracy", "f1")) == pytest.approx({"accuracy": 0.684, "f1": 0.812}, abs=5e-4)
    assert metrics.chance([0, 1, 1], ("matthews",)) == {"matthews": 0.0}
    assert metrics.chance([0.5, 1, 1], ("pearson",), regression=True) == {"pearson": 0.0}


AWKWARD = [
    ("the Eiffel Tower", ["Eiffel Tower"]),
    ("Eiffel Tower!", ["the 'Eiffel' Tower."]),
    ("a an the", ["the"]),
    ("", ["something"]),
    ("", ["the"]),
    ("...", ["Paris"]),
    ("café", ["Café", "cafe"]),
    ("naïve – résumé", ["naïve — résumé"]),
    ("Ⅷ ½ 東京", ["東京 Ⅷ ½"]),
    ("İstanbul", ["istanbul"]),
    ("1,000", ["1000", "one thousand"]),
    ("Theatre", ["the atre", "theatre"]),
    ("an-other", ["another", "an other"]),
    ("tab\tand\u00a0space  s", ["tab and space s"]),
    ("a b b c", ["b b", "c"]),
    ("New York City", ["York", "New York", "the City of New York"]),
]

TEXT = """
In 1903, the brothers' 'Flyer' rose from a beach near Kitty Hawk; it flew 120 feet (about 37 m) in 12 seconds. A century
later the U.S. Mint's quarter-dollar, issued for Ohio, showed the aircraft beside an astronaut: Neil Armstrong. Café
society, naïve as ever, talked of the coin’s 3.5-year delay and of Zürich, £5, 10% and more.
"""


def _against_torchmetrics(rows: list[tuple[str, list[str]]]) -> None:
    answers, golds = [a for a, _ in rows], [g for _, g in rows]
    theirs = torchmetrics_squad(
        [{"prediction_text": a, "id": str(i)} for i, a in enumerate(answers)],
        [{"answers": {"text": g, "answer_start": [0] * len(g)}, "id": str(i)} for i, g in enumerate(golds)],
    )
    ours = metrics.squad(answers, golds)
    assert ours["exact_match"] * 100 == pytest.approx(theirs["exact_match"].item(), abs=1e-4)
    assert ours["f1"] * 100 == pytest.approx(theirs["f1"].item(), abs=1e-4)


@pytest.mark.parametrize("row", AWKWARD, ids=repr)
def test_squad_equals_torchmetrics_on_the_awkward(row: tuple[str, list[str]]) -> None:
    _against_torchmetrics([row])


def test_squad_equals_torchmetrics_on_many() -> None:
    text = TEXT.split()
    draw = random.Random(0)

    def span() -> str:
        start = draw.randrange(len(text))
        return " ".join(text[start : start + draw.randint(0, 6)])

    rows = []
    for _ in range(400):
        golds = [span() or "it" for _ in range(draw.randint(1, 4))]
        answer = draw.choice([span(), golds[0], golds[-1].upper(), f"The {golds[0]}.", " ".join(golds[0].split()[1:])])
        rows.append((answer, golds))
    _against_torchmetrics(rows)


@given(st.lists(st.tuples(st.text(max_size=20), st.lists(st.text(max_size=20), min_size=1, max_size=3)), min_size=1))
def test_squad_equals_torchmetrics_on_any_text(rows: list[tuple[str, list[str]]]) -> None:
    _against_torchmetrics(rows)
