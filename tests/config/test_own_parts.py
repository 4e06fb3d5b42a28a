"""Data, models, losses, metrics and components of one's own: in a module, on the page about them, in packages."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest
import torch

from hansa import gossip
from hansa.compress import sign
from hansa.config import ConfigError, build, build_algorithm, from_yaml, json_schema, to_yaml
from hansa.config.components import KINDS, unknown_plugins
from hansa.config.fields import ComponentField
from hansa.config.import_path import installed_plugins, warn_once
from hansa.core.errors import HansaError
from hansa.runs.experiment import build_run, open_run
from hansa.server import ServerTransform
from hansa.testing import check

OWN = """
import torch
from torch import nn
import hansa
from hansa import data

@hansa.component
def whole(rows=90):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return data.Dataset("mine", x, (x.sum(1) > 0).long(), x[:20], (x[:20].sum(1) > 0).long(), classes=2)

@hansa.component
def dealt(rows=60):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 10, 15, rows - 30]))
    return data.from_arrays(x, x.sum(1), clients=owners, test=(x[:20], x[:20].sum(1)))

class Line(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)

@hansa.component
def quartic(output, target):
    return ((output - target) ** 4).mean()

@hansa.component
def near(output, target):
    return (output - target).abs() < 0.5

@hansa.component
def worst(output, target):
    return (output - target).abs().max()

@hansa.component
def double():
    return Line().double()

number = 3
"""
SMALL = "rounds: 3\nworkers: 1\nlocal: {steps: 2, batch_size: 4, lr: 0.01}\n"


@pytest.fixture
def own(write_module):
    return write_module("data_of_mine", OWN)


REGRESSION = f"""{SMALL}
data: {{factory: data_of_mine:dealt, options: {{rows: 70}}}}
model: {{factory: data_of_mine:Line, loss: data_of_mine:quartic, metric: data_of_mine:near,
        metrics: {{worst: {{function: data_of_mine:worst, better: lower}}}}}}
