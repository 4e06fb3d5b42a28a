"""What the README and the pages name is there: every dotted name, attribute, file, command, option and measure."""

from __future__ import annotations

import importlib
import re
import shlex
from functools import reduce
from pathlib import Path

import pytest
import torch

import hansa
from exactness.laboratory import problem, task

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
FILES = (".py", ".md", ".json", ".svg", ".png", ".yaml")
WHERE = ["", "src/hansa", "docs", "examples", "benchmarks", "benchmarks/studies", "tests"]
MADE = {  # files that a run or a user makes
    "composition.json", "config.yaml", "group.yaml", "summary.json", "environment.json", "hansa.schema.json",
    "run.yaml", "report.html",
    "mine.py", "job.yaml", "search.json", "NAME.html", "NAME-verdict.html", "NAME.json", "reproduced.html",
    "advice/advised.yaml", "advice/front.svg", "tensorboard/",
    "preprocessing.json", "NAME.preprocessing.json", "schema.yaml", "hospitals/heart-disease/", "keys/",
    "hospitals/heart-disease/schema.yaml",
}  # fmt: skip
OF_OTHERS = {"docs/comparison.md"}  # files named there are in other packages
ENTRY_POINTS = "hansa.parts"  # the group in which packages announce parts
PACKAGES = {
    "gossip",
    "compress",
    "aggregate",
    "sample",
    "local",
    "presets",
    "measures",
    "server",
    "data",
    "models",
    "store",
}


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code(page: str) -> list[str]:
    """What stands between backticks in running text."""
    plain = re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", plain)


def resolved(dotted: str) -> object:
    """The thing that a dotted name means: the longest module of it, then attributes."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AttributeError(dotted)


@pytest.mark.parametrize("page", PAGES)
def test_every_dotted_name_is_there(page):
    for dotted in set(re.findall(r"\bhansa(?:\.[A-Za-z_]\w*)+", text(page))):
        if dotted in {*MADE, ENTRY_POINTS} or dotted.endswith((".json", ".yaml", ".html")):
            continue
        try:
            resolved(dotted)
        except AttributeError as error:
            raise AssertionError(f"{page} names {dotted}: {error}") from error


@pytest.mark.parametrize("page", PAGES)
def test_parts_named_by_their_package_are_there(page):
    """`gossip.random(k)` is hansa.gossip.random."""
    for span in code(page):
        found = re.match(r"(\w+)\.(\w+)\(", span)
        if found and found[1] in PACKAGES:
            assert hasattr(resolved(f"hansa.{found[1]}"), found[2]), f"{page} names {span}"


@pytest.mark.parametrize("page", PAGES)
def test_attributes_of_a_run_are_there(page):
    run = hansa.run(hansa.presets.fedavg(steps=1), task(problem()), rounds=1, keep_params=True)
    for dotted in re.findall(r"\brun((?:\.[a-z_]\w*)+)", "\n".join(code(page))):
        names = dotted.strip(".").split(".")
        if names[-1] in ("yaml", "py", "sh") or names == ["model"]:  # run.model needs a module
            continue
        reduce(getattr, names, run)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_OTHERS])
def test_every_file_is_there(page):
    for span in code(page):
        for word in span.split():
            name = word.strip("(),;:").partition("::")[0]
            if not re.fullmatch(r"[\w./*+-]+", name) or not (name.endswith(FILES) or re.fullmatch(r"[\w/-]+/", name)):
                continue
            if name in MADE or name.startswith((".", "runs/")):
                continue
            assert any(list((ROOT / base).glob(name)) for base in WHERE), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_is_there(page):
    """Of commands in running text; those in blocks are executed."""
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    import typer.main

    root = typer.main.get_command(app)
    for span in code(page):
        words = shlex.split(span) if span.startswith("hansa ") else []
        command = root
        for word in words[1:]:
            if word.startswith("--"):
                options = {"--help", *(name for parameter in command.params for name in parameter.opts)}
                assert word.partition("=")[0] in options, f"{page}: {span}"
            elif hasattr(command, "commands"):
                assert word in command.commands or word.isupper(), f"{page}: {span}"
                command = command.commands.get(word, command)


def test_every_measure_of_the_page_is_in_a_record():
    """The section "What is measured" of the methods, and what FedAWARE's page says is reported each round."""
    held = hansa.data.from_arrays(
        torch.randn(40, 3),
        torch.randn(40),
        clients=torch.repeat_interleave(torch.arange(4), torch.tensor([3, 7, 10, 20])),
    )
    made = hansa.Task(
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0)), torch.nn.functional.mse_loss, held
    )
    compressed = hansa.presets.fedcams(steps=2, compressor=hansa.compress.top_k(0.5))
    gossiping = hansa.presets.ha_fed(clusters=2, reporters=1, steps=2)
    measures = [hansa.measures.compression, hansa.measures.local_mean_loss(made)]
    watched = [hansa.measures.track_heterogeneity()]
    records = {}
    for method in (compressed, gossiping, hansa.presets.fedaware(steps=2)):
        run = hansa.run(method, made, rounds=1, measures=measures, callbacks=watched)
        records |= run.history[0]
    measured = text("docs/methods.md").split("## What is measured")[1].split("\n## ")[0]
    reported = text("docs/aware.md").split("**Reported each round**")[1].split("\n- ")[0]
    for name in re.findall(r"`([a-z_]+)`", measured + reported):
        assert name in records, f"{name} is in no record"
