"""Files that a run leaves: whole or not at all, and readable after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from platon.lab import record
from platon.lab.errors import UserError


def test_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    record.write_json(file, {"a": 1, "word": "Ī"})
    assert record.read_json(file) == {"a": 1, "word": "Ī"}

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        record.write_json(file, {"a": 2})
    assert record.read_json(file) == {"a": 1, "word": "Ī"}
    assert list(tmp_path.iterdir()) == [file]  # and nothing half-written lies about


def test_numbers_that_json_does_not_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.write_json(tmp_path / "a.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no a\.json in "):
        record.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.json' is damaged: "):
        record.read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "holds no finished run: there is no record.json in it"),
        ("{", "is damaged"),
        ("[1]", "is damaged: it is no record"),
        ('{"format": 2}', "has format 2, this version of platon reads 1"),
        ("{}", "has format None"),
    ],
)
def test_record_that_is_none(text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / record.RECORD).write_text(text)
    with pytest.raises(UserError, match=sentence):
        record.read_record(tmp_path)


WHOLE: dict[str, Any] = {
    "format": 1,
    "task": "digits",
    "method": "platon",
    "settings": {"seed": {"value": 0, "source": "ours"}},
    "metrics": ["accuracy"],
    "results": {"validation": {"accuracy": 0.5}},
    "kept": 0.1,
    "parameters": {"all": 10, "prunable": 8, "left": 3},
    "layers": {"layer.0": 0.1},
    "seconds": 2.0,
}


def test_whole_record_is_read(tmp_path: Path) -> None:
    for more in ({}, {"title": "PLATON", "decided_by": None, "seconds": 2}):
        record.write_json(tmp_path / record.RECORD, WHOLE | more)
        assert record.read_record(tmp_path) == WHOLE | more


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        *((name, None, name) for name in WHOLE if name != "format"),
        ("settings", {"seed": 0}, "settings.seed"),
        ("results", {}, "results"),
        ("results", {"validation": {"accuracy": "good"}}, "results.validation.accuracy"),
        ("kept", 17.0, "kept"),
        ("layers", {"layer.0": "half"}, "layers.layer.0"),
        ("layers", {"layer.0": 1.5}, "layers.layer.0"),
        ("layers", [0.1], "layers"),
        ("parameters", {"all": 10}, "parameters.prunable"),
    ],
)
def test_record_with_holes_is_one_sentence(name: str, value: Any, place: str, tmp_path: Path) -> None:
    record.write_json(tmp_path / record.RECORD, WHOLE | {name: value})
    with pytest.raises(UserError, match=f"is half a record: {name!r} is missing or damaged .{place}: ") as caught:
        record.read_record(tmp_path)
    assert "\n" not in str(caught.value)
    record.write_json(tmp_path / record.RECORD, {key: one for key, one in WHOLE.items() if key != name})
    with pytest.raises(UserError, match=f"is half a record: {name!r} is missing or damaged .{name}: field required"):
        record.read_record(tmp_path)


def test_deeply_nested_json_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / record.RECORD).write_text("[" * 200_000)
    with pytest.raises(UserError, match="is damaged"):
        record.read_record(tmp_path)


def test_line_separators_inside_a_text_split_no_line(tmp_path: Path) -> None:
    (tmp_path / record.HISTORY).write_text('{"step": 1, "note": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert record.read_history(tmp_path) == [{"step": 1, "note": "a\u2028b\x85c"}]


def test_history_survives_a_line_cut_short(tmp_path: Path) -> None:
    assert record.read_history(tmp_path) == []
    for step in (1, 2, 3):
        record.append_history(tmp_path, {"step": step, "loss": 1 / step})
    with (tmp_path / record.HISTORY).open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in record.read_history(tmp_path)] == [1, 2, 3]
    record.rewind_history(tmp_path, 2)
    record.append_history(tmp_path, {"step": 3, "loss": 0.25})
    assert [json.loads(line) for line in (tmp_path / record.HISTORY).read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 0.25},
    ]


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert record.file_sha256(tmp_path / "a") == record.sha256([b"a", b"bc"])
    assert record.file_sha256(tmp_path / "a").startswith("ba7816bf")


@pytest.mark.parametrize("name", ["dense", "fast"])
def test_what_was_added_later_may_be_missing_and_has_to_fit(name: str, tmp_path: Path) -> None:
    for value in (None, {}, {"error": "no space"}):
        record.write_json(tmp_path / record.RECORD, WHOLE | {name: value})
        assert record.read_record(tmp_path) == WHOLE | {name: value}
    record.write_json(tmp_path / record.RECORD, WHOLE | {name: 3})
    with pytest.raises(UserError, match=f"is half a record: {name!r} is missing or damaged .{name}: "):
        record.read_record(tmp_path)
