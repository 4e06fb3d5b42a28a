"""Parts of installed packages: found by name, never shadowing Hansa's, and told by name where they are broken."""

from __future__ import annotations

import logging

import pytest

from hansa import gossip
from hansa.config import ConfigError, json_schema
from hansa.config.components import KINDS, unknown_plugins
from hansa.config.fields import ComponentField
from hansa.config.import_path import installed_plugins, warn_once
from hansa.server import ServerTransform

MODULE = '''
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

    (tmp_path / "plugged_in_parts.py").write_text(MODULE)
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
