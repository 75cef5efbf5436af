"""Write a paper's table as an HTML page, Markdown, LaTeX or CSV: ``pervit report --table``."""

import csv
import io
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pipeline.errors import counted
from pipeline.page import Html, Section, html, join, page
from pipeline.reports.papers import find_table
from pipeline.reports.row_runs import Measured, fill
from pipeline.reports.table_sheet import Column, Number, Sheet, make_sheet
from pipeline.runs.folder import read_runs


def paper_table(name: str, paths: list[Path], form: str, any_data: bool = False) -> str:
    """A table of a paper, by its name in ``configs/tables/``, with ours beside it. Raises UserError: there is no such table. ``paths``: run
    folders, and folders that hold some; none for the paper's figures alone. Files: see ``Measured``. ``form``: ``html``, ``markdown``,
    ``latex`` or ``csv``. ``any_data``: see :mod:`pipeline.reports.row_runs`."""
    table = find_table(name)
    measured, places, others = Measured.read(paths)
    runs, problems = read_runs(places)
    sheet = make_sheet(fill(table, runs, any_data, measured), problems + others)
    return {"html": _page, "markdown": _markdown, "latex": _latex, "csv": _comma_separated}[form](sheet)


def _page(sheet: Sheet) -> str:
    footnotes = [html('<p class="quiet">{}</p>', note) for note in sheet.footnotes]
    sections = [Section("Table", html("{}{}", _table(sheet), footnotes))]
    if sheet.missing:
        how = '<h3>{}</h3><pre class="command"><code>{}</code></pre>'
        commands = [html(how, row.labels, "\n".join(filter(None, [row.shards, row.command]))) for row in sheet.missing]
        title = f"{counted(len(sheet.missing), 'row')} without a result, and the commands that make one"
        sections.append(Section(title, join(commands)))
    if sheet.unused or sheet.problems:
        parts = [html("<ul>{}</ul>", [html("<li>{}</li>", problem) for problem in sheet.problems])] if sheet.problems else []
        for reason, paths in sheet.unused.items():
            listed = [html("<li><code>{}</code></li>", path) for path in paths]
            parts.append(html("<p>Left out, as {}:</p><ul>{}</ul>", reason, listed))
        sections.append(Section("Runs in no row", join(parts), closed=not sheet.problems))
    return page(sheet.table.title, sheet.table.paper, sections, sheet.notes, plots=False)


def _table(sheet: Sheet) -> Html:
    def cells(tag: str, row: Iterable[object]) -> list[Html]:
        kinds = ["n" * column.numeric + " ours" * column.is_ours for column in sheet.columns]
        return [html('<{0} class="{1}">{2}</{0}>', tag, kind, "" if cell is None else cell) for kind, cell in zip(kinds, row)]

    group_of = '<th class="group{}" colspan="{}">{}</th>'
    groups = [html(group_of, " ours" * name.startswith("Ours"), count, name) for name, count in _groups(sheet)]
    titles = cells("th", (column.title for column in sheet.columns))
    rows = [html("<tr>{}</tr>", cells("td", row)) for row in sheet.rows]
    whole = '<div class="wide"><table class="paper-table"><thead><tr>{}</tr><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    return html(whole, groups, titles, rows)


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "Φ": r"$\Phi$", "Σ": r"$\Sigma$", "Δ": r"$\Delta$", "Γ": r"$\Gamma$", "λ": r"$\lambda$", "α": r"$\alpha$", "𝒩": r"$\mathcal{N}$",
    "✓": r"\checkmark", "–": "--", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "²": "$^2$", "ᵀ": r"$^\top$",
    "Φp": r"$\Phi_{\mathrm{p}}$", "Φc": r"$\Phi_{\mathrm{c}}$",
}  # fmt: skip
_LATEX_TOKEN = re.compile("Φp|Φc|" + "|".join(re.escape(key) for key in _LATEX if len(key) == 1))


def latex_text(text: str) -> str:
    """Text in LaTeX: special characters escaped, Greek and signs as mathematics."""
    return _LATEX_TOKEN.sub(lambda found: _LATEX[found[0]], text)


