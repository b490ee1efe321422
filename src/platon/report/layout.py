"""Which tables a report has, and which runs each of them shows: the paper's tables, and one for all other runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from platon.report import paper
from platon.report.run import Run

_GLUE = ("mnli", "rte", "qnli", "mrpc", "qqp", "sst2", "cola", "stsb")
_IMAGES = ("cifar100", "imagenet", "digits", "images")


@dataclass(frozen=True)
class Layout:
    """A kind of table.

    Args:
        name: a word for file names; also the table's name in `paper.csv`.
        title: stands above it.
        rows: what its rows are: one or two of "task", "ratio" and "row" (the method and its variant).
        columns: what its columns are, likewise.
        shows: whether it can show a run.
        needs: it exists if it shows a run with this property.
        only_where_needed: show only tasks and ratios that have such a run.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    shows: Callable[[Run], bool]
    needs: Callable[[Run], bool]
    only_where_needed: bool = False


def _is_pruned(run: Run) -> bool:
    return not run.is_dense


def _is_deberta(run: Run) -> bool:
    return "deberta" in str(run.setting("model")).lower()


def _by_weight(run: Run) -> bool:
    """Pruned weight by weight, or not at all."""
    return run.is_dense or run.setting("units") in (None, "weights")


def _is_variant(run: Run) -> bool:
    """A score that the paper compares PLATON's score with."""
    return run.method in paper.variants() and run.method != "platon"


def _is_main(run: Run) -> bool:
    return _by_weight(run) and not _is_variant(run)


def _names_beta(run: Run) -> bool:
    """Whether the row says β1 or β2: then the run has other values than most runs of its method."""
    return "β" in run.row


_BY_TASK = (("ratio", "row"), ("task",))
_BY_METHOD = (("task", "ratio"), ("row",))
_LAYOUTS = (
    Layout("glue", "GLUE", *_BY_TASK, lambda r: r.task in _GLUE and _is_main(r) and not _is_deberta(r), _is_pruned),
    Layout(
        "squad",
        "SQuAD v1.1",
        ("row",),
        ("ratio",),
        lambda run: run.task == "squad" and _is_main(run) and not _is_deberta(run),
        _is_pruned,
    ),
    Layout("deberta", "DeBERTaV3", *_BY_TASK, lambda run: _is_deberta(run) and _is_main(run), _is_pruned),
    Layout("vit", "Images", *_BY_METHOD, lambda run: run.task in _IMAGES and _is_main(run), _is_pruned),
    Layout(
        "variants",
        "Variants of the score",
        *_BY_TASK,
        lambda run: run.method in paper.variants() and _by_weight(run),
        _is_variant,
        only_where_needed=True,
    ),
    Layout(
        "betas",
        "Memory of the averages, β1 and β2",
        *_BY_TASK,
        lambda run: run.method == "platon" and _by_weight(run),
        _names_beta,
        only_where_needed=True,
    ),
    Layout(
        "structured",
        "Structured pruning",
        *_BY_METHOD,
        lambda run: run.method == "platon" or not _by_weight(run),
        lambda run: not _by_weight(run),
        only_where_needed=True,
    ),
)
_OTHER_RUNS = Layout("runs", "Runs", *_BY_TASK, lambda run: True, lambda run: True)


def choose_layouts(runs: Sequence[Run]) -> list[tuple[Layout, list[Run]]]:
    """The layouts that these runs fill, each with its runs. Every run is in one of them at least."""
    found = []
    shown: set[str] = set()
    usual_betas = {(run.task, run.ratio) for run in runs if run.method == "platon" and not _names_beta(run)}
    for layout in _LAYOUTS:
        chosen = [run for run in runs if layout.shows(run)]
        needed = {(run.task, run.ratio) for run in chosen if layout.needs(run)}
        if layout.only_where_needed:
            chosen = [run for run in chosen if (run.task, run.ratio) in needed]
        if layout.name != "betas":  # runs with other β are only in the table of β, unless there are no usual ones
            chosen = [run for run in chosen if not _names_beta(run) or (run.task, run.ratio) not in usual_betas]
        if needed:
            found.append((layout, chosen))
            shown |= {run.name for run in chosen}
    others = [run for run in runs if run.name not in shown]
    return [*found, *([(_OTHER_RUNS, others)] if others else [])]
