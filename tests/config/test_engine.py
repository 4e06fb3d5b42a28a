"""The section ``engine`` names an entry of the engine table; results do not depend on it."""

from __future__ import annotations

import pytest

from hansa.config import ConfigError, from_yaml
from hansa.config.sections import ENGINE_NAMES
from hansa.engine import ENGINES, RayPool, Serial
from hansa.runs.experiment import _engine_factory, config_digest


def test_a_name_chooses_the_engine():
    config = from_yaml("engine: ray\nworkers: 3")
    factory = _engine_factory(config, 0)
    assert factory.func is RayPool  # type: ignore[attr-defined]
    assert factory.keywords == {"workers": 3, "address": None}  # type: ignore[attr-defined]
    assert from_yaml("engine: {kind: ray, address: 'ray://here:1'}").engine.address == "ray://here:1"
    assert config_digest(config) == config_digest(from_yaml(""))


def test_the_names_are_those_of_the_table():
    assert set(ENGINE_NAMES) == set(ENGINES)


def test_a_registered_engine_can_be_named(monkeypatch):
    monkeypatch.setitem(ENGINES, "mine", lambda options: Serial)
    assert _engine_factory(from_yaml("engine: mine"), 0) is Serial


def test_an_unknown_engine_is_refused_with_its_line():
    with pytest.raises(ConfigError, match=r"run.yaml:2: engine: no engine 'rya'. Did you mean ray"):
        from_yaml("rounds: 1\nengine: rya", source="run.yaml")
