"""A report as files: tables in three formats, every run's numbers, figures, and the page."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from platon.lab.record import write_text
from platon.report.cells import Table, number_name
from platon.report.figures import draw_all
from platon.report.looks import churn_table, variability_table
from platon.report.page import page
from platon.report.runs import Runs
from platon.report.tables import Options, tables
from platon.report.text import FORMATS
from platon.report.whole import series

PAGE = "index.html"


def all_tables(runs: Runs, options: Options | None = None) -> list[Table]:
    """Results, tests, and what the probe saw."""
    more = (variability_table(runs.runs), churn_table(runs.runs))
    return [*tables(runs, options), *(table for table in more if table is not None)]


def write_report(
    runs: Runs, target: Path, options: Options | None = None, figures: bool = True, html: Path | None = None
) -> list[Path]:
    """Write everything; returns the paths. The same records give the same tables, to the byte."""
    target.mkdir(parents=True, exist_ok=True)
    shown = all_tables(runs, options)
    texts = {target / "numbers.csv": numbers(runs)}
    for name, (ending, write) in FORMATS.items():
        if name == "csv":  # a file a table, since their columns differ
            texts |= {target / f"{table.name}.{ending}": write(table) for table in shown}
        else:
            texts[target / f"tables.{ending}"] = "\n".join(write(table) for table in shown)
    found = series(runs)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
    texts[html or target / PAGE] = page(runs, options, found)
    for path, text in texts.items():
        write_text(path, text)
    return [*texts, *(draw_all(found, target / "figures") if figures else [])]


def numbers(runs: Runs) -> str:
    """Every run that counts and every metric of it, one a line: for whoever wants to compute something else."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("run", "task", "method", "row", "ratio", "kept", "seed", "metric", "percent", "not_converged"))
    for run in runs:
        for number, value in run.numbers.items():
            line = (run.name, run.task, run.method, run.row, f"{run.ratio:g}", f"{run.record['kept']:.6g}", run.seed)
            writer.writerow(
                (*line, number_name(number, run.numbers), f"{value:.4f}", run.record["not_converged"] or "")
            )
    return out.getvalue()
