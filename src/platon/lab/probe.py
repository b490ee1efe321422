"""The probe: samples of weights, scores and masks during a training, which the report's figures are drawn from.

It reads a dozen weights, never whole tensors, draws no random number and changes nothing, so a training is the same to
the bit with and without it. It writes lines to `probe.jsonl`, each with its `step`:

    {"signal": [...], "weight": [...]}          every `INTERVAL` steps: |w g| and |w| of the sampled weights when the
                                                method reads them, before the mask is applied;
     + "sensitivity", "uncertainty", "score"    their Ī, Ū or learned score, where the method has them;
     + "names", "places"                        in the first line: the sampled weights, as matrix and position in it
    {"removed", "returned", "since"}            in the same line: shares of all units that left the mask and that came
                                                back since that step
    {"quantiles": {"sensitivity": [...], …}}    at `CDF_STEP` and at the quarters of the training, of a fixed sample
    {"layers": {matrix: share kept}}            at each tenth of the training and at each evaluation
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from platon.engine.units import weights
from platon.lab.checkpoint_callback import CheckpointCallback
from platon.lab.file import append_line
from platon.lab.folder import PROBE, RunFolder
from platon.lab.record import rewind_history

INTERVAL, WEIGHTS, CDF_STEP = 10, 12, 500  # as in the paper's figures 1 and 2
OBSERVATIONS = 1000  # at most, however long the training
SAMPLE, QUANTILES = 1 << 16, 201
_STATES = ("sensitivity", "uncertainty", "score")


def interval(total: int) -> int:
    """Steps between observations; every step of a training that is too short for figures."""
    return max(INTERVAL, math.ceil(total / OBSERVATIONS)) if total >= 10 * INTERVAL else 1


class Probe(TrainerCallback):
    """Observes a training. It must stand before the pruner's callback, so that its hooks run first.

    Args:
        folder: the run's.
        total: steps of the training.
        checkpoints: holds the pruner, if there is one.
    """

    def __init__(self, folder: RunFolder, total: int, checkpoints: CheckpointCallback) -> None:
        self.folder, self.checkpoints, self.interval = folder, checkpoints, interval(total)
        self._tenth = math.ceil(total / 10)
        self._layers_step = 0  # the step of the last line of layers
        self._cdf_steps = {CDF_STEP, *(math.ceil(total * part / 4) for part in range(1, 5))}
        self._sampled: list[tuple[str, nn.Parameter, int]] = []
        self._observed: list[Tensor] = []  # |w g| and |w| of the step under way
        self._is_due = False
        self._last_masks: tuple[int, dict[str, Tensor]] | None = None  # step and mask bits of the last observation
        self._hooks: list[Any] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the weights, the same ones for every training of a model; drop lines after the step to resume at."""
        if not state.is_world_process_zero:
            return
        if self.folder.probe.exists():
            rewind_history(self.folder.path, state.global_step, PROBE)
        self._sampled = sample_weights(weights(kwargs["model"]).matrices)
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate wraps it
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *ignored: self._observe(before=True)),
            optimizer.register_step_post_hook(lambda *ignored: self._observe(before=False)),
        ]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide whether to observe this step; a resumed pruner has its masks back by now."""
        if not self._sampled:
            return
        self._is_due = (state.global_step + 1) % self.interval == 0
        if self._last_masks is None:
            self._last_masks = (state.global_step, self._masks())

    @torch.no_grad()
    def _observe(self, before: bool) -> None:
        """Read weights and gradients when the method does: before or after the optimizer's step."""
        pruner = self.checkpoints.pruner
        reads_before = pruner is not None and pruner.score.reads == "before"
        if not self._is_due or before != reads_before:
            return
        # Learned scores keep the weights behind the mask aside, as "full"; in the model the pruned ones are zero.
        aside = self._tensors() if reads_before else {}
        products, sizes = [], []
        for name, parameter, place in self._sampled:
            values = aside.get(f"{name}:full", parameter.detach())
            weight = values.view(-1)[place].float()
            gradient = parameter.grad
            products.append(weight * 0 if gradient is None else weight * gradient.reshape(-1)[place].float())
            sizes.append(weight)
        self._observed = [torch.stack([one.cpu() for one in found]).abs() for found in (products, sizes)]

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the observation, with the scores as the pruner has updated them in this step."""
        step = state.global_step + 1
        if self._is_due and self._observed:
            (products, sizes), self._observed = self._observed, []
            line: dict[str, Any] = {"step": step, "signal": _rounded(products), "weight": _rounded(sizes)}
            if step == self.interval:  # the first observation says where the weights are
                line |= {
                    "names": [name for name, _, _ in self._sampled],
                    "places": [place for _, _, place in self._sampled],
                }
            append_line(self.folder.probe, line | self._scores() | self._changes(step))
        if self._sampled and step in self._cdf_steps:
            quantiles = {name: found for name in _STATES[:2] if (found := self._quantiles(name))}
            if quantiles:
                append_line(self.folder.probe, {"step": step, "quantiles": quantiles})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._tenth == 0:
            self._write_layers(state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write_layers(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the changes of the mask up to here: a resumed training knows no older masks than the checkpoint's."""
        if self._sampled and (found := self._changes(state.global_step)):
            append_line(self.folder.probe, {"step": state.global_step, **found})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    # --- reading the pruner -------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        pruner = self.checkpoints.pruner
        found: dict[str, Tensor] = {} if pruner is None else pruner.state_dict()["tensors"]
        return found

    def _scores(self) -> dict[str, list[float]]:
        """Whatever the method keeps of the sampled weights; nothing where units are groups of weights."""
        if self.checkpoints.pruner is None or self.checkpoints.pruner.units.groups:
            return {}
        tensors = self._tensors()
        found: dict[str, list[float]] = {}
        for name in _STATES:
            keys = [(f"{matrix}:{name}", place) for matrix, _, place in self._sampled]
            if all(key in tensors for key, _ in keys):
                found[name] = _rounded(torch.stack([tensors[key][place].cpu() for key, place in keys]))
        return found

    def _units(self) -> dict[str, int]:
        """The number of units that each mask covers."""
        pruner = self.checkpoints.pruner
        if pruner is None:
            return {}
        groups = {group.name: group.count for group in pruner.units.groups}
        return groups or {name: matrix.numel() for name, matrix in pruner.units.matrices.items()}

    def _masks(self) -> dict[str, Tensor]:
        """A copy of the masks, as words of bits."""
        tensors = self._tensors()
        return {name: words(tensors[f"{name}:mask"], count) for name, count in self._units().items()}

    def _write_layers(self, step: int) -> None:
        """Write the share kept of each matrix, once in a step."""
        if self._sampled and self.checkpoints.pruner is not None and self._layers_step != step:
            self._layers_step = step
            shares = {name: round(float(m.float().mean()), 5) for name, m in self.checkpoints.pruner.masks().items()}
            append_line(self.folder.probe, {"step": step, "layers": shares})

    def _changes(self, step: int) -> dict[str, float]:
        """The shares of units that left the mask and came back since the last call; empty if there is no mask."""
        if self._last_masks is None or self._last_masks[0] == step:
            return {}
        since, before = self._last_masks
        now = self._masks()
        self._last_masks = (step, now)
        if not now:
            return {}
        total = sum(self._units().values())
        removed = sum(count_bits(before[name] & ~bits) for name, bits in now.items())
        returned = sum(count_bits(bits & ~before[name]) for name, bits in now.items())
        return {"removed": _short(removed / total), "returned": _short(returned / total), "since": since}

    def _quantiles(self, name: str) -> list[float]:
        """Quantiles of a fixed sample of all units; 65,536 of them give a distribution to within half a per cent."""
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


def sample_weights(matrices: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter, int]]:
    """A dozen weights, one from each twelfth of the matrices: one a layer in a model of twelve layers.

    They depend on the model's shapes alone, so that runs with other methods and seeds can be compared.
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
    """Packed bits copied to 64-bit words; bits beyond the first `count` are zero."""
    padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: len(bits)] = bits
    if count % 8:
        padded[len(bits) - 1] &= (1 << count % 8) - 1
    return padded.view(torch.int64)


def count_bits(bits: Tensor) -> int:
    """How many bits of these words are set: adds up neighbouring bits, then pairs, fours, and all eight bytes."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return int(((bits * 0x0101010101010101) >> 56).sum())


def _rounded(values: Tensor) -> list[float]:
    """Four digits of each value; values that are not finite, from a step that was skipped, become zero."""
    return [_short(value) if math.isfinite(value) else 0.0 for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.4g}")
