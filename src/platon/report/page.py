"""The page of a report: one HTML file that loads nothing from the network and stores nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from platon.lab.percent import percent
from platon.report.chart import Chart, Charts, HeatMap, Violin, Violins, colour_number
from platon.report.command import command
from platon.report.report import Report
from platon.report.run import Run
from platon.report.table import Spans, Table
from platon.report.task import task_title

COLOURS = 10  # --c0 to --c9 in page.css


def page(report: Report) -> str:
    """The HTML file as text."""
    data = _data(report.charts)
    sections = [
        ("tables", "Results", "".join(_table(table) for table in report.results)),
        ("curves", "Curves", _group(data, "curves")),
        ("scores", "Scores", _group(data, "violins") + _group(data, "cdf") + _table(report.variability)),
        ("masks", "Masks", _group(data, "maps", choice=True) + _group(data, "churn") + _table(report.churn)),
        ("settings", "Settings", _settings(report.runs.runs)),
        ("reproduce", "Runs and how to repeat them", _reproduce(report.runs.runs)),
    ]
    sections = [section for section in sections if section[2]]
    name = html.escape(report.runs.folder.resolve().name)
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{text}</section>' for key, title, text in sections)
    # "</" is the only sequence that could end the script element early.
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{name} – platon report</title>\n'
        f"<style>\n{_asset('page.css')}</style>\n"
        f"</head>\n<body>\n<header><h1>{name}</h1>{_summary(report)}<nav>{links}</nav></header>\n<main>{body}</main>\n"
        "<footer>Written by <code>platon report</code> from the records of these runs alone.</footer>\n"
        "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>\n"
        f'<script type="application/json" id="data">{numbers}</script>\n<script>\n{_asset("page.js")}</script>\n'
        "</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("platon.report") / name).read_text(encoding="utf-8")


# --- the numbers of the charts ----------------------------------------------------------------------------------------


def _data(charts: Charts) -> dict[str, list[dict[str, Any]]]:
    """Group of charts -> its charts, as page.js draws them."""
    rows = charts.row_names()

    def group(*starts: str) -> list[dict[str, Any]]:
        return [_chart(chart, rows) for chart in charts.lines if chart.name.startswith(starts)]

    return {
        "curves": group("ratio-", "beta1-", "beta2-", "training-"),
        "churn": group("churn-"),
        "cdf": group("cdf-"),
        "violins": [_violins(violins) for violins in charts.violins],
        "maps": [_map(one) for one in charts.maps],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _chart(chart: Chart, rows: list[str]) -> dict[str, Any]:
    lines = [
        {
            "name": line.name,
            "dashed": line.dashed,
            "colour": "var(--soft)" if line.dashed else f"var(--c{colour_number(chart, line, rows) % COLOURS})",
            "points": [[_short(p.x), _short(p.y), _short(p.low), _short(p.high)] for p in line.points],
        }
        for line in chart.lines
    ]
    plain = {"name": chart.name, "title": chart.title, "x": chart.x, "y": chart.y, "log_x": chart.log_x}
    return {"kind": "lines", **plain, "lines": lines}


def _violins(violins: Violins) -> dict[str, Any]:
    def plain(one: Violin) -> dict[str, Any]:
        outline = [[_short(x), _short(y)] for x, y in one.outline]
        return {"label": one.label, "median": _short(one.median), "outline": outline}

    scores = [[name, [plain(one) for one in every]] for name, every in violins.scores]
    return {"kind": "violins", "name": violins.name, "title": violins.title, "scores": scores}


def _map(one: HeatMap) -> dict[str, Any]:
    panels = [[name, [[None if v is None else round(v, 1) for v in row] for row in rows]] for name, rows in one.panels]
    plain = {"name": one.name, "title": one.title, "steps": one.steps, "rows": one.rows}
    return {"kind": "map", **plain, "panels": panels}


# --- HTML -------------------------------------------------------------------------------------------------------------


def _group(data: dict[str, list[dict[str, Any]]], name: str, choice: bool = False) -> str:
    """The place where page.js draws a group of charts; nothing if it has none."""
    return f'<div class="charts" data-group="{name}"{" data-choice" if choice else ""}></div>' if data[name] else ""


def _table(table: Table | None) -> str:
    if table is None:
        return ""

    def cell(spans: Spans, place: int) -> str:
        parts = (f"<strong>{html.escape(s.text)}</strong>" if s.bold else html.escape(s.text) for s in spans)
        return f"<td{_left(place, table)}>{''.join(parts)}</td>"

    head = "".join(f"<th{_left(place, table)}>{html.escape(text)}</th>" for place, text in enumerate(table.head))
    rows = []
    for number, row in enumerate(table.body):
        ruled = ' class="rule"' if number in table.rules else ""
        rows.append(f"<tr{ruled}>{''.join(cell(spans, place) for place, spans in enumerate(row))}</tr>")
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
    return (
        f'<div class="card"><h3>{html.escape(table.title)}</h3><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{notes}</div>"
    )


def _left(place: int, table: Table) -> str:
    return ' class="l"' if place < table.labels else ""


def _summary(report: Report) -> str:
    runs = report.runs.runs
    tasks = report.runs.tasks
    pruned = [run for run in runs if not run.is_dense]
    failed = sum(not run.converged for run in runs)
    seeds = len({run.seed for run in runs})
    ratios = sorted({run.ratio for run in pruned}, reverse=True)
    facts = [
        (str(len(runs)), "run" if len(runs) == 1 else "runs"),
        (", ".join(map(task_title, tasks)), "task" if len(tasks) == 1 else "tasks"),
        (str(len({run.row for run in pruned})), "methods and variants"),
        (", ".join(percent(ratio, None) for ratio in ratios) or "100 %", "of the weights kept"),
        (str(seeds), "seed" if seeds == 1 else "seeds"),
        (f"{len(runs) - failed} of {len(runs)}", "converged"),
    ]
    boxes = "".join(f'<div class="fact"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in facts)
    notes = (f'<p class="warn">{html.escape(note[:1].upper() + note[1:])}.</p>' for note in report.runs.notes)
    return f'<div class="facts">{boxes}</div>{_comparison_sentence(report)}{"".join(notes)}'


def _comparison_sentence(report: Report) -> str:
    found = report.comparisons
    if not found:
        return ""
    ahead, significant = sum(one.is_ahead for one in found), sum(one.is_significant for one in found)
    return (
        f"<p>PLATON, each variant by itself, is ahead of the best baseline in {ahead} of {len(found)} comparisons; "
        f"{significant} of the {len(found)} differences, for or against it, have p &lt; 0.05.</p>"
    )


def _settings(runs: Sequence[Run]) -> str:
    """The settings that differ between runs, with their values; then those that all runs share, with their source."""
    names = list(dict.fromkeys(name for run in runs for name in run.record["settings"]))
    shared, differing = [], []
    for name in names:
        said = list(dict.fromkeys(json.dumps(run.setting(name), ensure_ascii=False) for run in runs))
        if len(said) == 1:
            sources = sorted({run.record["settings"].get(name, {}).get("source", "ours") for run in runs})
            shared.append((name, _plain(said[0]), ", ".join(sources)))
        else:
            differing.append((name, ", ".join(map(_plain, said[:12])) + (", …" if len(said) > 12 else ""), ""))

    def rows(found: Iterable[tuple[str, str, str]]) -> str:
        return "".join(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in found)

    head = '<thead><tr><th class="l">setting</th><th class="l">value</th><th class="l">source</th></tr></thead>'
    table = '<div class="wide"><table class="plain">{}<tbody>{}</tbody></table></div>'
    parts = []
    if differing:
        parts.append(
            f'<div class="card"><h3>What differs between the runs</h3>{table.format("", rows(differing))}</div>'
        )
    title = f"{'The settings that all runs share' if differing else 'The settings of the run'}, {len(shared)} of them"
    inside = table.format(head, rows(shared))
    parts.append(f'<div class="card"><details><summary>{title}</summary>{inside}</details></div>')
    versions = runs[0].record.get("versions", {})
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "".join(parts) + (f'<p class="note">The first run was made with {html.escape(words)}.</p>' if words else "")


def _plain(text: str) -> str:
    """A JSON value for people."""
    value = json.loads(text)
    return "–" if value is None else str(value) if not isinstance(value, bool) else "yes" if value else "no"


def _reproduce(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        value = f"{run.headline.name} {run.results[run.headline]:.2f}" if run.converged else "N.A."
        words = f"{task_title(run.task)}, {run.row}, {percent(run.ratio, None)} kept, seed {run.seed}: {value}"
        why = (
            ""
            if run.converged
            else f'<p class="warn">Did not converge: {html.escape(run.record["not_converged"])}.</p>'
        )
        place = "" if run.name == "." else f' <span class="note">{html.escape(run.name)}</span>'
        parts.append(
            f"<details><summary>{html.escape(words)}{place}</summary>{why}<pre>{html.escape(command(run))}</pre>"
            f'<p class="note">{percent(run.record["kept"], 2)} kept of {run.record["parameters"]["prunable"]:,} '
            f"prunable weights; {run.record.get('seconds', 0):,.0f} s</p></details>"
        )
    return f'<div class="card">{"".join(parts)}</div>'
