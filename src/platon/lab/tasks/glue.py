"""The eight GLUE tasks of the paper, with its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from platon.lab.tasks import sequence
from platon.lab.tasks.dataset import HubDataset
from platon.lab.tasks.target import Classes, Numbers
from platon.lab.tasks.task import NEW, Prepared, Request, Task
from platon.lab.tasks.text_file import read_new


@dataclass(frozen=True)
class Columns:
    """The columns of a GLUE task and the names of its labels in the hub's order; None is a number from 0 to 5."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] | None


COLUMNS = {
    "mnli": Columns(("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "rte": Columns(("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "qnli": Columns(("question", "sentence"), ("entailment", "not_entailment")),
    "mrpc": Columns(("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "qqp": Columns(("question1", "question2"), ("not_duplicate", "duplicate")),
    "sst2": Columns(("sentence",), ("negative", "positive")),
    "cola": Columns(("sentence",), ("unacceptable", "acceptable")),
    "stsb": Columns(("sentence1", "sentence2"), None),
}


def prepare(task: Task, request: Request) -> Prepared:
    """A GLUE task from the hub, from DIR/glue/<task>, or from DIR when that is the task's own folder."""
    columns = COLUMNS[task.name]
    target = Numbers(task.metrics) if columns.labels is None else Classes(columns.labels, task.metrics)
    if not request.labelled:
        assert request.data is not None
        return sequence.prepare(task, request, {NEW: read_new(request.data)}, columns.texts, "label", target)
    dataset = HubDataset("nyu-mll/glue", task.name, (f"glue/{task.name}", task.name, "."))
    # MNLI has two validation splits, and local copies may lack the second.
    stored = {split: split if split == "validation" else f"validation_{split}" for split in task.splits}
    wanted = {} if request.evaluation_only else {"train": True}
    found = dataset.read(request.data, wanted | {stored[split]: split == task.splits[0] for split in task.splits})
    splits = {name: found[file] for name, file in ({"train": "train"} | stored).items() if file in found}
    return sequence.prepare(task, request, splits, columns.texts, "label", target)
