"""The section ``engine`` names an entry of the engine table; results do not depend on it."""

from __future__ import annotations

import pytest

from hansa.config import ConfigError, from_yaml
from hansa.config.sections import ENGINE_NAMES
from hansa.core.errors import HansaError
from hansa.engine import ENGINES, RayPool, Serial
from hansa.runs.experiment import _engine_factory, config_digest


def test_a_name_chooses_the_engine():
    config = from_yaml("engine: ray\nworkers: 3")
    factory = _engine_factory(config, 0)
    assert factory.func is RayPool  # type: ignore[attr-defined]
    assert factory.keywords == {"workers": 3, "address": None, "gpus": None}  # type: ignore[attr-defined]
    assert from_yaml("engine: {kind: ray, address: 'ray://here:1'}").engine.address == "ray://here:1"
    shared = from_yaml("engine: {kind: ray, gpus: 0.25}")
    assert _engine_factory(shared, 0).keywords["gpus"] == 0.25  # type: ignore[attr-defined]
    with pytest.raises(HansaError, match=r"engine\.gpus: 0\.25: engine pool has no actors. Use device, or kind: ray"):
        _engine_factory(from_yaml("engine: {gpus: 0.25}"), 0)
    for fraction in (0, 2):
        with pytest.raises(HansaError, match=r"engine\.gpus"):
            from_yaml(f"engine: {{kind: ray, gpus: {fraction}}}")
    assert config_digest(config) == config_digest(from_yaml(""))


def test_the_names_are_those_of_the_table():
    assert set(ENGINE_NAMES) == set(ENGINES)


def test_a_registered_engine_can_be_named(monkeypatch):
    monkeypatch.setitem(ENGINES, "mine", lambda options: Serial)
    assert _engine_factory(from_yaml("engine: mine"), 0) is Serial


def test_an_unknown_engine_is_refused_with_its_line():
    with pytest.raises(ConfigError, match=r"run.yaml:2: engine: no engine 'rya'. Did you mean ray"):
        from_yaml("rounds: 1\nengine: rya", source="run.yaml")
