"""CoNLL files: a word in each line, its tag in the last column, an empty line between sentences."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset

from platon.lab.errors import UserError

SUFFIXES = (".conll", ".iob", ".iob2", ".bio", ".txt")
WORDS, TAGS = "words", "tags"  #: the columns of the rows that are read
_DOCUMENT = "-DOCSTART-"  # CoNLL-2003 puts it between documents


def read_conll(file: Path) -> Dataset:
    """The sentences of a file, as lists of words and lists of tags."""
    words: list[list[str]] = [[]]
    tags: list[list[str]] = [[]]
    cells_of_first = None
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        # Tabs separate cells that may be empty or hold blanks; otherwise any blanks do.
        cells = [cell.strip() for cell in line.split("\t")] if "\t" in line.strip() else line.split()
        if not cells or cells[0] == _DOCUMENT:
            if words[-1]:
                words.append([])
                tags.append([])
            continue
        if not words[-1] and _is_comment(cells, cells_of_first):
            continue
        cells_of_first = cells_of_first or len(cells)
        if len(cells) < 2 or not cells[0] or not cells[-1]:
            raise UserError(
                f"{file}, line {number}, must be a word and its tag, with blanks or tabs between them, got {line!r}"
            )
        words[-1].append(cells[0])
        tags[-1].append(cells[-1])
    return Dataset.from_dict(
        {WORDS: [row for row in words if row], TAGS: [row for row in tags if row]},
    )


def _is_comment(cells: list[str], cells_of_first: int | None) -> bool:
    """Whether a line before a sentence is about it, such as `# text = …`; "#" can also be a word of the sentence."""
    if cells[0] != "#":
        return False
    return len(cells) != (cells_of_first or 2) or any("=" in cell for cell in cells)
