"""The names and signatures that people compose are those of the snapshot, but for the changes listed here.

`public_names.json` holds them as they were before the package was made smaller. A name may be added, and an optional
parameter. A name that goes, or whose recorded parameters change, needs an entry in CHANGED that says what replaces it.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest

SNAPSHOT = Path(__file__).with_name("public_names.json")
MODULES = (
    "hansa", "hansa.server", "hansa.compress", "hansa.aggregate", "hansa.gossip", "hansa.local", "hansa.sample",
    "hansa.pace", "hansa.presets", "hansa.data", "hansa.training.models", "hansa.training.losses",
    "hansa.training.augment", "hansa.training.metrics", "hansa.rounds.measures", "hansa.core.schedule",
)  # fmt: skip

CHANGED: dict[str, str] = {
    "hansa.data.infer_schema": "delimiter, decimal and encoding of files are arguments; missing= is refuse by default",
    "hansa.data.from_csv_folder": "arguments of inference are those of infer_schema: scale= in place of standardize=",
    "hansa.data.Schema": "states delimiter, decimal and encoding of files",
    "hansa.data.TableColumn": "spellings of categories",
    "hansa.data.TableEncoding": "counts of missing, otherwise spelled and unknown cells",
    "hansa.data.HETEROGENEITY_SETTINGS": "docs/aware.md states the three settings",
    "hansa.data.HeterogeneitySetting": "docs/aware.md states the three settings",
    "hansa.data.heterogeneity_setting": "docs/aware.md states the three settings",
    "hansa.data.MemmapArray": "maps .npy files only: no name=",
    "hansa.data.from_hub": "from_hf reads FEMNIST of the hub by its columns; its docstring has the line",
    "hansa.data.download": "pooch pauses between attempts: no pause=",
    "hansa.Task": "execution= replaces native, batch_clients, compile; reduction=, ignored= are new; no param_dtype=",
    "hansa.gossip.AfgaTheorem": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.Change": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.Corollary": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.ParameterOrders": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.afga_theorem": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.corollary": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.drift": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.suggest_changes": "hansa.theory and hansa topology have the theorems",
    "hansa.gossip.svg": "gossip.draw draws by networkx",
    "hansa.gossip.text": "gossip.draw draws by networkx",
    "hansa.gossip.describe": "returns numbers; hansa topology adds the theorems' conditions",
    "hansa.gossip.common_size": "no method needs clusters of equal size",
    "hansa.gossip.step_bytes": "gossip.describe has bytes_per_step",
    "hansa.gossip.Description": "gossip.describe returns plain numbers",
    "hansa.sklearn": "examples/sklearn_sites.py has an estimator in forty lines",
    "hansa.data.schema_from_sklearn": "examples/sklearn_schema.py makes a schema of a fitted ColumnTransformer",
    "hansa.local.ClientJob": "ClientJobs: the jobs of many clients, a column for each fact",
    "hansa.local.LocalResult": "LocalResults: the results of ClientJobs",
    "hansa.local.take_steps": "first=: the number of the first step, for the keys of noise",
    "hansa.local.train": "jobs: many clients in one call",
}
"""Names that went or whose parameters changed, with what to use instead."""


def parameters(value: object) -> list[str] | None:
    """The parameters of a callable as text: names, kinds and defaults; None for other values."""
    if not callable(value):
        return None
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return [str(parameter) for parameter in plain]


def exported(module: ModuleType) -> list[str]:
    """``__all__``, or what the module defines without an underscore."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]


def public_names() -> dict[str, list[str] | None]:
    names: dict[str, list[str] | None] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in exported(module):
            value = getattr(module, name)
            names[f"{module_name}.{name}"] = None if inspect.ismodule(value) else parameters(value)
    return names


@pytest.fixture(scope="module")
def present() -> dict[str, list[str] | None]:
    return public_names()


RECORDED: dict[str, list[str] | None] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))


def accepts(now: list[str] | None, recorded: list[str] | None) -> bool:
    """Whether a call with the recorded parameters is still right: in their order, with optional ones added."""
    if now is None or recorded is None:
        return now == recorded
    return [parameter for parameter in now if parameter in recorded] == recorded and all(
        "=" in parameter or "*" in parameter for parameter in now if parameter not in recorded
    )


def test_recorded_names_are_there_with_their_parameters(present):
    different = [
        f"{name}: {RECORDED[name]} -> {present.get(name, 'gone')}"
        for name in RECORDED
        if name not in CHANGED and (name not in present or not accepts(present[name], RECORDED[name]))
    ]
    assert not different, "\n".join(different)


def test_every_listed_change_is_one(present):
    same = [name for name in CHANGED if name not in RECORDED or present.get(name, "gone") == RECORDED[name]]
    assert not same, f"not changed, or not in the snapshot: {same}"
