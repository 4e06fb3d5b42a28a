"""The instruction sets that the library has, each tested or skipped with the reason, never silently absent."""

from __future__ import annotations

from typing import Any

import pytest

from hansa.core import native

RUN = native.instruction_sets()


def in_each_set(test: Any) -> Any:
    """Run a test with every instruction set; those this machine cannot run are skipped, which `pytest -ra` prints."""
    why = native.unavailable_reason() or "this machine does not run it"
    sets = [
        pytest.param(name, marks=() if name in RUN else pytest.mark.skip(reason=f"kernels for {name}: {why}"))
        for name in native.NAMES
    ]
    return pytest.mark.usefixtures("isa")(pytest.mark.parametrize("isa", sets, indirect=True)(test))
