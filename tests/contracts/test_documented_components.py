"""The parts on the page about parts of one's own keep their contracts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hansa import testing
from hansa.compress import sign

PAGE = (Path(__file__).parents[2] / "docs" / "own-parts.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^In a file: `([^\n]*)`\n\n```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
KINDS = re.findall(r"^\| `(\w+)` \| .* \| \d+ \|$", PAGE, flags=re.MULTILINE)
CODE = dict(zip(KINDS, SECTION.findall(PAGE), strict=True))
CHECKS = {
    "compressor": testing.check_compressor,
    "uplink": testing.check_uplink,
    "downlink": testing.check_downlink,
    "aggregate": testing.check_aggregator,
    "server": testing.check_server,
    "sampler": testing.check_sampler,
    "topology": testing.check_topology,
    "clustering": testing.check_clustering,
    "activity": testing.check_activity,
    "work": testing.check_work,
    "solver": testing.check_solver,
}


@pytest.mark.parametrize("kind", CHECKS)
def test_a_part_of_the_page_keeps_its_contract(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, code = CODE[kind]
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    exec(compile(code, "mine.py", "exec"), module.__dict__)
    made = getattr(module, re.search(r"mine:(\w+)", line)[1])
    CHECKS[kind](made(sign()) if "compressor: Compressor" in code else made())
