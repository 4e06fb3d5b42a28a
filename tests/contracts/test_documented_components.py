"""The parts on the page about parts of one's own keep their contracts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hansa.compress import sign
from hansa.testing import check

PAGE = (Path(__file__).parents[2] / "docs" / "own-parts.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^In a file: `([^\n]*)`\n\n```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
KINDS = re.findall(r"^\| `(\w+)` \| .* \| \d+ \|$", PAGE, flags=re.MULTILINE)
CODE = dict(zip(KINDS, SECTION.findall(PAGE), strict=True))
CHECKED = (
    "compressor", "uplink", "downlink", "aggregate", "server", "sampler", "topology", "clustering", "activity", "work",
    "solver",
)  # fmt: skip


@pytest.mark.parametrize("kind", CHECKED)
def test_a_part_of_the_page_keeps_its_contract(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, code = CODE[kind]
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    exec(compile(code, "mine.py", "exec"), module.__dict__)
    made = getattr(module, re.search(r"mine:(\w+)", line)[1])
    check(made(sign()) if "compressor: Compressor" in code else made())
