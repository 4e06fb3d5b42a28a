"""The page on parts of one's own: each is one file of at most thirty lines, and runs as the page says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from hansa.compress import sign
from hansa.config import build, build_algorithm, from_yaml
from hansa.config.components import KINDS
from hansa.runs.experiment import build_run, open_run
from hansa.testing import check

PAGE = (Path(__file__).parents[2] / "docs" / "own-parts.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^In a file: `([^\n]*)`\n\n```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SECTIONS = [(found[1], found[2]) for found in SECTION.finditer(PAGE)]
KINDS_OF_SECTIONS = re.findall(r"^\| `(\w+)` \| \[", PAGE, flags=re.MULTILINE)
SETTING = {
    "rounds": "2",
    "workers": "1",
    "data": "{name: synthetic, clients: 6, options: {largest: 60}}",
    "model": "logistic",
    "local": "{steps: 2}",
    "sample": "{participation: 0.5}",
}


def configured(line):
    """The line of the page in a small setting."""
    key, _, value = line.partition(": ")
    said = {**SETTING, key: value}
    if "reporters" in line:
        del said["sample"]
    return from_yaml("\n".join(f"{key}: {value}" for key, value in said.items()))


CHECKED = {
    "compressor", "uplink", "downlink", "aggregate", "server", "sampler", "topology", "clustering", "activity", "work",
    "solver", "loop",
}  # fmt: skip


def test_every_kind_has_an_example_that_is_tested():
    # a choice of names, a few words, and a plan of chances: no rules
    assert set(KINDS) - set(KINDS_OF_SECTIONS) == {"blocks", "batching", "fault_plan", "pace"}


@pytest.mark.parametrize(
    ("kind", "line", "code"),
    [(kind, *section) for kind, section in zip(KINDS_OF_SECTIONS, SECTIONS, strict=True)],
    ids=KINDS_OF_SECTIONS,
)
def test_a_part_of_ones_own_is_one_file_keeps_its_contract_and_runs_exactly(write_module, kind, line, code):
    folder = write_module("mine", code)
    config = configured(line)
    made = getattr(importlib.import_module("mine"), re.search(r"mine:(\w+)", line)[1])
    if kind in CHECKED:
        check(made(sign()) if "compressor: Compressor" in code else made())
    run = open_run(config, folder / "out")
    run.execute()
    started = build_run(config, build.load_data(config))
    assert not torch.equal(run.run.params, started.params)
    plain = configured({"gossip": "gossip: {reporters: 2}"}.get(line.partition(":")[0], "seed: 0"))
    if line.partition(":")[0] not in ("data", "links", "model", "profile"):
        assert build_algorithm(config) != build_algorithm(plain)
    half = open_run(config, folder / "half")
    half.execute([lambda run, record: True])
    again = open_run(None, folder / "half")
    again.execute()
    assert again.run.state.round == 2
    assert torch.equal(again.run.params, run.run.params)
