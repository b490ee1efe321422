"""The paper's metrics, as fractions (reports multiply by 100).

They are scikit-learn's and scipy's, but no result is ever NaN. Where a formula divides by zero the result is 0, the
value of a model without skill: Matthews and correlations of constant values, and F1 without a true positive. So is the
correlation of predictions that are not finite (a diverged model). The libraries warn or return NaN there.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def classes(logits: NDArray[np.floating]) -> NDArray[np.int64]:
    """The class with the largest logit; -1, never right, where a logit is NaN."""
    found = np.argmax(logits, axis=-1).astype(np.int64)
    return np.where(np.isnan(logits).any(axis=-1), -1, found)


def accuracy(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Share of equal entries."""
    return float(np.mean(np.asarray(predicted) == np.asarray(labels)))


def f1(predicted: ArrayLike, labels: ArrayLike) -> float:
    """2 TP / (2 TP + FP + FN), with 1 as the positive class."""
    return float(f1_score(np.ravel(labels) == 1, np.ravel(predicted) == 1, zero_division=0))


def micro_f1(predicted: ArrayLike, labels: ArrayLike) -> float:
    """F1 over all entries of two matrices of rows × labels."""
    return f1(predicted, labels)


def macro_f1(predicted: ArrayLike, labels: ArrayLike) -> float:
    """The mean over labels of the F1 of each column."""
    said, true = np.asarray(predicted), np.asarray(labels)
    return float(np.mean([f1(said[:, label], true[:, label]) for label in range(true.shape[1])]))


def matthews(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Matthews correlation, for any number of classes."""
    constant = len(np.union1d(predicted, labels)) < 2  # scikit-learn warns of a single class
    return 0.0 if constant else float(matthews_corrcoef(labels, predicted))


def pearson(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Covariance over the product of the standard deviations."""
    return _correlation(stats.pearsonr, predicted, labels)


def spearman(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Pearson of the ranks; equal values share their mean rank."""
    return _correlation(stats.spearmanr, predicted, labels)


def _correlation(function: Callable[..., Any], predicted: ArrayLike, labels: ArrayLike) -> float:
    x, y = np.asarray(predicted, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)  # rounding noise, but a number
        return float(function(x, y).statistic)


def normalise(answer: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """1 when both are equal after normalisation."""
    return float(normalise(answer) == normalise(gold))


def overlap_f1(answer: str, gold: str) -> float:
    """F1 of the words that both share, after normalisation; two answers without any word left agree."""
    said, true = normalise(answer).split(), normalise(gold).split()
    if not said or not true:
        return float(said == true)
    hits = sum((Counter(said) & Counter(true)).values())
    return 2 * hits / (len(said) + len(true)) if hits else 0.0


def squad(answers: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean over the questions of the best agreement with any of the gold answers."""

    def mean(agreement: Callable[[str, str], float]) -> float:
        return float(np.mean([max(agreement(a, g) for g in gold) for a, gold in zip(answers, golds, strict=True)]))

    return {"f1": mean(overlap_f1), "exact_match": mean(exact_match)}


#: What the text tasks name, by (predicted, labels).
METRICS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


#: Of rows with several labels, by matrices of rows × labels.
LABEL_METRICS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {"micro_f1": micro_f1, "macro_f1": macro_f1}


def score(
    split: str, predictions: Any, labels: ArrayLike, *, metrics: Sequence[str], regression: bool = False
) -> dict[str, float]:
    """The named metrics of a model's logits; regression reads them as they are."""
    # Some models return more than logits.
    logits = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    said = logits.reshape(-1) if regression else classes(logits)
    return {name: METRICS[name](said, labels) for name in metrics}


def chance(labels: ArrayLike, metrics: Sequence[str], *, regression: bool = False) -> dict[str, float]:
    """What always giving the same label reaches at best, metric by metric; a constant number correlates 0."""
    true = np.asarray(labels)
    guesses = [] if regression else [np.full(len(true), label) for label in np.unique(true)]
    return {name: max((METRICS[name](guess, true) for guess in guesses), default=0.0) for name in metrics}
