"""Tables as text: for a terminal, in Markdown, in LaTeX, in CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import rich.table
from rich.text import Text

from platon.report.table import Spans, Table

_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
_LATEX |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "β": r"$\beta$", "λ": r"$\lambda$"}
_LATEX |= {"Ī": r"$\overline{I}$", "Ū": r"$\overline{U}$", "ℓ": r"$\ell$", "×": r"$\times$", "≥": r"$\geq$"}


def plain(spans: Spans) -> str:
    """A cell's text without bold."""
    return "".join(span.text for span in spans)


def terminal(table: Table) -> rich.table.Table:
    """A table for a rich console, without its notes."""
    shown = rich.table.Table(title=table.title, title_justify="left")
    for place, text in enumerate(table.head):
        shown.add_column(text, justify="left" if place < table.labels else "right", no_wrap=place < table.labels)
    for number, row in enumerate(table.body):
        if number in table.rules:
            shown.add_section()
        shown.add_row(*(Text.assemble(*((s.text, "bold" if s.bold else "") for s in cell)) for cell in row))
    return shown


def markdown(table: Table) -> str:
    """A heading, the table, and its notes."""

    def cell(spans: Spans) -> str:
        text = "".join(f"**{span.text}**" if span.bold else span.text for span in spans)
        return text.replace("|", r"\|")

    lines = [f"### {table.title}", "", "| " + " | ".join(table.head) + " |"]
    lines.append("|" + "|".join("---" if place < table.labels else "---:" for place in range(len(table.head))) + "|")
    lines += ["| " + " | ".join(cell(spans) for spans in row) + " |" for row in table.body]
    return "\n".join([*lines, "", *(f"{note}  " for note in table.notes[:-1]), *table.notes[-1:]]) + "\n"


def latex(table: Table) -> str:
    r"""A `table` environment; needs the package booktabs."""

    def cell(spans: Spans) -> str:
        return "".join(rf"\textbf{{{_escaped(span.text)}}}" if span.bold else _escaped(span.text) for span in spans)

    columns = "l" * table.labels + "r" * (len(table.head) - table.labels)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_escaped(' '.join((table.title + '.', *table.notes)))}}}"]
    lines += [rf"\label{{tab:{table.name}}}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines += [" & ".join(map(_escaped, table.head)) + r" \\", r"\midrule"]
    for number, row in enumerate(table.body):
        lines += [r"\midrule"] if number in table.rules else []
        lines.append(" & ".join(cell(spans) for spans in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def comma_separated(table: Table) -> str:
    """CSV. Labels that other formats leave out because they equal the label above are repeated in each row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.head)
    last = [""] * table.labels
    for row in table.body:
        texts = [plain(spans) for spans in row]
        last = [text or before for text, before in zip(texts[: table.labels], last, strict=True)]
        writer.writerow([*last, *texts[table.labels :]])
    return out.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "markdown": ("md", markdown),
    "latex": ("tex", latex),
    "csv": ("csv", comma_separated),
}
