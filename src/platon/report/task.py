"""Tasks: their names and their order in tables."""

from __future__ import annotations

# The paper's tasks in the paper's order; other tasks follow in alphabetical order under the name in their record.
_TITLES = {"mnli": "MNLI", "rte": "RTE", "qnli": "QNLI", "mrpc": "MRPC", "qqp": "QQP", "sst2": "SST-2", "cola": "CoLA"}
_TITLES |= {"stsb": "STS-B", "squad": "SQuAD", "cifar100": "CIFAR-100", "imagenet": "ImageNet"}


def task_title(task: str) -> str:
    """A task's name in tables and figures."""
    return _TITLES.get(task, task)


def task_order(task: str) -> tuple[int, str]:
    """Sort key."""
    names = list(_TITLES)
    return (names.index(task) if task in names else len(names)), task
