"""Names that were retired in favour of the field's terms do not come back, and no class name is used twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hansa

SOURCE = Path(hansa.__file__).parent

MODULES = [
    "absence",
    "admission",
    "after",
    "bindings",
    "borrow",
    "candidates",
    "chance",
    "charge",
    "choose",
    "claim",
    "closing",
    "crossing",
    "exams",
    "following",
    "forms",
    "frames",
    "front",
    "held",
    "holdings",
    "journal",
    "kept",
    "later",
    "lazily",
    "links",
    "mixed",
    "observation",
    "planes",
    "private",
    "probe",
    "proposals",
    "purity",
    "recognise",
    "reuse",
    "served",
    "shell",
    "slots",
    "solo",
    "spread",
    "staff",
    "standings",
    "study",
    "together",
    "trail",
    "trained",
    "turns",
    "vocabulary",
]
DEFINITIONS = [
    "Closing",
    "Crew",
    "Delivery",
    "Errand",
    "Evidence",
    "Heard",
    "Lost",
    "Misfit",
    "Mixed",
    "Moved",
    "NotOurs",
    "Order",
    "Phase",
    "Rooted",
    "Shell",
    "Slot",
    "Solo",
    "Stamp",
    "Trail",
    "Together",
    "_obituary",
    "declared",
    "dismiss",
    "hire",
    "is_place",
    "later",
    "living_run",
    "lacking",
    "rated",
    "refuse",
    "suspects",
    "taken_up",
]
ARGUMENTS = ["adapted", "ahead", "clip", "decoupled", "informed", "persistent", "shell"]
VARIABLES = ["asked", "found", "given", "held", "kept", "made", "meant", "shell", "told"]


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def test_no_module_has_a_retired_name():
    assert [str(path) for path, _ in trees() if path.stem in MODULES] == []


def test_no_definition_or_argument_has_a_retired_name():
    retired = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in DEFINITIONS:
                retired.append(f"{path}:{node.lineno} {node.name}")
            elif isinstance(node, ast.arg) and node.arg in (*ARGUMENTS, *VARIABLES):
                retired.append(f"{path}:{node.lineno} argument {node.arg}")
    assert retired == []


def test_no_variable_or_attribute_has_a_retired_name():
    retired = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VARIABLES:
                retired.append(f"{path}:{node.lineno} {node.id}")
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and node.attr.lstrip("_") in VARIABLES
            ):
                retired.append(f"{path}:{node.lineno} .{node.attr}")
    assert retired == []


def test_no_class_name_is_used_twice():
    homes = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not node.name.islower():
                homes[node.name].append(str(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_the_ground_floor_has_at_most_twenty_entries():
    entries = [path.name for path in SOURCE.iterdir() if not path.name.startswith("_") and path.name != "py.typed"]
    assert len(entries) <= 20, sorted(entries)