"""


def test_everything_of_ones_own_runs_is_written_down_and_resumed_exactly(own):
    config = from_yaml(SMALL + "data: {factory: data_of_mine:whole, clients: 5, partition: iid}\nmodel: logistic")
    held = build.load_data(config)
    assert (held.classes, [held.samples(client) for client in range(5)]) == (2, [18] * 5)
    config = from_yaml(REGRESSION)
    assert from_yaml(to_yaml(config)) == config
    whole = open_run(config, own / "whole")
    whole.execute()
    last = whole.run.history[-1]
    held = build.load_data(config)
    model = whole.run.model
    with torch.no_grad():
        apart = (model(held.test_inputs) - held.test_targets).abs()
    assert last["test_loss"] == pytest.approx(float((apart**4).mean()), rel=1e-5)
    assert last["test_accuracy"] == pytest.approx(float((apart < 0.5).double().mean()))
    assert last["test_worst"] == pytest.approx(float(apart.max()), rel=1e-5)
    assert held.population == 4
    assert [held.samples(client) for client in range(4)] == [5, 10, 15, 40]
    part = open_run(config, own / "part")
    part.execute([lambda run, record: record["round"] == 1])
    again = open_run(None, own / "part")
    again.execute()
    assert torch.equal(again.run.params, whole.run.params)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {factory: data_of_mine:hole}", "data.factory: 'data_of_mine:hole': .* Did you mean whole"),
        ("data: {factory: data_of_mine:number}", "data.factory: .*number': expected a component: .*found 3"),
        ("data: {factory: data_of_mine:quartic}", "data.factory: data_of_mine:quartic: .*missing 2 required"),
        ("data: {factory: data_of_mine:Line}", "(?s)returns Line.*expected data, as from hansa.data.from_arrays"),
        ("data: {factory: data_of_mine:dealt, clients: 3}", "returns data that has its clients: leave out"),
        ("data: {factory: data_of_mine:whole, clients: 5}\nmodel: {loss: msee}", "loss: no 'msee'. Did"),
        ("model: {metric: data_of_mine:neer}", "model.metric: .* Did you mean near"),
        ("model: {metrics: {bad: data_of_mine:number}}", "model.metrics.bad: .*expected a component"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(own, text, said):
    config = from_yaml(SMALL + text)
    with pytest.raises(HansaError, match=said):
        build.build_task(config, build.load_data(config))


def test_a_double_model_asks_for_double_arithmetic(own):
    text = SMALL + "data: {factory: data_of_mine:dealt}\nmodel: {factory: data_of_mine:double}"
    held = build.load_data(from_yaml(text))
    with pytest.raises(HansaError, match=r"float64 parameters.*Set dtype: float64, or remove \.double\(\) from"):
        build.build_task(from_yaml(text), held)
    assert build.build_task(from_yaml(text, ["dtype=float64"]), held).dtype == torch.float64
    assert build.build_task(from_yaml(REGRESSION, ["dtype=float64"]), held).dtype == torch.float32


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


PLUGIN = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class half:
    """step = delta / by."""
    by: float = 2.0

    def init(self, x):
        return {}

    def update(self, delta, state, ctx):
        return delta / self.by, state
'''


def clear_caches():
    installed_plugins.cache_clear()
    warn_once.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make a package with the given entry points visible, as an installer would."""

    def install(package, *entries):
        home = tmp_path / f"{package}-1.0.dist-info"
        home.mkdir()
        (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (home / "entry_points.txt").write_text("[hansa.parts]\n" + "\n".join(entries) + "\n")
        clear_caches()

    (tmp_path / "plugged_in_parts.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    clear_caches()
    yield install
    monkeypatch.undo()
    clear_caches()


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, logger="hansa")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_plug_in_is_named_listed_and_suggested_like_a_part_of_hansa(installed):
    installed("halves", "server.half = plugged_in_parts:half")
    made = ComponentField(ServerTransform).build([{"kind": "half", "by": 4.0}, "scale"])
    assert repr(made) == "chain(half(by=4.0), scale(lr=1.0))"
    assert "half" in KINDS["server"].names
    with pytest.raises(ConfigError, match=r"no server transform 'halff'. Did you mean half\?"):
        ComponentField(ServerTransform).build("halff")
    with pytest.raises(ConfigError, match=r"half has no 'bye'. Did you mean by\?"):
        ComponentField(ServerTransform).build({"kind": "half", "bye": 4.0})
    definition = next(part for part in json_schema()["$defs"]["server"]["anyOf"] if part.get("title") == "half")
    assert definition["properties"]["by"]["default"] == 2.0
    assert definition["description"] == "step = delta / by."


def test_of_equal_names_hansa_has_the_first_and_then_the_first_package_and_it_is_told(installed, warned):
    installed("shadow", "topology.ring = plugged_in_parts:half")
    installed("beta", "server.half = nowhere:x")
    installed("alpha", "server.half = plugged_in_parts:half")
    assert ComponentField(gossip.Topology).build("ring") == gossip.ring()
    assert KINDS["topology"].names.count("ring") == 1
    assert "topology.ring of the package shadow 1.0: Hansa has a topology of that name" in warned()[0]
    assert type(ComponentField(ServerTransform).build("half")).__name__ == "half"
    assert "server.half of the package beta 1.0: alpha 1.0 has a component of that name" in warned()[1]


def test_a_broken_package_is_told_by_its_name_and_breaks_nothing_else(installed, warned, tmp_path):
    (tmp_path / "plugged_in_exit.py").write_text("import sys\nsys.exit(3)\n")
    parts = "server.half = plugged_in_parts:half", "server.no = math:tau", "server.leave = plugged_in_exit:x"
    installed("rotten", "server.rot = no_such_module:x", *parts)
    assert json_schema()["$defs"]["server"]
    assert [name for name, _ in KINDS["server"].items()][-1] == "half"
    told = "\n".join(warned())
    assert "server.rot of the package rotten 1.0: cannot be loaded (ModuleNotFoundError" in told
    assert "server.no of the package rotten 1.0" in told
    for name, reason in (
        ("rot", "cannot be loaded"),
        ("no", ".*expected a server"),
        ("leave", r"cannot be loaded \(SystemExit"),
    ):
        with pytest.raises(ConfigError, match=rf"server.{name} of the package rotten 1.0:? ?{reason}"):
            ComponentField(ServerTransform).build(name)


def test_a_kind_that_is_not_known_is_told_with_what_was_meant(installed):
    installed("odd", "servr.half = plugged_in_parts:half", "half = plugged_in_parts:half")
    told = unknown_plugins()
    assert any("servr.half of the package odd 1.0: no kind 'servr'. Did you mean server?" in said for said in told)
    assert len(told) == 2
