"""How close one model's embeddings are to another's, as fractions. A row is a text; one that is not finite is 0."""

import numpy as np
from numpy.typing import NDArray

from platon.lab.tasks.metrics import spearman

Vectors = NDArray[np.floating]

NEIGHBOURS = 10


def unit(vectors: Vectors) -> NDArray[np.float64]:
    """Rows of length 1; a row without length, or with numbers that are not finite, stays 0."""
    rows = np.asarray(vectors, dtype=np.float64)
    rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norm == 0, 1.0, norm)


def mean_cosine(ours: Vectors, theirs: Vectors) -> float:
    """The mean over texts of the cosine between both embeddings."""
    return float(np.mean(np.sum(unit(ours) * unit(theirs), axis=1)))


def rank_correlation(ours: Vectors, theirs: Vectors) -> float:
    """Spearman's correlation of the cosines of all pairs of texts: are similar texts still the more similar ones?"""
    pairs = np.triu_indices(len(ours), k=1)
    return spearman(_cosines(ours)[pairs], _cosines(theirs)[pairs])


def neighbour_overlap(ours: Vectors, theirs: Vectors, count: int = NEIGHBOURS) -> float:
    """The share of each text's nearest neighbours that both models agree on; the mean over texts."""
    count = min(count, len(ours) - 1)
    if count < 1:
        return 0.0
    found = [
        set(ours_) & set(theirs_) for ours_, theirs_ in zip(_nearest(ours, count), _nearest(theirs, count), strict=True)
    ]
    return float(np.mean([len(both) / count for both in found]))


def pair_spearman(vectors: Vectors, scores: NDArray[np.floating]) -> float:
    """Spearman's correlation of cosines with people's scores; the first half of the rows pairs with the second."""
    first, second = np.split(unit(vectors), 2)
    return spearman(np.sum(first * second, axis=1), scores)


def is_constant(vectors: Vectors) -> bool:
    """Whether all texts have the same embedding, or one is not finite."""
    return bool((np.asarray(vectors) == np.asarray(vectors)[:1]).all() or not np.isfinite(vectors).all())


def constant_cosine(theirs: Vectors) -> float:
    """The best mean cosine that the same embedding for every text can have: the length of the mean direction."""
    return float(np.linalg.norm(unit(theirs).mean(axis=0)))


def _cosines(vectors: Vectors) -> NDArray[np.float64]:
    rows = unit(vectors)
    return rows @ rows.T


def _nearest(vectors: Vectors, count: int) -> NDArray[np.int64]:
    """The numbers of each row's nearest others; of equally near ones, the first."""
    cosines = _cosines(vectors)
    np.fill_diagonal(cosines, -np.inf)
    return np.argsort(-cosines, axis=1, kind="stable")[:, :count]
