"""Packages import downwards only, so there are no import cycles between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hansa

SOURCE = Path(hansa.__file__).parent

LAYERS = (
    ("core",),
    ("server", "compress", "gossip"),
    ("aggregate", "local", "sample"),
    ("pace",),
    ("algorithm",),
    ("presets",),
    ("training",),
    ("data",),
    ("rounds",),
    ("engine",),
    ("config",),
    ("runs",),
    ("federation",),
    ("study",),
    ("testing",),
    ("cli",),
)
"""From the bottom up. A package may import those below it and none in its own layer."""

LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package not in ("__init__", "__main__"):
            yield package, path


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The packages that a file imports anywhere, with the lines; names of the package itself come from its __init__."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "hansa":
                yield from ((alias.name, node.lineno) for alias in node.names if alias.name in LEVEL)
            elif node.module.startswith("hansa."):
                yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name.split(".")[1], node.lineno) for alias in node.names if alias.name.startswith("hansa.")
            )


def test_every_package_has_a_layer():
    assert {package for package, _ in modules()} <= set(LEVEL), "a new package: add it to LAYERS"


def test_imports_go_down():
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {other}"
        for package, path in modules()
        for other, line in imported(path)
        if other != package and LEVEL[other] >= LEVEL[package]
    ]
    assert not wrong, "\n".join(wrong)
