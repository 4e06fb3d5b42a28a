"""Packages import downwards only, so there are no import cycles between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hansa

SOURCE = Path(hansa.__file__).parent

LAYERS = (
    ("core",),
    ("server", "compress"),
    ("gossip",),
    ("aggregate", "local", "sample"),
    ("pace",),
    ("algorithm",),
    ("presets",),
    ("training",),
    ("data",),
    ("rounds.wire_format",),
    ("rounds.messages",),
    ("gossip.cohort",),
    ("gossip.executors",),
    ("rounds",),
    ("engine",),
    ("config",),
    ("runs",),
    ("federation",),
    ("study",),
    ("testing",),
    ("cli",),
)
"""From the bottom up. A package may import those below it and none in its own layer. A module with a layer of its own
does not count as part of its package."""

LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def member(name: str) -> str:
    """The package of a module, or the module itself if it has a layer of its own."""
    parts = name.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LEVEL else parts[0]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        package = member(".".join(path.relative_to(SOURCE).with_suffix("").parts))
        if package not in ("__init__", "__main__"):
            yield package, path


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The packages that a file imports anywhere, with the lines; names of the package itself come from its __init__."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "hansa":
                yield from ((alias.name, node.lineno) for alias in node.names if alias.name in LEVEL)
            elif node.module.startswith("hansa."):
                package = node.module.removeprefix("hansa.")
                yield from ((member(f"{package}.{alias.name}"), node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (member(alias.name.removeprefix("hansa.")), node.lineno)
                for alias in node.names
                if alias.name.startswith("hansa.")
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
