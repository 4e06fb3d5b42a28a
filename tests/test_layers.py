"""The house keeps its layers: rooms import downwards only, never in a circle, and no file name has two meanings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import hansa

SOURCE = Path(hansa.__file__).parent

LAYERS = (
    ("errors", "later"),
    ("types",),
    ("keys", "schedule", "protocols", "citations", "losses", "notebook", "devices"),
    ("native",),
    ("vectors",),
    ("server", "compress", "gossip", "augment"),
    ("aggregate", "local", "sample"),
    ("algorithm",),
    ("presets", "measures", "store"),
    ("rounds",),
    ("tasks", "models", "data"),
    ("engine",),
    ("federation",),
    ("registry",),
    ("config",),
    ("runs",),
    ("sites",),
    ("report",),
    ("recipes", "advice"),
    ("study",),
    ("testing",),
    ("cli",),
)
"""From the ground up. A room may import those below it and none beside it."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
SHARED_NAMES = {"__init__.py", "base.py", "core/errors.py", "schema.py"}
"""Names that mean the same wherever they stand: a room's protocol, its errors, the JSON schema of what it knows."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            yield room, path


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The rooms that a file imports anywhere, with the lines; names of the package itself come from its __init__."""
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


def test_every_room_has_its_layer():
    assert {room for room, _ in modules()} <= set(LEVEL), "a new room: say in LAYERS what it stands upon"


def test_imports_go_down():
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {other}"
        for room, path in modules()
        for other, line in imported(path)
        if other != room and LEVEL[other] >= LEVEL[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_name_has_two_meanings():
    names = Counter(path.name for _, path in modules() if path.name not in SHARED_NAMES)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", ["room", "passes", "orders", "words", "looking", "bring", "comm", "track"])
def test_names_that_needed_a_guide_are_gone(name):
    assert not list(SOURCE.rglob(f"{name}.py"))
