"""The probe: what it writes is what the training was, and the training does not notice it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from platon.lab.probe import Probe, count_bits, interval, sample_weights, words
from platon.lab.record import PROBE, read_history, read_record
from platon.lab.run import prune
from platon.lab.settings import ResolvedSettings, resolve
from platon.lab.stop import StopCallback

TINY: dict[str, Any] = {"train_rows": 128, "eval_rows": 40, "batch": 16, "steps": 12, "eval_every": 3, "dense": "none"}
TINY |= {"log_every": 2, "checkpoint_every": 4, "every": 2, "warmup": 1.0, "cooldown": 5.0, "optimizer": "sgd"}
TINY |= {"learning_rate": 0.05, "window": 1, "keep_checkpoints": True}
METHODS = ("platon", "magnitude", "movement", "soft-movement", "l0", "ratio", "dense")


def tiny(**flags: Any) -> ResolvedSettings:
    return resolve(flags={**TINY, **flags})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each method, and one of whole columns."""
    place = tmp_path_factory.mktemp("probed")
    for method in METHODS:
        prune(tiny(method=method), place / method)
    prune(tiny(units="columns"), place / "columns")
    return {path.name: path for path in place.iterdir()}


def lines(folder: Path, key: str) -> list[dict[str, Any]]:
    return [line for line in read_history(folder, PROBE) if key in line]


@pytest.mark.parametrize(
    ("method", "logged"),
    [
        ("platon", {"sensitivity", "uncertainty"}),
        ("ratio", {"sensitivity", "uncertainty"}),
        ("magnitude", set()),
        ("movement", {"score"}),
        ("soft-movement", {"score"}),
        ("l0", {"score"}),
        ("dense", set()),
        ("columns", set()),
    ],
)
def test_each_method_logs_what_it_has(method: str, logged: set[str], folders: dict[str, Path]) -> None:
    looks = lines(folders[method], "signal")
    assert [look["step"] for look in looks] == list(range(1, 13))
    assert all(len(looks[0].pop(name)) == 12 for name in ("names", "places"))
    for look in looks:
        assert set(look) - {"removed", "returned", "since"} == {"step", "signal", "weight"} | logged
        assert all(len(look[name]) == 12 for name in look.keys() - {"step", "removed", "returned", "since"})
        assert ("since" in look) == (method != "dense")
    assert max(max(look["signal"]) for look in looks) > 0
    header = lines(folders[method], "names")
    assert len(header) == 1
    assert set(header[0]["names"]) <= set(read_record(folders[method])["layers"])


def test_every_method_is_looked_at_in_the_same_places(folders: dict[str, Path]) -> None:
    first = [lines(folder, "names")[0] for folder in folders.values()]
    assert len({json.dumps([line["names"], line["places"]]) for line in first}) == 1


def test_averages_follow_from_the_signal(folders: dict[str, Path]) -> None:
    """The paper's equations, run over the logged |w g|, give the logged Ī and Ū."""
    sensitivity = uncertainty = np.zeros(12)
    for look in lines(folders["platon"], "signal"):
        signal = np.array(look["signal"])
        sensitivity = 0.85 * sensitivity + 0.15 * signal
        uncertainty = 0.85 * uncertainty + 0.15 * np.abs(signal - sensitivity)
        np.testing.assert_allclose(look["sensitivity"], sensitivity, rtol=2e-3, atol=1e-12)
        np.testing.assert_allclose(look["uncertainty"], uncertainty, rtol=5e-3, atol=1e-12)


@pytest.mark.parametrize("method", ["movement", "soft-movement", "l0"])
def test_pruned_weights_have_a_signal_where_the_method_reads_it(method: str, folders: dict[str, Path]) -> None:
    """Learned scores read G · w of the weight behind the mask: it is how a pruned weight comes back."""
    last = lines(folders[method], "signal")[-1]
    assert read_record(folders[method])["kept"] < 0.11
    assert all(signal > 0 for signal in last["signal"])
    assert all(weight > 0 for weight in last["weight"])


def test_the_shares_of_matrices_end_as_the_record_says(folders: dict[str, Path]) -> None:
    for method in ("platon", "magnitude", "columns"):
        record = read_record(folders[method])
        at = {line["step"]: line["layers"] for line in lines(folders[method], "layers")}
        assert list(at) == [2, 3, 4, 6, 8, 9, 10, 12]  # tenths of 12 steps, and evaluations
        assert at[record["best"]["step"]] == pytest.approx(record["layers"], abs=1e-5)


