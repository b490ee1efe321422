"""The rule for "did not converge", which the paper prints as N.A. without one. Ours, in this order:

1. the loss or a gradient was not finite, so that training could not go on;
2. the model gives one and the same answer to every row of the headline split;
3. the headline metric is no better there than the best constant answer.

A run to which one of these applies still has its numbers in the record; tables print N.A. for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def gives_one_answer(predictions: Any) -> bool:
    """Whether logits (or numbers, for regression) say the same for every row."""
    said = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    answers = said.argmax(-1) if said.ndim > 1 and said.shape[-1] > 1 else said.reshape(-1)
    return len(answers) > 1 and bool((answers == answers[0]).all() or not np.isfinite(answers).all())


def why_not(not_finite: str | None, one_answer: bool, metric: str, value: float, chance: float) -> str | None:
    """What kept a run from converging, in words; `None` if it converged."""
    if not_finite is not None:
        return not_finite
    if one_answer:
        return "the model gives the same answer to every row"
    if value <= chance:
        return f"{metric} {100 * value:.2f} is no better than the best constant answer, {100 * chance:.2f}"
    return None
