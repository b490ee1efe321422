"""Writes a report: tables in three formats, the results of every run, figures, and the page."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from platon.lab.record import write_text
from platon.report.figure import draw_charts
from platon.report.page import page
from platon.report.reader import Runs
from platon.report.report import Report
from platon.report.text import FORMATS

PAGE = "index.html"


def write_report(report: Report, target: Path, figures: bool = True, html: Path | None = None) -> list[Path]:
    """Write everything to the folder `target`, the page to `html` if given; returns the paths.

    The same records give the same bytes.
    """
    target.mkdir(parents=True, exist_ok=True)
    texts = {target / "numbers.csv": results_csv(report.runs)}
    for name, (ending, write) in FORMATS.items():
        if name == "csv":  # one file for each table, since their columns differ
            texts |= {target / f"{table.name}.{ending}": write(table) for table in report.tables}
        else:
            texts[target / f"tables.{ending}"] = "\n".join(write(table) for table in report.tables)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
    texts[html or target / PAGE] = page(report)
    for path, text in texts.items():
        write_text(path, text)
    return [*texts, *(draw_charts(report.charts, target / "figures") if figures else [])]


def results_csv(runs: Runs) -> str:
    """Every metric of every run that counts, one a line: for computations that the report does not make."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("run", "task", "method", "row", "ratio", "kept", "seed", "metric", "percent", "not_converged"))
    for run in runs:
        for metric, value in run.results.items():
            line = (run.name, run.task, run.method, run.row, f"{run.ratio:g}", f"{run.record['kept']:.6g}", run.seed)
            not_converged = run.record["not_converged"] or ""
            writer.writerow((*line, metric.title(run.results), f"{value:.4f}", not_converged))
    return out.getvalue()
