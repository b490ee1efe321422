"""Steering: adjusts a penalty so that sparsity follows the schedule, for methods whose sparsity is a result."""

import math
from dataclasses import dataclass

# Found on small networks and on MiniLM, at 5 to 50 % kept. The penalty starts near zero and never falls below that,
# because growing back takes many steps. It changes by at most a factor e^0.2 a step. The prediction looks 20 steps
# ahead, about as long as scores need to react.
_START, _GAIN, _AHEAD, _MEMORY = 0.01, 0.2, 20, 0.8


@dataclass
class Steering:
    """The penalty, and the trend of what it controls.

    It does not control the share kept: scores fall for a long time before the first unit is pruned, and a penalty that
    grew until then would be far too strong afterwards. It controls the share of scores above a boundary that moves from
    the initial score to the final boundary (`Penalised.choose`), which reacts from the first step on.
    """

    penalty: float = _START
    above: float = 1.0
    slope: float = 0.0

    def follow(self, above: float, keep: float) -> None:
        """Raise the penalty if more than `keep` of the scores will be above the moving boundary, else lower it."""
        self.slope = _MEMORY * self.slope + (1 - _MEMORY) * (above - self.above)
        self.above = above
        away = (above + _AHEAD * self.slope - keep) / max(min(keep, 1 - keep), 1e-3)
        factor = math.exp(_GAIN * min(max(away, -1.0), 1.0))
        self.penalty = min(max(self.penalty * factor, _START), 1e9)
