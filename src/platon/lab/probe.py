"""The probe: what the figures need of a training, looked at now and then and written as lines of `probe.jsonl`.

A look reads a dozen weights, never whole tensors; it draws no random number and changes nothing, so a training is the
same to the bit with and without it. Lines, each with its `step`:

    {"signal": [...], "weight": [...]}          every `BEAT` steps: their |w g| and |w| as the method meets them, before
     + "sensitivity", "uncertainty", "score"    a mask, and their Ī, Ū or learned score, where the method has them
     + "names", "places"                        in the first: the sampled weights, as matrix and position in it
    {"removed", "returned", "since"}            with it: shares of all units that left the mask and that came back
    {"quantiles": {"sensitivity": [...], …}}    at `CDF_STEP` and at the quarters of the training, over a fixed sample
    {"layers": {matrix: share kept}}            at each tenth of the training and at each evaluation
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.engine.units import weights
from platon.lab.record import PROBE, append_history, rewind_history
from platon.lab.trainer import SealedCheckpoints

BEAT, WEIGHTS, CDF_STEP = 10, 12, 500  # the paper's figures 1 and 2
LOOKS = 1000  # at most: a long training is looked at less often
SAMPLE, QUANTILES = 1 << 16, 201
_STATES = ("sensitivity", "uncertainty", "score")


def beat(total: int) -> int:
    """Steps between looks; a training too short for figures is looked at whenever it moves."""
    return max(BEAT, math.ceil(total / LOOKS)) if total >= 10 * BEAT else 1


class Probe(TrainerCallback):
    """Looks at a training. It stands before the pruner's callback, so that its hook sees weights before the mask.

    Args:
        folder: the run's.
        total: steps of the training.
        sealed: holds the pruner, if there is one.
    """

    def __init__(self, folder: Path, total: int, sealed: SealedCheckpoints) -> None:
        """Nothing yet; training has not begun."""
        self.folder, self.sealed, self.beat = folder, sealed, beat(total)
        self._tenth = math.ceil(total / 10)
        self._mapped = 0  # the step of the last line of layers
        self._cdf_steps = {CDF_STEP, *(math.ceil(total * part / 4) for part in range(1, 5))}
        self._picked: list[tuple[str, nn.Parameter, int]] = []
        self._seen: list[Tensor] = []  # |w g| and |w| of the look under way
        self._looking = False
        self._last: tuple[int, dict[str, Tensor]] | None = None  # step and mask bits of the last look
        self._handle: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the weights, always the same of a model, and go back to where the training resumes."""
        if not state.is_world_process_zero:
            return
        if (self.folder / PROBE).exists():
            rewind_history(self.folder, state.global_step, PROBE)
        self._picked = pick(weights(kwargs["model"]).matrices)
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate's wrapper holds it
        timing = getattr(getattr(self.sealed, "score", None), "timing", "after")
        register = optimizer.register_step_pre_hook if timing == "before" else optimizer.register_step_post_hook
        self._handle = register(self._hook)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Whether to look at this step; by now a resumed pruner has its masks back."""
        if not self._picked:
            return
        self._looking = (state.global_step + 1) % self.beat == 0
        if self._last is None:
            self._last = (state.global_step, self._bits())

    @torch.no_grad()
    def _hook(self, *ignored: Any) -> None:
        if not self._looking:
            return
        products, sizes = [], []
        for _, parameter, place in self._picked:
            weight = parameter.detach().view(-1)[place].float()
            gradient = parameter.grad
            products.append(weight * 0 if gradient is None else weight * gradient.reshape(-1)[place].float())
            sizes.append(weight)
        self._seen = [torch.stack([one.cpu() for one in found]).abs() for found in (products, sizes)]

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The pruner has taken the step in: write what the weights and their scores are."""
        step = state.global_step + 1
        if self._looking and self._seen:
            (products, sizes), self._seen = self._seen, []
            line: dict[str, Any] = {"step": step, "signal": _rounded(products), "weight": _rounded(sizes)}
            if step == self.beat:  # the first look says what it looks at
                line |= {
                    "names": [one for one, _, _ in self._picked],
                    "places": [place for _, _, place in self._picked],
                }
            append_history(self.folder, line | self._scores() | self._churn(step), PROBE)
        if self._picked and step in self._cdf_steps:
            quantiles = {name: found for name in _STATES[:2] if (found := self._quantiles(name))}
            if quantiles:
                append_history(self.folder, {"step": step, "quantiles": quantiles}, PROBE)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The share kept of each matrix, now and then."""
        if state.global_step % self._tenth == 0:
            self._map(state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The share kept of each matrix, for the model that is measured."""
        self._map(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A resumed training knows the masks of its checkpoint and no older ones: what changed until here is said."""
        if self._picked and (found := self._churn(state.global_step)):
            append_history(self.folder, {"step": state.global_step, **found}, PROBE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the optimizer."""
        if self._handle is not None:
            self._handle.remove()

    # --- reading the pruner -------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {} if self.sealed.pruner is None else self.sealed.pruner.state_dict()["tensors"]
        return found

    def _scores(self) -> dict[str, list[float]]:
        """Of the sampled weights, whatever the method keeps of them; nothing where groups of weights are ranked."""
        if self.sealed.pruner is None or self.sealed.pruner.units.groups:
            return {}
        tensors = self._tensors()
        found: dict[str, list[float]] = {}
        for name in _STATES:
            keys = [(f"{matrix}:{name}", place) for matrix, _, place in self._picked]
            if all(key in tensors for key, _ in keys):
                found[name] = _rounded(torch.stack([tensors[key][place].cpu() for key, place in keys]))
        return found

    def _units(self) -> dict[str, int]:
        """How many units each mask has."""
        pruner = self.sealed.pruner
        if pruner is None:
            return {}
        groups = {own.name: own.count for own in pruner.units.groups}
        return groups or {name: matrix.numel() for name, matrix in pruner.units.matrices.items()}

    def _bits(self) -> dict[str, Tensor]:
        """A copy of the masks."""
        tensors = self._tensors()
        return {name: words(tensors[f"{name}:mask"], count) for name, count in self._units().items()}

    def _map(self, step: int) -> None:
        """Write the share kept of each matrix, once a step."""
        if self._picked and self.sealed.pruner is not None and self._mapped != step:
            self._mapped = step
            shares = {name: round(float(m.float().mean()), 5) for name, m in self.sealed.pruner.masks().items()}
            append_history(self.folder, {"step": step, "layers": shares}, PROBE)

    def _churn(self, step: int) -> dict[str, float]:
        """How much of the mask fell and came back since the last look; nothing where there is no mask."""
        if self._last is None or self._last[0] == step:
            return {}
        since, before = self._last
        now = self._bits()
        self._last = (step, now)
        if not now:
            return {}
        total = sum(self._units().values())
        removed = sum(count_bits(before[name] & ~bits) for name, bits in now.items())
        returned = sum(count_bits(bits & ~before[name]) for name, bits in now.items())
        return {"removed": _short(removed / total), "returned": _short(returned / total), "since": since}

    def _quantiles(self, name: str) -> list[float]:
        """Of a fixed sample of all units; a distribution from 65,536 of them is right to half a per cent."""
        tensors = {key: tensor for key, tensor in self._tensors().items() if key.endswith(f":{name}")}
        if not tensors:
            return []
        total = sum(tensor.numel() for tensor in tensors.values())
        random = np.random.default_rng(0)
        parts = []
        for tensor in tensors.values():
            count = tensor.numel() if total <= SAMPLE else math.ceil(SAMPLE * tensor.numel() / total)
            place = torch.from_numpy(np.sort(random.choice(tensor.numel(), count, replace=False, shuffle=False)))
            parts.append(tensor[place.to(tensor.device)].cpu())
        return _rounded(torch.quantile(torch.cat(parts), torch.linspace(0, 1, QUANTILES)))


def pick(matrices: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter, int]]:
    """A dozen weights, one from each twelfth of the matrices: a model of twelve layers gives one a layer.

    They are a function of the model's shapes alone, so every method and every seed is looked at in the same places.
    """
    random = np.random.default_rng(0)
    names = list(matrices)
    found = []
    for number in range(WEIGHTS):
        first, beyond = number * len(names) // WEIGHTS, (number + 1) * len(names) // WEIGHTS
        name = names[first + int(random.integers(max(1, beyond - first)))]
        found.append((name, matrices[name], int(random.integers(matrices[name].numel()))))
    return found


def words(bits: Tensor, count: int) -> Tensor:
    """Packed bits copied to words of 64; bits beyond the first `count` are zero."""
    padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: len(bits)] = bits
    if count % 8:
        padded[len(bits) - 1] &= (1 << count % 8) - 1
    return padded.view(torch.int64)


def count_bits(bits: Tensor) -> int:
    """How many bits of these words are set: neighbours are added up, then pairs, then fours, then all eight bytes."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return int(((bits * 0x0101010101010101) >> 56).sum())


def _rounded(values: Tensor) -> list[float]:
    """Short enough to write often; what is not finite (a step that was skipped) becomes zero."""
    return [_short(value) if math.isfinite(value) else 0.0 for value in values.tolist()]


def _short(value: float) -> float:
    """Four digits are enough for a figure."""
    return float(f"{value:.4g}")
