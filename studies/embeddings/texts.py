"""Write the texts of the embedding runs: sentences of GLUE's training splits, each once, in a fixed random order.

    python studies/embeddings/texts.py data/glue texts.txt

SST-2 is left out, because most of its training rows are phrases. No text of STS-B's validation split, on which the
embeddings are measured, is among them.
"""

import random
import sys
from pathlib import Path

import pyarrow.parquet as parquet

COLUMNS = {
    "stsb": ("sentence1", "sentence2"),
    "mrpc": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "cola": ("sentence",),
}


def texts_of(file: Path, columns: tuple[str, ...]) -> set[str]:
    """The different texts of a file, with single spaces."""
    rows = parquet.read_table(file, columns=list(columns)).to_pydict()
    return {" ".join(text.split()) for column in columns for text in rows[column] if text.strip()}


def main(glue: Path, output: Path) -> None:
    found = set().union(*(texts_of(glue / task / "train.parquet", columns) for task, columns in COLUMNS.items()))
    texts = sorted(found - texts_of(glue / "stsb" / "validation.parquet", COLUMNS["stsb"]))
    random.Random(0).shuffle(texts)
    output.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    print(f"{len(texts):,} texts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
