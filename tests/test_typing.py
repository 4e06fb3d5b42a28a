"""The examples, the README and the page on custom components pass ``mypy --strict`` against the installed types."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/own-parts.md")
RELAXED = {"import-untyped", "import-not-found"}
"""Errors of other packages that ship no types."""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_and_the_code_on_the_pages_are_typed(tmp_path, monkeypatch) -> None:
    api = pytest.importorskip("mypy.api")
    files = []
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            files.append(tmp_path / f"{Path(page).stem.lower().replace('-', '_')}_{number}.py")
            files[-1].write_text(block, encoding="utf-8")
    assert len(files) >= 20
    examples = sorted(path for path in (ROOT / "examples").rglob("*.py"))
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    options = [
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        "--no-error-summary",
        "--explicit-package-bases",
    ]
    options += ["--ignore-missing-imports", "--cache-dir", str(ROOT / ".mypy_cache" / "pages"), "--python-executable"]
    report, problems, _ = api.run([*options, sys.executable, *map(str, [*files, *examples])])
    assert not problems
    wrong = [line.replace(str(tmp_path), "") for line in report.splitlines() if ": error:" in line]
    assert not wrong, "\n".join(wrong)
