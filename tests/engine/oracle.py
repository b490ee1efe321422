"""PLATON once more, from the paper's equations: a plain float64 loop, one weight at a time.

It shares no line with the engine. It does not train: at every optimizer step it is told the weights before the step,
the gradients, and the weights that the optimizer left (before any mask), and says what the averages, the scores and the
mask must be. A position is (order of the parameters, flat index); of equal scores the earlier position stays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Numbers = dict[str, list[float]]


def cubic(t: int, *, initial: float, final: float, total: int, warmup: int, cooldown: int) -> float:
    """The share to keep at step t: the paper's cubic schedule, made continuous.

    r(0) for t < t_i;  r(T) + (r(0) - r(T)) (1 - (t - t_i) / (T - t_i - t_f))³ for t_i <= t < T - t_f;  r(T) after that.
    """
    if t < warmup:
        return initial
    if t < total - cooldown:
        return final + (initial - final) * (1 - (t - warmup) / (total - warmup - cooldown)) ** 3
    return final


def is_mask_step(t: int, *, total: int, cooldown: int, every: int) -> bool:
    """Whether weights are selected at t: every so many steps until T - t_f, and at every step from there on.

    Before t_i the share is r(0), which is 1 unless one says otherwise: then such a selection removes nothing.
    """
    return t >= total - cooldown or t % every == 0


def how_many(keep: float, n: int) -> int:
    """The number that stays, k = max(1, round(keep · N))."""
    return max(1, round(keep * n))


@dataclass
class Selection:
    """Who stays: a flag a position, and the score of the last one that stays."""

    kept: dict[str, list[bool]]
    cut: dict[str, float]  # for every parameter: the same number when the ranking is global


def select(scores: Numbers, keep: float, scope: str = "global") -> Selection:
    """The top share of all scores, or of each parameter's own."""
    kept: dict[str, list[bool]] = {name: [False] * len(values) for name, values in scores.items()}
    cut: dict[str, float] = {}
    pools = [list(scores)] if scope == "global" else [[name] for name in scores]
    for pool in pools:
        ranked = []
        for order, name in enumerate(pool):
            for index, score in enumerate(scores[name]):
                ranked.append((-score, order, index))
        ranked.sort()
        k = how_many(keep, len(ranked))
        for _, order, index in ranked[:k]:
            kept[pool[order]][index] = True
        for name in pool:
            cut[name] = -ranked[k - 1][0]
    return Selection(kept, cut)


@dataclass
class Averages:
    """What one parameter carries from step to step."""

    sensitivity: list[float]  # Ī
    uncertainty: list[float]  # Ū
    window: list[float] = field(default_factory=list)  # A, the mean of |w g| over the steps of the current window
    samples: int = 0  # the steps really in it


@dataclass
class Platon:
    """S = Ī Ū, with Ī and Ū the exponential averages of I = |w g| and of U = |I - Ī|."""

    beta1: float = 0.85
    beta2: float = 0.85
    window: int = 1
    timing: str = "after"
    rule: Callable[[float, float], float] = lambda i, u: i * u
    averages: dict[str, Averages] = field(default_factory=dict)

    def step(self, t: int, before: Numbers, gradients: dict[str, list[float] | None], after: Numbers) -> Numbers:
        """Take in optimizer step t (counted from 1); gives the scores."""
        weights = before if self.timing == "before" else after
        for name, gradient in gradients.items():
            n = len(weights[name])
            if name not in self.averages:
                self.averages[name] = Averages([0.0] * n, [0.0] * n, [0.0] * n)
            own = self.averages[name]
            if self.window > 1 and t % self.window == 0:  # the window is over, whether or not this step has a gradient
                if own.samples:
                    self._fold(own, own.window)
                own.window, own.samples = [0.0] * n, 0
            if gradient is None:
                continue
            signal = [abs(weights[name][j] * gradient[j]) for j in range(n)]
            if self.window == 1:
                self._fold(own, signal)
                continue
            own.samples += 1
            for j in range(n):
                own.window[j] += (signal[j] - own.window[j]) / own.samples
        return {
            name: [self.rule(i, u) for i, u in zip(own.sensitivity, own.uncertainty, strict=True)]
            for name, own in self.averages.items()
        }

    def _fold(self, own: Averages, signal: list[float]) -> None:
        for j, i in enumerate(signal):
            own.sensitivity[j] = self.beta1 * own.sensitivity[j] + (1 - self.beta1) * i
            u = abs(i - own.sensitivity[j])  # the new Ī
            own.uncertainty[j] = self.beta2 * own.uncertainty[j] + (1 - self.beta2) * u


def ratio(i: float, u: float) -> float:
    """S = Ī / Ū; 0 / 0 is 0."""
    if u == 0:
        return math.inf if i > 0 else 0.0
    return i / u


@dataclass
class Magnitude:
    """S = |w|, of the weights that the optimizer left."""

    def step(self, t: int, before: Numbers, gradients: dict[str, list[float] | None], after: Numbers) -> Numbers:
        """Take in optimizer step t; gives the scores."""
        return {name: [abs(w) for w in after[name]] for name in gradients}


def apply(after: Numbers, selection: Selection) -> Numbers:
    """The weights that stay keep their value, the others become zero."""
    return {
        name: [w if stays else 0.0 for w, stays in zip(values, selection.kept[name], strict=True)]
        for name, values in after.items()
    }
