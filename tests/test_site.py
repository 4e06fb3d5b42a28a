"""The site: every page is in its navigation, and what its references are made of can be read off the code."""

from __future__ import annotations

import importlib
import re
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
    written = {page.name for page in docs.glob("*.md")} - {
        "paper.md"
    }  # excluded from the site: citations of the paper need pandoc
    made = {"contributing.md", "security.md", "changelog.md"}
    named = [page for page in navigation() if not page.startswith("reference/")]
    assert sorted(named) == sorted(written | made)


def test_results_are_counted_by_the_present_rules_and_readme_states_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SITE)
    results = importlib.import_module("results")
    found = results.results()
    head, _, *_ = results.table(found).splitlines()
    numbers = re.findall(r"(\d+) (?:agree|are undecided|differ|cannot be shown)", head)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert re.findall(r"(\d+) (?:numbers and claims agree|are undecided|differ|cannot be shown)", readme) == numbers
    cams = {name: results.curves(found[name]) for name in ("cams-figure-1", "cams-figure-8", "cams-figure-2")}
    assert cams["cams-figure-1"] == cams["cams-figure-8"] != cams["cams-figure-2"]
    lines = {
        name: line for line in results.table(found).splitlines() for name in cams if line.startswith(f"| [{name}]")
    }
    assert [name for name, line in lines.items() if "not counted again" in line] == ["cams-figure-8"]


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
