"""A release says its version once; what must repeat it agrees."""

from __future__ import annotations

import json
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
    if ".dev" in hansa.__version__:  # between releases: the next version, with its changes under "Unreleased"
        assert headings[0] == "Unreleased"
        assert versions[0] < tuple(int(part) for part in hansa.__version__.split(".")[:3])
    else:
        assert released()[0][0] == hansa.__version__


def test_the_citation_is_of_the_newest_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(cited["version"]), str(cited["date-released"])) == released()[0]


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


def test_other_processors_and_systems_have_a_hosted_job() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["arm"]["runs-on"].endswith("-arm")
    assert jobs["windows"]["runs-on"] == "windows-latest"
    run = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, targets in {
        "arm": ["test"], "emulated": ["test-neon", "test-mingw"], "audit": ["audit"], "containers": ["lint-containers"],
    }.items():  # fmt: skip
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
            assert re.search(rf"make .*\b{target}\b", run[name]), (name, target)


def test_hooks_before_a_commit_need_no_network() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [one["repo"] for one in hooks] == ["local"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in hooks[0]["hooks"]:
        assert hook["language"] == "system"
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert f"$(BIN)/{tool}" in makefile, f"{tool} is not what `make lint` runs"


def test_the_conda_recipe_has_the_released_version_and_these_dependencies() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == released()[0][0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {"torch": "pytorch"}  # called differently there
    needed = [re.fullmatch(r"([\w-]+)(>=[\d.]+)", one) for one in project["project"]["dependencies"]]
    assert all(needed)
    expected = [f"{names.get(one[1], one[1])} {one[2]}" for one in needed if one]
    assert recipe["requirements"]["run"] == ["python", *expected]
    assert [one for one in recipe["requirements"]["host"] if one.startswith("setuptools")] == ["setuptools >=77"]
    assert project["build-system"]["requires"] == ["setuptools>=77"]


def test_the_archive_record_agrees_with_the_citation() -> None:
    record = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert record["keywords"] == cited["keywords"]
    assert record["license"] == cited["license"]
    assert [one["name"] for one in record["creators"]] == [one["name"] for one in cited["authors"]]
    assert "version" not in record  # the archive takes it from the tag


def test_wheels_are_built_for_the_pythons_that_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    claimed = [one.rpartition(" ")[2] for one in project["project"]["classifiers"] if re.search(r":: 3\.\d+$", one)]
    built = project["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp{one.replace('.', '')}-*" for one in claimed]


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
    (publish,) = [step["uses"] for step in jobs["publish"]["steps"] if "pypi-publish" in step.get("uses", "")]
    assert re.search("@[0-9a-f]{40}$", publish)


def test_every_citation_of_the_paper_has_its_entry() -> None:
    paper = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\w+),", (ROOT / "docs" / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE)
    cited = {name for group in re.findall(r"\[(@[^\]]+)\]", paper) for name in re.findall(r"@(\w+)", group)}
    assert cited == set(entries)
    assert len(entries) == len(set(entries))


def test_the_paper_has_the_length_and_the_sections_of_the_journal() -> None:
    body = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8").split("---\n", 2)[2]
    assert len(body.split()) <= 1200
    sections = re.findall(r"^# (.*)$", body, re.MULTILINE)
    assert {"Summary", "Statement of need", "State of the field", "Software design", "References"} <= set(sections)


def test_speeds_of_the_paper_are_those_of_the_benchmark() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    paper = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = {  # in the paper -> in the benchmark
        "Hansa, two workers": "**Hansa**, own class with forward(), 2 workers",
        "Hansa, two workers, AVX2": "**Hansa**, own class with forward(), 2 workers, avx2 forced",
        "Hansa without native kernels": "**Hansa**, own class, no native code, 2 workers",
        "pfl-research 0.6.0": "pfl 0.6, 2 workers",
        "fluke 0.8.1": "fluke 0.8.1",
        "Flower 1.42.0": "Flower 1.42 (Ray)",
        "FedLab 1.3.0": "FedLab 1.3",
        "FedJAX 0.0.17": "FedJAX 0.0.17",
        "plain PyTorch, two processes": "plain loop, 2 processes",
    }
    found = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|$", paper, re.MULTILINE)
    assert {one[0] for one in found} == set(rows)
    for name, w1, w2 in found:
        cells = next(line for line in page.splitlines() if line.startswith(f"| {rows[name]} |")).split("|")
        assert (cells[2].split()[0], cells[7].split()[0]) == (w1, w2), name
