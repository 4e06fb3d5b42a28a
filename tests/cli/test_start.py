"""Nobody waits for torch who does not need it: commands that do not train end without importing it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hansa
from hansa.core.lazy_imports import exports

LOOK = """
import json, sys
import hansa_command
arguments, among = json.loads(sys.argv[1])
sys.argv = ["hansa", *arguments]
try:
    hansa_command.main()
finally:
    sys.stdout.flush()
    print("\\nLOADED", *(name for name in among if name in sys.modules))
"""


SLOW = ("torch._C", "networkx.classes", "scipy.sparse")
NUMBERS = ("numpy._core", "scipy._lib", "pandas")
FILES = ("pydantic.main",)


def loaded(arguments, cwd, among=SLOW):
    """What a command left in the interpreter of all that takes long to import; it must have ended well."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps([list(arguments), among])],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\nLOADED")[-1].split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a finished run of two rounds and its configuration."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "small.yaml").write_text(
        "rounds: 2\nworkers: 1\ndata: {name: fashion-mini, clients: 10}\nmodel: logistic\nlocal: {steps: 1}\n"
    )
    assert loaded(["run", "small.yaml", "-o", "out", "-q"], folder) == ["torch._C"]
    return folder


NOTHING_SLOW = (
    "run --help", "data --help", "watch --help", "--version", "presets fedaware --json", "parts compressor",
    "cite fedcams", "cite out", "config example", "config schema", "report out", "compare out --report other.html",
)  # fmt: skip
COMMANDS = {
    **dict.fromkeys(NOTHING_SLOW, SLOW),
    **dict.fromkeys(("--help", "config show cafga", "config show small.yaml", "show out"), (*SLOW, *NUMBERS)),
    **dict.fromkeys(("presets", "parts"), (*SLOW, *NUMBERS, *FILES)),
    **dict.fromkeys(("presets --json", "data list"), (*SLOW, *FILES)),
    "topology ring --clients 8": ("torch._C",),
}
"""Commands, and what they must not import: torch if they do not train, numpy if they compute nothing, pydantic if they
read no file."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_only_what_it_needs(made, command):
    assert loaded(command.split(), made, among=COMMANDS[command]) == []


def test_the_package_imports_its_rooms_when_they_are_used():
    code = "import sys, hansa; print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'hansa')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['hansa', 'hansa.core', 'hansa.core.lazy_imports']"


def test_training_in_memory_imports_nothing_that_only_gossip_files_or_pages_need():
    code = """
import sys, torch, hansa
data = hansa.data.from_arrays(torch.randn(9, 3), torch.randn(9, 1), clients=torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2]))
task = hansa.Task(lambda: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
hansa.run(hansa.presets.fedcams(steps=2, batch_size=2), task, rounds=1)
unneeded = "networkx scipy.sparse scipy.linalg pandas matplotlib pydantic rich yaml hansa.config".split()
unneeded.append("hansa.study.report")
print([name for name in unneeded if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_listed_and_importable():
    assert set(hansa.__all__) <= set(dir(hansa))
    for name in hansa.__all__:
        assert getattr(hansa, name) is not None
    for package in (hansa.data, hansa.runs.store, hansa.rounds):
        assert set(exports(package.__name__)) == set(package.__all__) <= set(dir(package))
        for name, home in exports(package.__name__).items():
            assert getattr(package, name) is getattr(sys.modules[home], name)


def test_what_is_not_there_is_said_as_python_says_it():
    with pytest.raises(AttributeError, match="module 'hansa' has no attribute 'fedavg'"):
        hansa.fedavg  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from hansa import nothing  # type: ignore[attr-defined]  # noqa: F401
    assert hansa.runs.metrics.load_run is hansa.load_run


def test_a_deferred_module_becomes_the_module_itself_for_all_who_hold_it():
    code = """
import sys, hansa_command
hansa_command.defer_import("torch")
import torch
module = torch
assert type(module).__name__ == "LazyModule" and "torch._C" not in sys.modules
assert not hasattr(module, "__warningregistry__") and "torch._C" not in sys.modules
from torch.nn.functional import relu
assert type(module).__name__ == "module" and module is sys.modules["torch"]
assert relu(module.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0] and module.__path__ and module.__version__
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
