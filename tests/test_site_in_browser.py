"""The site as readers have it: built, opened from the file system in a browser, searched, without the network.

Needs a browser and the extra `docs`; without them the tests say so and are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, find

ROOT = Path(__file__).parents[1]
PAGES = ["index.html", "gossip.html", "compression.html", "reference/compress.html", "start.html"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    find()
    missing = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: the site is NOT built and NOT tested (pip install 'hansa[docs]')")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(place)]
    known = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return place


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_without_the_network(browser: Browser, site: Path, page: str, width: int) -> None:
    browser.open(site / page, width=width)
    assert browser.console == []
    assert [one for one in browser.requests if not one.startswith(("file:", "data:"))] == []
    assert browser.run("[...document.images].filter((image) => !image.naturalWidth).length") == 0
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("page", ["index.html", "reference/compress.html"])
def test_search_answers_from_the_file_system(browser: Browser, site: Path, page: str) -> None:
    browser.open(site / page)
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.run(
        "(() => { const field = document.querySelector('[data-md-component=search-query]');"
        "field.value = 'error feedback';"
        "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
    )
    found = browser.until("[...document.querySelectorAll('.md-search-result__item a')].map((a) => a.href).join(' ')")
    assert f"{site.as_uri()}/compression.html" in found
    assert browser.console == []
