"""The engine is a word of the file, and no part of what a result depends on."""

from __future__ import annotations

import pytest

from hansa.config import ConfigError, from_text
from hansa.engine import RayPool
from hansa.runs.experiment import _engine, identity


def test_a_word_chooses_the_engine():
    config = from_text("engine: ray\nworkers: 3")
    made = _engine(config, 0)
    assert made.func is RayPool
    assert made.keywords == {"workers": 3, "address": None}
    assert from_text("engine: {kind: ray, address: 'ray://here:1'}").engine.address == "ray://here:1"
    assert identity(config) == identity(from_text(""))


def test_an_unknown_engine_is_refused_with_its_line():
    with pytest.raises(ConfigError, match="engine: expected 'pool', 'ray' or 'flower', found 'rya'"):
        from_text("engine: rya")
