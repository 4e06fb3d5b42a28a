"""A release says its version once; what must repeat it agrees."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import yaml

import hansa

ROOT = Path(__file__).parents[1]
VERSION = hansa.__version__.partition(".dev")[0]
"""The newest release, or between releases the next one."""


def released() -> str:
    """The date of the newest section of the changelog, or "unreleased"."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) \((unreleased|\d{4}-\d{2}-\d{2})\)", heading) for heading in headings]
    assert all(versions)
    assert versions[0]
    assert versions[0][1] == VERSION
    assert "unreleased" not in [version[2] for version in versions[1:] if version]
    return versions[0][2]


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    assert (released() == "unreleased") == (".dev" in hansa.__version__)


def test_the_citation_is_of_this_version_and_the_archive_record_agrees() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(cited["version"]) == VERSION
    assert str(cited.get("date-released", "unreleased")) == released()
    record = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    assert [record[name] for name in ("keywords", "license")] == [cited[name] for name in ("keywords", "license")]
    assert [one["name"] for one in record["creators"]] == [one["name"] for one in cited["authors"]]


def test_wheels_and_hosted_tests_cover_the_pythons_that_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    claimed = [one.rpartition(" ")[2] for one in project["project"]["classifiers"] if re.search(r":: 3\.\d+$", one)]
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert flow["jobs"]["test"]["strategy"]["matrix"]["python"] == claimed
    assert project["tool"]["cibuildwheel"]["build"].split() == [f"cp{one.replace('.', '')}-*" for one in claimed]


def test_the_conda_recipe_has_this_version_and_these_dependencies() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == VERSION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {"torch": "pytorch"}  # called differently there
    needed = [re.fullmatch(r"([\w-]+)(>=[\d.]+)", one) for one in project["project"]["dependencies"]]
    assert all(needed)
    expected = [f"{names.get(one[1], one[1])} {one[2]}" for one in needed if one]
    assert recipe["requirements"]["run"] == ["python", *expected]
    assert [one for one in recipe["requirements"]["host"] if one.startswith("setuptools")] == ["setuptools >=77"]
    assert project["build-system"]["requires"] == ["setuptools>=77"]


def test_readme_on_a_package_index_has_absolute_links_to_files_of_the_repository() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    long_description = runpy.run_path(str(ROOT / "setup.py"))["long_description"]
    assert long_description(readme, None) == readme
    targets = re.findall(r"\]\(([^)]+)\)", long_description(readme, "https://example.org/hansa"))
    assert "https://example.org/hansa/raw/HEAD/docs/demo.png" in targets
    assert "https://example.org/hansa/blob/HEAD/docs/start.md" in targets
    for target in targets:
        assert re.match("https?://", target), target
        if match := re.match("https://example.org/hansa/(?:raw|blob)/HEAD/(.*)", target):
            assert (ROOT / match[1].partition("#")[0]).exists(), target


def test_the_address_and_the_security_contact_are_the_same_everywhere_and_filled_in_for_a_release() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    contact = re.search(r"^Contact: (.*)$", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited.get("repository-code") == urls.get("Repository")
    assert contact
    assert contact[1] == urls.get("Security", "not filled in yet.")
    assert ".dev" in hansa.__version__ or {"Repository", "Security"} <= set(urls)


def test_releases_are_signed_and_published_from_tags_only() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8"))
    jobs = flow["jobs"]
    assert flow["permissions"] == {"contents": "read"}
    for name in ("attest", "publish"):
        assert jobs[name]["if"] == "startsWith(github.ref, 'refs/tags/v')"
        assert jobs[name]["permissions"]["id-token"] == "write"
    assert jobs["attest"]["needs"] == ["wheels", "sdist"]
    assert jobs["publish"]["needs"] == ["attest"]
    for name in ("wheels", "sdist"):
        assert "permissions" not in jobs[name]


def test_actions_of_workflows_are_pinned_by_digest() -> None:
    flows = (ROOT / ".github" / "workflows").glob("*.yml")
    used = {name for path in flows for name in re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))}
    loose = {name for name in used if not re.search("@[0-9a-f]{40}$", name)}
    assert not loose


def test_every_citation_of_the_paper_has_its_entry() -> None:
    paper = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),", (ROOT / "docs" / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE)
    cited = {name for group in re.findall(r"\[(@[^\]]+)\]", paper) for name in re.findall(r"@(\w+)", group)}
    assert cited == set(entries)
    assert len(entries) == len(set(entries))
