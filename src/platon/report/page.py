"""The page: one HTML file for a run or a folder of runs. It asks no network for anything and stores nothing."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from platon.report.cells import TASKS, Spans, Table, percent
from platon.report.compare import comparison
from platon.report.looks import churn_table, variability_table
from platon.report.runs import Run, Runs
from platon.report.series import Chart, HeatMap, Series, Violin, Violins, line_number, row_names
from platon.report.tables import Options, tables
from platon.report.whole import series

COLOURS = 10  # that the style sheet names


def page(runs: Runs, options: Options | None = None, found: Series | None = None) -> str:
    """The whole file as text."""
    found = series(runs) if found is None else found
    sections = [
        ("tables", "Results", "".join(_table(table) for table in tables(runs, options))),
        ("curves", "Curves", _group("curves")),
        ("scores", "Scores", _group("violins") + _group("cdf") + _maybe(variability_table(runs.runs))),
        ("masks", "Masks", _group("maps", choice=True) + _group("churn") + _maybe(churn_table(runs.runs))),
        ("settings", "Settings", _settings(runs.runs)),
        ("reproduce", "Runs and how to repeat them", _reproduce(runs.runs)),
    ]
    data = _data(found)
    empty = {"curves": not data["curves"], "scores": not (data["violins"] or data["cdf"])}
    empty["masks"] = not (data["maps"] or data["churn"])
    sections = [section for section in sections if not empty.get(section[0])]
    name = html.escape(runs.folder.resolve().name)
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{text}</section>' for key, title, text in sections)
    # Inside a script element only "</" could end it early.
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{name} – platon report</title>\n'
        f"<style>\n{_asset('page.css')}</style>\n"
        f"</head>\n<body>\n<header><h1>{name}</h1>{_summary(runs)}<nav>{links}</nav></header>\n<main>{body}</main>\n"
        "<footer>Written by <code>platon report</code> from the records of these runs alone.</footer>\n"
        "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>\n"
        f'<script type="application/json" id="data">{numbers}</script>\n<script>\n{_asset("page.js")}</script>\n'
        "</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("platon.report") / name).read_text(encoding="utf-8")


# --- what the charts read ---------------------------------------------------------------------------------------------


def _data(found: Series) -> dict[str, list[dict[str, Any]]]:
    names = row_names(found)

    def group(*starts: str) -> list[dict[str, Any]]:
        return [_chart(chart, names) for chart in found.charts if chart.name.startswith(starts)]

    return {
        "curves": group("ratio-", "beta1-", "beta2-", "training-"),
        "churn": group("churn-"),
        "cdf": group("cdf-"),
        "violins": [_violins(violins) for violins in found.violins],
        "maps": [_map(one) for one in found.maps],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _chart(chart: Chart, names: list[str]) -> dict[str, Any]:
    lines = [
        {
            "name": line.name,
            "dashed": line.dashed,
            "colour": "var(--soft)" if line.dashed else f"var(--c{line_number(chart, line, names) % COLOURS})",
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


# --- what stands in the page itself -----------------------------------------------------------------------------------


def _group(name: str, choice: bool = False) -> str:
    return f'<div class="charts" data-group="{name}"{" data-choice" if choice else ""}></div>'


def _maybe(table: Table | None) -> str:
    return "" if table is None else _table(table)


def _table(table: Table) -> str:
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
    return ' class="l"' if place < table.marks else ""


def _summary(runs: Runs) -> str:
    every = runs.runs
    pruned = [run for run in every if run.method != "dense"]
    failed = sum(not run.converged for run in every)
    seeds = len({run.seed for run in every})
    ratios = sorted({run.ratio for run in pruned}, reverse=True)
    facts = [
        (str(len(every)), "run" if len(every) == 1 else "runs"),
        (", ".join(TASKS.get(task, task) for task in runs.tasks), "task" if len(runs.tasks) == 1 else "tasks"),
        (str(len({run.row for run in pruned})), "methods and variants"),
        (", ".join(map(percent, ratios)) or "100 %", "of the weights kept"),
        (str(seeds), "seed" if seeds == 1 else "seeds"),
        (f"{len(every) - failed} of {len(every)}", "converged"),
    ]
    boxes = "".join(f'<div class="fact"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in facts)
    notes = "".join(f'<p class="warn">{html.escape(note[:1].upper() + note[1:])}.</p>' for note in runs.notes)
    return f'<div class="facts">{boxes}</div>{_won(every)}{notes}'


def _won(runs: Sequence[Run]) -> str:
    """One sentence on the tests, if there are any."""
    tests = comparison(runs)
    if tests is None:
        return ""
    texts = [["".join(span.text for span in spans) for spans in row] for row in tests.body]
    ahead = sum(row[-3].startswith("+") and row[-3] != "+0.0" for row in texts)
    sure = sum(row[-1] != "--" and float(row[-1]) < 0.05 for row in texts)
    return (
        f"<p>PLATON, each variant by itself, is ahead of the best baseline in {ahead} of {len(texts)} comparisons; "
        f"{sure} of the {len(texts)} differences, for or against it, have p &lt; 0.05.</p>"
    )


def _settings(runs: Sequence[Run]) -> str:
    """What all runs share, once, with its source; and what differs, by value."""
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
    """A JSON value as a reader writes it."""
    value = json.loads(text)
    return "–" if value is None else str(value) if not isinstance(value, bool) else "yes" if value else "no"


def _reproduce(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        value = f"{run.headline[1]} {run.numbers[run.headline]:.2f}" if run.converged else "N.A."
        words = f"{TASKS.get(run.task, run.task)}, {run.row}, {percent(run.ratio)} kept, seed {run.seed}: {value}"
        why = (
            ""
            if run.converged
            else f'<p class="warn">Did not converge: {html.escape(run.record["not_converged"])}.</p>'
        )
        place = "" if run.name == "." else f' <span class="note">{html.escape(run.name)}</span>'
        parts.append(
            f"<details><summary>{html.escape(words)}{place}</summary>{why}<pre>{html.escape(command(run))}</pre>"
            f'<p class="note">{run.record["kept"]:.2%} kept of {run.record["parameters"]["prunable"]:,} prunable '
            f"weights; {run.record.get('seconds', 0):,.0f} s</p></details>"
        )
    return f'<div class="card">{"".join(parts)}</div>'


def command(run: Run) -> str:
    """The exact command that repeats a run: its recipe, what the user said, and what makes it this run."""
    words = ["platon", "prune"]
    if run.record.get("recipe"):
        words += ["--recipe", run.record["recipe"]]
    penalised = run.record["decided_by"] == "penalty"
    for name, said in run.record["settings"].items():
        value = said["value"]
        needed = name in ("task", "method", "seed") or (name == "keep" and run.method != "dense" and not penalised)
        if value is None or not (needed or said["source"] == "user") or (name == "keep" and penalised):
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [
                f"--{option}",
                f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value),
            ]
    return shlex.join(words)
