"""The table and the figure of a speed measurement."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from platon.lab.errors import UserError
from platon.lab.record import write_json
from platon.report.speed import draw_speed, tables

NAMES = {("eager", "dense"): 8.0, ("sparse", "pruned"): 2.0}


def measured(length: int | None = 128, accuracy: float | None = None) -> dict[str, Any]:
    """Two models in two engines, a third one that gave up, two batch sizes."""
    metrics = None if accuracy is None else {"validation": {"accuracy": accuracy}}
    lines: list[dict[str, Any]] = []
    for rows in (1, 4):
        for (engine, model), ms in NAMES.items():
            median = rows * ms
            numbers = {"median_ms": median, "low_ms": median / 2, "high_ms": 2 * median, "per_second": rows / median}
            lines.append({"engine": engine, "model": model, "rows": rows, "length": length, **numbers})
    said = {"rows": 1, "length": length, "error": "ValueError: no [such] package"}
    lines.append({"engine": "openvino", "model": "dense", **said})
    contenders = [
        {"engine": engine, "model": model, "bytes": 5_000_000, "metrics": metrics, "added_bytes": 3_000_000}
        for engine, model in NAMES
    ]
    machine = {"processor": "a processor", "threads": 2}
    models = {name: {"parameters": 1234, "bytes": 5_000_000} for name in ("dense", "pruned")}
    return {"format": 2, "machine": machine, "models": models, "timings": lines, "contenders": contenders}


def rows_of(table: Any) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_table() -> None:
    table, errors = tables(measured(accuracy=0.875))
    assert table.title == "2 threads of a processor"
    heads = [column.header for column in table.columns]
    assert heads[:4] == ["engine", "model", "size on disk", "memory"]
    assert heads[5:] == ["ms, 1 × 128", "ms, 4 × 128"]
    assert rows_of(table) == [
        ("eager", "dense", "5.00 MB", "3.00 MB", "87.50 %", "8 (1.00 ×)", "32 (1.00 ×)"),
        ("sparse", "pruned", "5.00 MB", "3.00 MB", "87.50 %", "2 (4.00 ×)", "8 (4.00 ×)"),
    ]
    assert rows_of(errors) == [("openvino", "ValueError: no \\[such] package")]


def test_images_have_no_length_and_memory_may_be_missing() -> None:
    found = measured(None)
    found["contenders"][1]["added_bytes"] = None
    table = tables(found)[0]
    assert [column.header for column in table.columns][4:] == ["ms, 1 row", "ms, 4 rows"]
    assert rows_of(table)[1][3] == "--"


@pytest.mark.parametrize(
    "found", [measured(), measured(None, 0.5), {**measured(), "timings": measured()["timings"][-1:]}]
)
def test_the_figure_is_drawn(found: dict[str, Any], tmp_path: Path) -> None:
    """Where nothing could be measured, too; with a second panel where there is a metric."""
    write_json(tmp_path / "speed.json", found)
    path = draw_speed(tmp_path)
    assert path == tmp_path / "figures" / "speed.png"
    with Image.open(path) as image:
        assert image.width > (1000 if found["contenders"][0]["metrics"] else 500)


def test_without_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no speed\.json in"):
        draw_speed(tmp_path)
