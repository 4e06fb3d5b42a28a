"""The site: every page is in its navigation, and what its references are made of can be read off the code."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in pages(item)]  # type: ignore[attr-defined, union-attr]


def told(what: str) -> str:
    run = subprocess.run([sys.executable, SITE / "reference.py", what], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def navigation() -> list[str]:
    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    written = {str(page.relative_to(docs)) for page in (*docs.glob("*.md"), *docs.glob("results/reproduced/*.md"))}
    written -= {"paper.md"}  # excluded from the site: citations of the paper need pandoc
    made = {"contributing.md", "security.md", "changelog.md"}
    named = [page for page in navigation() if not page.startswith("reference/")]
    assert sorted(named) == sorted(written | made)


def test_the_page_of_reproduced_results_is_made_of_the_results() -> None:
    script = ROOT / "benchmarks" / "studies" / "reproduced.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_room_of_the_reference_is_in_the_navigation() -> None:
    listed = {line.split()[0] for line in told("names").splitlines()} | {"cli", "config", "api"}
    assert {page for page in navigation() if page.startswith("reference/")} == {f"reference/{one}.md" for one in listed}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cli", ["## hansa run", "## hansa data list", "`--seeds`", "## hansa reproduce"]),
        ("config", ["## local", "| `batch_size` |", "## evaluate"]),
        ("names", ["hansa.presets.fedcams", "hansa.compress.sign", "hansa.Task"]),
    ],
)
def test_references_are_read_off_the_code(what: str, words: list[str]) -> None:
    text = told(what)
    for word in words:
        assert word in text


def test_equations_are_converted_and_code_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SITE)
    equations = importlib.import_module("equations")
    text = "rate $O(1/\\sqrt{T})$, cost $5, `$x$`\n\n```bash\necho $HOME $y$\n```\n\n$$a_i$$\n"
    result = equations.with_equations(text, lambda latex, display: f"<{display} {latex}>")
    assert "rate <inline O(1/\\sqrt{T})>, cost $5, `$x$`" in result
    assert "echo $HOME $y$" in result
    assert "<block a_i>" in result
    pages_with_equations = {page.name for page in (ROOT / "docs").glob("*.md")
                            if equations.equations_of(page.read_text(encoding="utf-8"))}  # fmt: skip
    assert {"compression.md", "gossip.md", "methods.md"} <= pages_with_equations
    for page in (ROOT / "docs").glob("*.md"):
        for latex in equations.equations_of(page.read_text(encoding="utf-8")):
            assert latex.count("{") == latex.count("}"), (page.name, latex)
            assert "|" not in latex, (page.name, latex)  # would end a cell of a table
