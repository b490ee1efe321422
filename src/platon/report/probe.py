"""What the probe wrote during a run: scores of a few sampled weights, changes of the mask, share kept by matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platon.lab.record import PROBE, RunFolder
from platon.report.record import damaged, read_lines


@dataclass(frozen=True)
class MaskChange:
    """Shares of all units that were pruned, and that came back, after step `since` and until step `step`."""

    step: int
    since: int
    removed: float
    returned: float


@dataclass(frozen=True)
class Probe:
    """A run's probe file.

    Args:
        signal: |w g| of each sampled weight: a row for each measurement, a column for each weight.
        sensitivity: the averages Ī of the same weights; `None` if the method has none.
        uncertainty: the averages Ū of the same weights; `None` if the method has none.
        changes: how the mask changed between measurements.
        quantiles: step -> name of a state ("sensitivity", "uncertainty") -> its quantiles over all units.
        layers: step -> parameter name -> share kept.
    """

    signal: NDArray[np.float64]
    sensitivity: NDArray[np.float64] | None
    uncertainty: NDArray[np.float64] | None
    changes: tuple[MaskChange, ...]
    quantiles: dict[int, dict[str, list[float]]]
    layers: dict[int, dict[str, float]]

    def scores(self) -> dict[str, NDArray[np.float64]]:
        """Name -> score of each sampled weight at each measurement: |w g| and what is computed from its averages."""
        if len(self.signal) < 3:
            return {}
        found = {"|w g|": self.signal}
        if self.sensitivity is not None and self.uncertainty is not None:
            product = self.sensitivity * self.uncertainty
            found |= {"Ī": self.sensitivity, "S = Ī Ū": product, "√S": product**0.5}
        return found


def read_probe(folder: Path) -> Probe:
    """A run's probe file; an empty `Probe` if there is none. A damaged file is a `UserError`."""
    measured: list[dict[str, Any]] = []
    changes: list[MaskChange] = []
    quantiles: dict[int, dict[str, list[float]]] = {}
    layers: dict[int, dict[str, float]] = {}
    for line in read_lines(folder, PROBE):
        try:
            if "signal" in line:
                measured.append(line | {name: _numbers(line[name]) for name in _COLUMNS if name in line})
            if "since" in line:
                changes.append(MaskChange(*(_number(line[name]) for name in ("step", "since", "removed", "returned"))))
            if "quantiles" in line:
                quantiles[line["step"]] = {name: _numbers(found).tolist() for name, found in line["quantiles"].items()}
            if "layers" in line:
                layers[line["step"]] = {name: _number(share) for name, share in line["layers"].items()}
            if (
                measured
                and len({len(measured[0]["signal"]), *(len(measured[-1][n]) for n in _COLUMNS if n in line)}) > 1
            ):
                raise ValueError("another number of weights")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise damaged(RunFolder(folder).probe, line) from None
    columns = {
        name: np.stack([line[name] for line in measured])
        for name in _COLUMNS
        if measured and all(name in line for line in measured)
    }
    signal = columns.get("signal", np.zeros((0, 0)))
    averages = columns.get("sensitivity"), columns.get("uncertainty")
    return Probe(signal, *averages, tuple(changes), quantiles, layers)


_COLUMNS = ("signal", "sensitivity", "uncertainty")


def _numbers(values: Any) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError("no list of numbers")
    return found


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError("no number")
    return value