def _latex(sheet: Sheet) -> str:
    """A ``table`` environment; what else a reader has to know stands above it as comments and in the caption."""
    title = f"{sheet.table.paper}, {sheet.table.title}"
    missing = [f"Missing: {row.labels}: {row.command}" for row in sheet.missing]
    spans, rules, first = [], [], 1
    for group, count in _groups(sheet):
        spans.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_text(group)}}}")
        rules += [rf"\cmidrule(lr){{{first}-{first + count - 1}}}"] * bool(group)
        first += count
    head, *rows = _padded(sheet, [column.title for column in sheet.columns], latex_text)
    lines = [
        *(f"% {line}" for line in [title, *sheet.notes, *sheet.footnotes, *missing, *_left_out(sheet)]),
        r"% Needs \usepackage{booktabs} and \usepackage{amssymb}.",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex_text(title + '. ' + ' '.join(sheet.notes)).strip()}}}",
        rf"  \label{{tab:{sheet.table.name.replace('_', '-')}}}",
        rf"  \begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in sheet.columns)}}}",
        r"    \toprule",
        rf"    {' & '.join(spans)} \\",
        f"    {' '.join(rules)}",
        rf"    {' & '.join(head)} \\",
        r"    \midrule",
        *(rf"    {' & '.join(row)} \\" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _markdown(sheet: Sheet) -> str:
    """A section: notes, the table, footnotes, what is missing."""
    head, *rows = _padded(sheet, [f"{column.group} {column.title}".strip() for column in sheet.columns], _markdown_text)
    widths = map(_width, head)
    rule = ["-" * (width - 1) + ":" if column.numeric else "-" * width for width, column in zip(widths, sheet.columns)]
    lines = [f"## {_markdown_text(sheet.table.paper)}, {_markdown_text(sheet.table.title)}", ""]
    lines += [line for note in sheet.notes for line in (_markdown_text(note), "")]
    lines += ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]
    lines += ["", *(line for note in sheet.footnotes for line in (_markdown_text(note), ""))]
    if sheet.missing:
        lines += ["Rows without a run, and the commands that make one:", "", "```bash"]
        for missing in sheet.missing:
            lines += [f"# {missing.labels}", *([missing.shards] if missing.shards else []), missing.command]
        lines += ["```", ""]
    lines += [f"- {_markdown_text(line)}" for line in _left_out(sheet)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _comma_separated(sheet: Sheet) -> str:
    """Means and spreads in columns of their own, and in the last one what ours are of."""
    for problem in sheet.problems:  # the file has no place for them
        print(problem, file=sys.stderr)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    head = [key for column in sheet.columns for key in [column.key, f"{column.key}_std"][: 1 + column.has_spread]]
    writer.writerow([*head, "note"])
    for row in sheet.rows:
        cells: list[str] = []
        for column, cell in zip(sheet.columns, row):
            value, spread = (cell.value, cell.spread) if isinstance(cell, Number) else (cell or "", None)
            both = [f"{number:.4f}" if isinstance(number, float) else number or "" for number in (value, spread)]
            cells += both[: 1 + column.has_spread]
        writer.writerow([*cells, " ".join(sheet.notes)])
    return file.getvalue()


def _left_out(sheet: Sheet) -> list[str]:
    """A sentence for each reason why runs are in no row, and for each folder that cannot be read."""
    return [f"Left out: {', '.join(paths)}: {reason}." for reason, paths in sheet.unused.items()] + sheet.problems


def _groups(sheet: Sheet) -> list[tuple[str, int]]:
    """Title of each group of columns, and their number."""
    return [(group, len(list(members))) for group, members in groupby(sheet.columns, key=lambda column: column.group)]


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|_*<`\[\]])", r"\\\1", text)


def _padded(sheet: Sheet, head: list[str], form: Callable[[str], str]) -> list[list[str]]:
    """The head and the rows as text of equal width, so that the source is a table too."""
    whole: list[Sequence[object]] = [head, *sheet.rows]
    rows = [[form("" if cell is None else str(cell)) for cell in row] for row in whole]
    widths = [max(3, *map(_width, column)) for column in zip(*rows)]

    def padded(cell: str, width: int, column: Column) -> str:
        space = " " * (width - _width(cell))
        return space + cell if column.numeric else cell + space

    return [list(map(padded, row, widths, sheet.columns)) for row in rows]


def _width(text: str) -> int:
    """Columns of a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
