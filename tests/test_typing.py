"""The examples, the README and the page on custom components pass ``mypy --strict`` against the installed types."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/own-parts.md")
OPAQUE = (
    "PIL", "matplotlib", "networkx", "rich", "scipy", "yaml",
    *(f"torch.{name}" for name in (
        "_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_library", "_logging",
        "_meta_registrations", "_numpy", "_prims", "_prims_common", "_refs", "_subclasses", "accelerator", "ao",
        "backends", "compiler", "cuda", "distributed", "distributions", "export", "fx", "jit", "masked", "mtia",
        "nested", "onnx", "package", "profiler", "testing", "utils._sympy", "xpu",
    )),
)  # fmt: skip
"""Packages whose insides are not read: no type of an example comes from them, and they are most of the work."""


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
    settings = tmp_path / "mypy.ini"
    modules = ",".join(f"{name}.*" for name in OPAQUE)
    settings.write_text(f"[mypy]\n[mypy-{modules}]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n")
    options = [
        "--strict",
        "--allow-untyped-defs",  # as people write models
        "--allow-incomplete-defs",
        "--allow-untyped-calls",
        f"--config-file={settings}",
        "--follow-imports=silent",
        "--no-error-summary",
        "--explicit-package-bases",
    ]
    options += ["--ignore-missing-imports", "--cache-dir", str(ROOT / ".mypy_cache" / "pages"), "--python-executable"]
    report, problems, _ = api.run([*options, sys.executable, *map(str, [*files, *examples])])
    assert not problems
    wrong = [line.replace(str(tmp_path), "") for line in report.splitlines() if ": error:" in line]
    assert not wrong, "\n".join(wrong)
