"""Steering: the penalty that makes the share kept follow a schedule, where sparsity is a result and not a setting."""

import math
from dataclasses import dataclass

# Found on small networks at 10 to 50 % kept. A gate that a strong penalty has closed opens no more: so the penalty
# starts at next to nothing, grows by a fifth of a factor e at most, and looks as far ahead as scores need to move.
_START, _GAIN, _AHEAD, _MEMORY = 0.01, 0.2, 20, 0.8


@dataclass
class Steering:
    """What the penalty stands at, and where the share is heading."""

    penalty: float = _START
    kept: float = 1.0
    slope: float = 0.0

    def follow(self, kept: float, keep: float) -> None:
        """Push harder while too much will be kept, and less while too little."""
        self.slope = _MEMORY * self.slope + (1 - _MEMORY) * (kept - self.kept)
        self.kept = kept
        away = (kept + _AHEAD * self.slope - keep) / keep
        factor = math.exp(_GAIN * min(max(away, -1.0), 1.0))
        self.penalty = min(max(self.penalty * factor, 1e-9), 1e9)
