"""When a run counts as not converged, which tables print as N.A. The paper prints N.A. without a rule; ours is:

1. the loss or a gradient was not finite, so training could not go on; or
2. the model predicts the same for every row of the first split; or
3. the first metric of the first split is no better than that of the best constant prediction.

The record of such a run still has its numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from platon.lab.measure import Measure


def is_constant(predictions: Any) -> bool:
    """Whether logits (or numbers, for regression) predict the same for every row."""
    found = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    answers = found.argmax(-1) if found.ndim > 1 and found.shape[-1] > 1 else found.reshape(-1)
    return len(answers) > 1 and bool((answers == answers[0]).all() or not np.isfinite(answers).all())


def why_not_converged(
    not_finite: str | None, constant: bool, measure: Measure, value: float, chance: float
) -> str | None:
    """The reason in words; `None` if the run converged.

    Args:
        not_finite: what was not finite, if anything.
        constant: whether the model predicts the same for every row.
        measure: the first metric.
        value: its value.
        chance: its value for the best constant prediction.
    """
    if not_finite is not None:
        return not_finite
    if constant:
        return "the model gives the same answer to every row"
    if not measure.is_better(value, chance):
        said, constantly = measure.number(value), measure.number(chance)
        return f"{measure.name} {said} is no better than the best constant answer, {constantly}"
    return None
