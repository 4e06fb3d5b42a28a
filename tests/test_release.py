"""A release says its version once; what must repeat it agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import hansa

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)


def released() -> list[tuple[str, str]]:
    return HEADING.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [one for one in headings if one != "Unreleased"] == [f"{version} ({day})" for version, day in released()]
    assert "Unreleased" not in headings[1:]
    versions = [tuple(int(part) for part in version.split(".")) for version, _ in released()]
    assert versions == sorted(versions, reverse=True)
    assert released()[0][0] == hansa.__version__


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(cited["version"]), str(cited["date-released"])) == (hansa.__version__, released()[0][1])


def test_the_build_reads_the_version_off_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hansa.__version__"}


def test_hosted_checks_cover_what_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    claimed = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    matrix = flow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == claimed
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]
    assert {one["os"] for one in matrix["include"] if one["native"] == "without a compiler"} == set(matrix["os"])


def test_hooks_before_a_commit_need_no_network() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [one["repo"] for one in hooks] == ["local"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in hooks[0]["hooks"]:
        assert hook["language"] == "system"
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert f"$(BIN)/{tool}" in makefile, f"{tool} is not what `make lint` runs"
