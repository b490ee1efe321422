"""The same masks on any number of ranks: with DDP, with FSDP2, after a resumption on another number of ranks.

program.py trains; its ranks are started once for all tests here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from platon.engine.methods import METHODS

PROGRAM = Path(__file__).with_name("program.py")
NAMES = [name for name, method in METHODS.items() if method.score is not None]
QUICK = ["platon", "l0"]  # averages and a cut over all; a learned score, random gates, and a penalty that is steered
UNITS = ["weights", "heads+neurons"]
#: each method; those that are too many for every day are left to `make check`
methods = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
units = pytest.mark.parametrize("units", UNITS)
worlds = pytest.mark.parametrize("world", [1, 2, 4])


@pytest.fixture(autouse=True)
def only_units_that_the_method_prunes(request: pytest.FixtureRequest) -> None:
    """Wanda reads the inputs of single weights."""
    asked = getattr(request.node, "callspec", None)
    given = {} if asked is None else asked.params
    if given.get("method") == "wanda" and given.get("units", "weights") != "weights":
        pytest.skip("Wanda ranks single weights")


class Found:
    """What the ranks wrote, for the methods asked for; trained when first asked."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __call__(self, method: str, world: int = 0, rank: int = 0) -> dict[str, Any]:
        group = QUICK if method in QUICK else [method]
        folder = self.place / "-".join(group)
        if not folder.exists():
            folder.mkdir()
            log = folder / "log"
            code = Forked(["python", str(PROGRAM), str(folder), *group], log).wait()
            assert code == 0, log.read_text()[-3000:]
        found: dict[str, Any] = json.loads((folder / (f"{world}-{rank}.json" if world else "alone.json")).read_text())
        return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("ranks"))


@methods
@units
@worlds
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_same_batch_gives_the_same_masks(found: Found, way: str, world: int, method: str, units: str) -> None:
    expected = found(method)["same"][f"bert, alone, {method}, {units}"]
    assert expected[-1]["kept"] <= 0.3 + 1e-3
    # The masks do move; groups of soft movement all fall at once, when their scores pass τ.
    moves = 1 if (method, units) == ("soft-movement", "heads+neurons") else 3
    assert len({seen["fingerprint"] for seen in expected}) > moves
    for rank in range(world):
        assert found(method, world, rank)["same"][f"bert, {way}, {method}, {units}"] == expected
    assert expected[-1]["exact"]


@methods
@worlds
def test_fewer_rows_than_ranks(found: Found, world: int, method: str) -> None:
    for rank in range(world):
        seen = found(method, world, rank)["same"][f"narrow, fsdp, {method}, weights"]
        assert seen == found(method)["same"][f"narrow, alone, {method}, weights"]
        assert seen[-1]["exact"]


@worlds
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_sample_over_ranks(found: Found, way: str, world: int) -> None:
    """Enough weights for the counts around the cut to ride on the update."""
    expected = found("platon")["same"]["wide bert, alone, platon, weights"]
    assert found("platon", world)["same"][f"wide bert, {way}, platon, weights"] == expected


@worlds
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_heads_that_lie_across_ranks(found: Found, way: str, world: int) -> None:
    expected = found("platon")["same"]["packed, alone, platon, heads+neurons"]
    assert expected[-1]["exact"]
    assert found("platon", world)["same"][f"packed, {way}, platon, heads+neurons"] == expected


@methods
@units
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_split_batch_differs_in_rounding_alone(found: Found, way: str, method: str, units: str) -> None:
    """The mean of two halves is not the mean of four rows to the last bit: a cut may fall on another weight."""
    alone = found(method)["split"][f"alone, {method}, {units}"]
    split = found(method, 2)["split"][f"{way}, {method}, {units}"]
    assert split == found(method, 2, 1)["split"][f"{way}, {method}, {units}"]
    pairs = [(bytes.fromhex(a), bytes.fromhex(b)) for a, b in zip(alone, split, strict=True)]
    assert len(pairs) == 20
    different = sum(x != y for a, b in pairs for x, y in zip(a, b, strict=True))
    assert different <= 1e-4 * sum(len(a) for a, _ in pairs)


@methods
@units
@pytest.mark.parametrize("world", [0, 1, 4], ids=["plain process", "1", "4"])
def test_saved_on_two_ranks_and_resumed_on_others(found: Found, world: int, method: str, units: str) -> None:
    expected = found(method, 2)["same"][f"bert, fsdp, {method}, {units}"]
    for rank in range(max(world, 1)):
        resumed = found(method, world, rank)["resumed"][f"{method}, {units}"]
        assert [(s["fingerprint"], s["kept"]) for s in resumed] == [(s["fingerprint"], s["kept"]) for s in expected[2:]]
        assert resumed[-1] == expected[-1]
