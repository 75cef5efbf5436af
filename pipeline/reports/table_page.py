"""A paper's table as an HTML page, and ``python -m pipeline.report --table``."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.page import Html, Section, html, page
from pipeline.reports.known_runs import find_runs, read_runs
from pipeline.reports.paper_tables import find_table
from pipeline.reports.row_runs import fill
from pipeline.reports.table_formats import column_groups, comma_separated, latex, markdown
from pipeline.reports.table_sheet import Sheet, make_sheet

_STYLE = """<style>
.paper-table th, .paper-table td { padding: 4px 10px; } .paper-table td { white-space: nowrap; } .paper-table .group { text-align: center; border-bottom: 0; }
.paper-table .ours { background: var(--soft); } .command { white-space: pre-wrap; overflow-wrap: anywhere; } .paper-table td:first-child, .paper-table th:first-child { padding-left: 0; }
</style>"""


def paper_table(name: str, paths: list[Path], form: str, any_data: bool = False) -> str:
    """A table of a paper with ours beside it.

    Args:
        name: as in ``configs/ablations/``.
        paths: run folders, and folders that hold some; none for the paper's figures alone.
        form: ``html``, ``markdown``, ``latex`` or ``csv``.
        any_data: see :mod:`pipeline.reports.row_runs`.

    Raises:
        UserError: there is no such table.
    """
    table = find_table(name)
    folders, missing = find_runs(paths)
    runs, damaged = read_runs(folders)
    sheet = make_sheet(fill(table, runs, any_data), [*missing, *damaged])
    if form == "csv":  # has no place for them
        for problem in sheet.problems:
            print(problem, file=sys.stderr)
    return {"html": table_page, "markdown": markdown, "latex": latex, "csv": comma_separated}[form](sheet)


def table_page(sheet: Sheet) -> str:
    """The page of a table."""
    sections = [
        Section(
            "Table",
            html("{}{}{}", Html(_STYLE), _table(sheet), [html('<p class="quiet">{}</p>', note) for note in sheet.footnotes]),
        )
    ]
    if sheet.missing:
        commands = [
            html(
                '<h3>{}</h3><pre class="command"><code>{}</code></pre>',
                missing.labels,
                "\n".join(filter(None, [missing.shards, missing.command])),
            )
            for missing in sheet.missing
        ]
        sections.append(
            Section(f"{len(sheet.missing)} rows without a run, and the commands that make one", html("{}", commands))
        )
    if sheet.unused or sheet.problems:
        reasons = [
            html("<p>Left out, as {}:</p><ul>{}</ul>", reason, [html("<li><code>{}</code></li>", path) for path in paths])
            for reason, paths in sheet.unused.items()
        ]
        problems = html("<ul>{}</ul>", [html("<li>{}</li>", problem) for problem in sheet.problems]) if sheet.problems else ""
        sections.append(Section("Runs in no row", html("{}{}", problems, reasons), closed=not sheet.problems))
    return page(sheet.title, sheet.paper, sections, sheet.notes, plots=False)


def _table(sheet: Sheet) -> Html:
    def css(number: int) -> Html:
        column = sheet.columns[number]
        kinds = ["n"] * column.numeric + ["ours"] * column.group.startswith("Ours")
        return Html(f' class="{" ".join(kinds)}"' if kinds else "")

    groups, first = [], 0
    for group, count in column_groups(sheet.columns):
        ours = " ours" if group.startswith("Ours") else ""
        groups.append(html('<th class="group{}" colspan="{}">{}</th>', ours, count, group))
        first += count
    titles = [html("<th{}>{}</th>", css(number), column.title) for number, column in enumerate(sheet.columns)]
    rows = [
        html(
            "<tr>{}</tr>", [html("<td{}>{}</td>", css(number), "" if cell is None else cell) for number, cell in enumerate(row)]
        )
        for row in sheet.rows
    ]
    return html(
        '<div class="wide"><table class="paper-table"><thead><tr>{}</tr><tr>{}</tr></thead><tbody>{}</tbody></table></div>',
        groups,
        titles,
        rows,
    )
