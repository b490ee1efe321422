"""Prune transformers while they are fine-tuned.

The public names are imported on first use, so that `platon --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from platon.deploy.compact import compact
    from platon.deploy.loading import load
    from platon.deploy.sparse import sparsify
    from platon.deploy.storage import save
    from platon.deployment import export, measure
    from platon.engine.distillation.distillation import Distillation
    from platon.engine.hold import Hold, hold
    from platon.engine.learned import Gated, HardConcrete, Learned, Movement, SoftMovement
    from platon.engine.one_shot import prune_once
    from platon.engine.pruner import Pruner
    from platon.engine.schedule import Constant, Cubic, Schedule
    from platon.engine.score import Score
    from platon.engine.smoothed import Magnitude, Platon, Ratio, Sensitivity, Uncertainty, Wanda
    from platon.engine.units import Units, blocks, columns, heads, neurons, weights
    from platon.lab.callback import PruningCallback

__version__ = "0.1.0"

_HOMES = {
    "platon.deploy.compact": ("compact",),
    "platon.deploy.loading": ("load",),
    "platon.deploy.sparse": ("sparsify",),
    "platon.deploy.storage": ("save",),
    "platon.deployment": ("export", "measure"),
    "platon.engine.distillation.distillation": ("Distillation",),
    "platon.engine.hold": ("Hold", "hold"),
    "platon.engine.learned": ("Gated", "HardConcrete", "Learned", "Movement", "SoftMovement"),
    "platon.engine.one_shot": ("prune_once",),
    "platon.engine.pruner": ("Pruner",),
    "platon.engine.schedule": ("Constant", "Cubic", "Schedule"),
    "platon.engine.score": ("Score",),
    "platon.engine.smoothed": ("Magnitude", "Platon", "Ratio", "Sensitivity", "Uncertainty", "Wanda"),
    "platon.engine.units": ("Units", "blocks", "columns", "heads", "neurons", "weights"),
    "platon.lab.callback": ("PruningCallback",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Constant",
    "Cubic",
    "Distillation",
    "Gated",
    "HardConcrete",
    "Hold",
    "Learned",
    "Magnitude",
    "Movement",
    "Platon",
    "Pruner",
    "PruningCallback",
    "Ratio",
    "Schedule",
    "Score",
    "Sensitivity",
    "SoftMovement",
    "Uncertainty",
    "Units",
    "Wanda",
    "__version__",
    "blocks",
    "columns",
    "compact",
    "export",
    "heads",
    "hold",
    "load",
    "measure",
    "neurons",
    "prune_once",
    "save",
    "sparsify",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'platon' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
