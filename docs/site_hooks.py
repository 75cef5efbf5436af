"""Add the pages that lie outside ``docs/`` to the site, and make every link work there as it does in the repository.

A page is written once, with links between files of the repository. On the site a link to a page leads to that page; one to a file
that the site does not have, such as a config, becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
# File of the repository -> page of the site.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/detection/README.md": "detection.md",
    "benchmarks/gpu_ledger/README.md": "results/gpu_records.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Take the pages that lie outside ``docs/`` into the site."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links, outside of code blocks."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else site_links(part, page.file.src_uri, files) for part in parts)


def site_links(text: str, page: str, files: Files) -> str:
    """The text of a page with links between pages of the site."""
    source = SOURCES.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        picture, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = PAGES.get(path, path.removeprefix("docs/"))
        if path not in PAGES and (not path.startswith("docs/") or files.get_file_from_path(found) is None):
            return label
        if label == posixpath.basename(target):  # a file's name reads badly outside of the repository
            label = re.findall("^# (.+)", (REPOSITORY / path).read_text(), re.MULTILINE)[0]
        return f"{picture}[{label}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, text)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take Sphinx's roles out of docstrings: ``:func:`name``` and ``::`` at the end of a paragraph."""
    html = re.sub(r":(?:func|class|meth|mod|data):(<code)", r"\1", html.replace("::</p>", ":</p>"))
    return html.replace("<code>~", "<code>")
