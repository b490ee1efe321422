"""The tables and the figure of a speed measurement."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from platon.lab.errors import UserError
from platon.lab.record import write_json
from platon.report.speed import draw_speed, setting_name, tables


def timing(engine: str, rows: int, length: int | None, model: str, median: float) -> dict[str, Any]:
    numbers = {"median_ms": median, "low_ms": median / 2, "high_ms": 2 * median, "per_second": rows / median}
    return {"engine": engine, "rows": rows, "length": length, "model": model, **numbers}


def measured(length: int | None = 128, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Two models, two engines of which one gave up, two batch sizes."""
    names = {"dense": 8.0, "pruned": 2.0}
    lines = [timing("eager", rows, length, name, rows * ms) for rows in (1, 4) for name, ms in names.items()]
    lines.append({"engine": "onnx", "rows": 1, "length": length, "error": "ValueError: no [such] package"})
    memory = [
        {"engine": "eager", "rows": 4, "length": length, "model": name, "peak_bytes": 3_000_000} for name in names
    ]
    memory += [{"engine": "onnx", "rows": 4, "length": length, "model": name, "error": "x"} for name in names]
    models = {name: {"parameters": 1234, "bytes": 5_000_000, "metrics": metrics} for name in names}
    machine = {"processor": "a processor", "threads": 2}
    return {"format": 1, "machine": machine, "models": models, "timings": lines, "memory": memory}


def rows_of(table: Any) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_tables() -> None:
    sizes, times = tables(measured(metrics={"validation": {"accuracy": 0.875}}))
    assert sizes.title == "2 threads of a processor"
    assert rows_of(sizes) == [
        ("parameters", "1,234", "1,234"),
        ("size on disk", "5.00 MB", "5.00 MB"),
        ("validation accuracy", "87.50 %", "87.50 %"),
        ("peak memory, eager", "3 MB", "3 MB"),
        ("peak memory, onnx", "--", "--"),
    ]
    assert rows_of(times) == [
        ("eager, 1 × 128", "8.0 ms (4.0–16.0), 0.1/s", "2.0 ms (1.0–4.0), 0.5/s", "4.00 ×"),
        ("eager, 4 × 128", "32.0 ms (16.0–64.0), 0.1/s", "8.0 ms (4.0–16.0), 0.5/s", "4.00 ×"),
        ("onnx, 1 × 128", "ValueError: no \\[such] package", "", ""),
    ]


def test_images_have_no_length() -> None:
    assert setting_name({"engine": "compile", "rows": 3, "length": None}) == "compile, 3"


@pytest.mark.parametrize("found", [measured(), measured(None), {**measured(), "timings": measured()["timings"][-1:]}])
def test_the_figure_is_drawn(found: dict[str, Any], tmp_path: Path) -> None:
    """Where nothing could be measured, too."""
    write_json(tmp_path / "speed.json", found)
    path = draw_speed(tmp_path)
    assert path == tmp_path / "figures" / "speed.png"
    with Image.open(path) as image:
        assert image.width > 500


def test_without_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no speed\.json in"):
        draw_speed(tmp_path)