def test_flips_add_up_to_the_share_kept(folders: dict[str, Path]) -> None:
    for method in ("platon", "movement", "l0"):
        found = lines(folders[method], "since")
        kept = 1 - sum(line["removed"] for line in found) + sum(line["returned"] for line in found)
        assert kept == pytest.approx(0.1, abs=2e-3)
    assert lines(folders["dense"], "since") == []


def test_quantiles_are_those_of_the_state(folders: dict[str, Path]) -> None:
    found = lines(folders["platon"], "quantiles")
    assert [line["step"] for line in found] == [3, 6, 9, 12]
    state = load_file(folders["platon"] / "checkpoints" / "checkpoint-12" / "pruner.safetensors")
    for name in ("sensitivity", "uncertainty"):
        everything = np.concatenate([tensor.numpy() for key, tensor in state.items() if key.endswith(f":{name}")])
        sampled = np.searchsorted(np.sort(everything), found[-1]["quantiles"][name]) / len(everything)
        assert np.abs(sampled - np.linspace(0, 1, 201)).max() < 0.01
        assert found[-1]["quantiles"][name] == sorted(found[-1]["quantiles"][name])
    assert lines(folders["movement"], "quantiles") == []
    assert lines(folders["columns"], "quantiles")


@pytest.mark.parametrize("method", ["platon", "l0"])
def test_training_is_the_same_without_the_probe(
    method: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in vars(Probe) if name.startswith("on_")]:
        monkeypatch.delattr(Probe, name)
    prune(tiny(method=method), tmp_path / "bare")
    assert not (tmp_path / "bare" / PROBE).exists()
    ours, theirs = (load_file(f / "model" / "model.safetensors") for f in (folders[method], tmp_path / "bare"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_history(folders[method]) == read_history(tmp_path / "bare")


@pytest.mark.parametrize("method", ["platon", "movement"])
def test_a_stopped_run_writes_the_same_lines(
    method: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after step 6, resumed from the checkpoint at step 4: what came between is written once."""

    class Killed(Exception):  # noqa: N818
        pass

    def die(self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StopCallback, "on_step_begin", die, raising=False)
        with pytest.raises(Killed):
            prune(tiny(method=method), tmp_path / "run")
    assert lines(tmp_path / "run", "signal")[-1]["step"] == 6
    prune(tiny(method=method), tmp_path / "run", resume=True)
    assert read_history(tmp_path / "run", PROBE) == read_history(folders[method], PROBE)


def test_timing_before_is_measured_before(tmp_path: Path) -> None:
    prune(tiny(timing="before"), tmp_path / "run")
    sensitivity = np.zeros(12)
    for look in lines(tmp_path / "run", "signal"):
        sensitivity = 0.85 * sensitivity + 0.15 * np.array(look["signal"])
        np.testing.assert_allclose(look["sensitivity"], sensitivity, rtol=2e-3, atol=1e-12)


def test_one_weight_a_layer_where_there_are_twelve() -> None:
    for count in (12, 24, 72):
        matrices = {f"layer.{12 * n // count}.{n}": nn.Parameter(torch.zeros(3, 5)) for n in range(count)}
        picked = sample_weights(matrices)
        assert [name.split(".")[1] for name, _, _ in picked] == [str(n) for n in range(12)]
        assert all(0 <= place < 15 and parameter is matrices[name] for name, parameter, place in picked)
    few = {f"{n}": nn.Parameter(torch.zeros(2, 2)) for n in range(5)}
    assert {name for name, _, _ in sample_weights(few)} == set(few)


def test_interval() -> None:
    assert [interval(total) for total in (12, 99, 100, 3_000, 10_000, 10_001, 60_000)] == [1, 1, 10, 10, 10, 11, 60]


@given(st.lists(st.booleans(), min_size=1, max_size=300), st.booleans())
def test_bits_are_counted(kept: list[bool], beyond: bool) -> None:
    """Against Python's own count, whatever the bits after the last one are."""
    padded = kept + [beyond] * (-len(kept) % 8)
    packed = bytes(sum(bit << j for j, bit in enumerate(padded[i : i + 8])) for i in range(0, len(padded), 8))
    found = words(torch.frombuffer(bytearray(packed), dtype=torch.uint8), len(kept))
    assert found.dtype == torch.int64
    assert count_bits(found) == sum(kept)
    assert count_bits(~found) == 64 * len(found) - sum(kept)
