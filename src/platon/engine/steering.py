"""Steering: the penalty that makes sparsity follow a schedule, for methods where it is a result and not a setting."""

import math
from dataclasses import dataclass

# Found on small networks and on MiniLM, at 5 to 50 % kept. The penalty starts at next to nothing and never falls below
# that, since the way back is long; it changes by a fifth of a factor e a step at most, and looks as far ahead as scores
# need to move.
_START, _GAIN, _AHEAD, _MEMORY = 0.01, 0.2, 20, 0.8


@dataclass
class Steering:
    """What the penalty stands at, and where scores are heading.

    What is followed is not the share kept: scores have a long way to go before the first unit falls, and a penalty that
    grows until then is by orders of magnitude too strong afterwards. It is the share of scores above a line which goes
    that way at an even speed (`Penalised.line`): that answers from the first step on.
    """

    penalty: float = _START
    above: float = 1.0
    slope: float = 0.0

    def follow(self, above: float, keep: float) -> None:
        """Push harder while too many scores will be above the line, and less while too few."""
        self.slope = _MEMORY * self.slope + (1 - _MEMORY) * (above - self.above)
        self.above = above
        away = (above + _AHEAD * self.slope - keep) / max(min(keep, 1 - keep), 1e-3)
        factor = math.exp(_GAIN * min(max(away, -1.0), 1.0))
        self.penalty = min(max(self.penalty * factor, _START), 1e9)
