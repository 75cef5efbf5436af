"""The documentation as a site: it builds without a warning, its links hold, and it asks nothing of other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))), reason="needs the extra docs: make docs installs it"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    environment = clean_environment(NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def test_every_page_is_there(site: Path) -> None:
    """Guards against a page of the repository that the site leaves out."""
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    written = {path.relative_to(REPOSITORY / "docs").with_suffix("").as_posix() for path in (REPOSITORY / "docs").rglob("*.md")}
    written = {name.replace("README", "index") for name in written}
    assert pages - {"404"} == written | {
        "index",
        "architecture",
        "contributing",
        "changelog",
        "detection",
        "results/gpu_records",
    }


def test_links_and_anchors_hold(site: Path) -> None:
    """Guards against links that the hook rewrites to pages or headings that there are not."""
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    seen = 0
    for page, text in pages.items():
        for link in map(unescape, re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page.name}: {link}"
            assert not parts.fragment or target not in anchors or unquote(parts.fragment) in {*anchors[target], "__top"}, link
            seen += 1
    assert seen > 1000


def test_nothing_is_asked_of_other_hosts(site: Path) -> None:
    """Guards against fonts, scripts and styles of a content network, which tell it who reads, and are missing without a network."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"', page.read_text())
        loaded += re.findall(r'<link\b[^>]*\bhref="([^"]+)"', page.read_text())
        assert loaded and [address for address in loaded if "//" in address] == [], page.name
        assert "mermaid" not in page.read_text(), "the theme would load it from another host"
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(\s*[\"']?(?:https?:)?//", style.read_text()) == [], style.name


def test_pages_are_no_longer_than_one_reads() -> None:
    """Guards against pages that grow; the generated one of keys is looked up, not read."""
    long = {p.name: len(p.read_text().split()) for p in (REPOSITORY / "docs").rglob("*.md") if p.name != "config.md"}
    assert {name: words for name, words in long.items() if words > 2500} == {}
