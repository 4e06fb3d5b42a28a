"""Methods and parts of one's own on the command line, from a module in the current folder."""

from __future__ import annotations

import csv
import sys

import pytest

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar
import hansa

@dataclass(frozen=True, slots=True)
class halved:
    """step = delta / by."""
    by: float = 2.0
    cites: ClassVar[tuple[str, ...]] = ("@misc{mine2026,\\n  title = {Halving}\\n}",)

    def init(self, x):
        return {}

    def update(self, delta, state, ctx):
        return delta / self.by, state

@hansa.component
def careful(*, by=2.0, **common):
    """FedAvg with half a step."""
    return hansa.presets.fedavg(**common).with_server(halved(by))
'''


@pytest.fixture
def own(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "cli_of_mine.py").write_text(MODULE)
    yield folder
    sys.modules.pop("cli_of_mine", None)


def test_a_sweep_goes_over_methods_and_their_words(cli, own):
    arguments = ["algorithm=fedavg,cli_of_mine:careful,{preset: 'cli_of_mine:careful', by: 8.0}"]
    cli.ok("sweep", "small.yaml", *arguments, "-q", "-o", "grid", "-r", "1")
    with open(own / "grid" / "results.csv") as file:
        rows = [row["algorithm"] for row in csv.DictReader(file)]
    assert sorted(rows) == ["cli_of_mine:careful", "fedavg", "{preset: 'cli_of_mine:careful', by: 8.0}"]
    cli.ok("sweep", "cli_of_mine:careful", "algorithm.by=2.0,4.0", "-q", "-o", "by", "-r", "1", "-s", "model=logistic")


def test_a_part_of_ones_own_is_set_shown_run_and_resumed(cli, own):
    part = ["-s", "server.optimizer={kind: 'cli_of_mine:halved', by: 4.0}"]
    assert "# own component, not loaded: cli_of_mine:halved" in cli("config", "show", "small.yaml", *part).stdout
    assert "halved(by=2.0)" in cli("config", "show", "cli_of_mine:careful").stdout
    cli.ok("run", "small.yaml", "-o", "out", "-q", "-r", "2", *part)
    cli.ok("resume", "out", "-r", "3", "-q")
    cli.ok("run", "small.yaml", "-o", "whole", "-q", "-r", "3", *part)
    assert (own / "out" / "model.safetensors").read_bytes() == (own / "whole" / "model.safetensors").read_bytes()


def test_it_is_looked_at_like_a_preset(cli, own):
    output = " ".join(cli("presets", "cli_of_mine:careful").stdout.split())
    assert "FedAvg with half a step." in output
    assert "by=2.0" in output
    assert "mine2026" in cli("cite", "cli_of_mine:careful").stdout
    cli.ok("run", "cli_of_mine:careful", "-r", "1", "-q", "-s", "model=logistic", "-s", "workers=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "cli_of_nobody:careful"], "the module cannot be imported"),
        (["run", "cli_broken:x"], "ZeroDivisionError: division by zero"),
        (["compare", "cli_of_mine:carefull"], "Did you mean careful?"),
        (["run", "small.yaml", "-s", "server.optimizer={kind: 'cli_of_mine:halved', bye: 1}"], "Did you mean by?"),
    ],
)
def test_what_is_not_there_ends_with_2_and_a_near_match(cli, own, arguments, message):
    (own / "cli_broken.py").write_text("import hansa\n\nx = 1 / 0\n")
    assert message in cli.refused(*arguments).stderr


def test_a_run_can_be_looked_at_when_its_code_is_gone(cli, own):
    cli.ok("run", "small.yaml", "-s", "algorithm=cli_of_mine:careful", "-o", "out", "-q", "-r", "1")
    (own / "cli_of_mine.py").unlink()
    sys.modules.pop("cli_of_mine")
    assert "out (finished)" in cli("show", "out").stdout
    cli.ok("report", "out", "-o", "page.html")
    assert "mine2026" in (own / "page.html").read_text("utf-8")
    assert "cli_of_mine:careful" in (own / "page.html").read_text("utf-8")
    assert "mine2026" in cli("cite", "out").stdout
    gone = cli.refused("resume", "out", "-r", "2", "-q")
    assert "cli_of_mine" in gone.stderr
