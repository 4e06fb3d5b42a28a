"""Looking is never running: no command that looks and no reader imports or calls code that a file names.

A finished run is edited so that each key that can name code names a trap in turn. The trap leaves a mark when it is
imported and when it is called. Commands that need code refuse the edited folder: the user's list has other code for it.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import hansa
from cli.conftest import SMALL
from command_line import app, run_command
from hansa import HansaError, config
from hansa.config.fields import ComponentField
from hansa.config.import_path import allow_code
from hansa.config.sections import Config
from hansa.runs import trust
from hansa.runs.export import predict_from_folder
from hansa.runs.folder import RunFolder, SeedGroupFolder
from hansa.study import report
from hansa.study.report.entries import read_entries

TRAP = """\
import hansa
open({mark!r}, "a").close()

@hansa.component
def touch(*arguments, **options):
    open({mark!r}, "a").close()

@hansa.component
class Touch:
    def __init__(self, *arguments, **options):
        touch()
"""
PLAIN_KEYS = ("data.factory", "model.factory", "model.loss", "model.metric", "model.metrics.mine", "algorithm")
"""Keys that name code as a word, besides those of components."""


def component_keys() -> Iterator[str]:
    """All keys of a configuration that take a component."""

    def walk(section: Any, prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if any(isinstance(each, ComponentField) and each.kinds for each in field.metadata):
                yield f"{prefix}{name}"
            annotation = field.annotation
            if hasattr(annotation, "model_fields"):
                yield from walk(annotation, f"{prefix}{name}.")
            inner = [each for each in typing.get_args(annotation) if hasattr(each, "model_fields")]
            if typing.get_origin(annotation) is dict and inner:
                yield from walk(inner[0], f"{prefix}{name}.model.")

    yield from walk(Config, "")


KEYS = [*component_keys(), *PLAIN_KEYS]

LOOKS: dict[str, list[list[str]]] = {
    "show": [["{run}"], ["{run}", "--json"], ["{run}", "--clients"]],
    "report": [["{run}", "-o", "page.html"]],
    "watch": [["{run}", "--port", "0"]],
    "compare": [["{run}"], ["{run}/config.yaml"]],  # of finished runs
    "export": [["{run}", "-o", "model.safetensors"], ["{run}", "-o", "clients.csv"]],
    "cite": [["{run}"], ["{run}/config.yaml"]],
    "config show": [["{run}/config.yaml"]],
    "config schema": [[]],
    "config example": [[]],
    "presets": [[], ["fedavg"]],
    "parts": [[]],
    "models": [[]],
    "doctor": [[], ["--json"]],
    "topology": [["ring"]],
    "theory": [["{run}"], ["{run}/config.yaml"]],
    "data list": [[]],
    "data check": [[]],
    "data show": [["synthetic"]],
    "data schema": [],  # reads CSV files, and no configuration
    "data get": [],  # downloads by name, and reads no configuration
    "keys": [],  # writes keys, and reads nothing
}
"""Commands that look, with arguments."""
READ_NO_FOLDER = {name for name, calls in LOOKS.items() if calls and "{run}" not in str(calls)}
NEEDS_CODE: dict[str, list[list[str]]] = {
    "run": [["{run}/config.yaml", "-o", "new", "-q"], ["-o", "{run}", "--resume", "-q"]],
    "resume": [["{run}", "-q", "-r", "3"]],
    "compare": [["fedavg", "-c", "{run}/config.yaml", "-q"]],
    "sweep": [["{run}/config.yaml", "local.lr=0.1", "-q"]],
    "predict": [["{run}"]],
    "export": [["{run}", "-o", "model.onnx"]],
    "theory": [["{run}", "--estimate"]],
    "serve": [["{run}/config.yaml", "--insecure"]],
    "join": [["--site", "a", "--insecure", "--data", "{run}/config.yaml"]],
    "replay": [["{run}"]],
    "reproduce": [],  # Hansa's own recipes
    "demo": [],
}
"""Commands that need code, with arguments that name the folder: they refuse it without --trust."""


def _page(folder: Path) -> None:
    entries, _ = read_entries([folder])
    report.write_page(folder.parent / "page.html", entries)


READERS: dict[str, Callable[[Path], Any]] = {
    "load_run": hansa.load_run,
    "export": lambda folder: [hansa.export(folder, folder.parent / f"model{end}") for end in (".safetensors", ".pt")],
    "load": lambda folder: config.load(folder / "config.yaml"),
    "from_yaml": lambda folder: config.from_yaml((folder / "config.yaml").read_text()),
    "validate": lambda folder: config.validate(config.read_document(folder / "config.yaml")),
    "parse_document": lambda folder: config.parse_document((folder / "config.yaml").read_text()),
    "read_document": lambda folder: config.read_document(folder / "config.yaml"),
    "to_dict": lambda folder: config.to_dict(config.load(folder / "config.yaml")),
    "to_yaml": lambda folder: config.to_yaml(config.load(folder / "config.yaml")),
    "code_names": lambda folder: config.code_names(config.load(folder / "config.yaml")),
    "cited_works": lambda folder: config.cited_works(config.load(folder / "config.yaml")),
    "build_algorithm": lambda folder: config.build_algorithm(config.load(folder / "config.yaml")),
    "ReportEntry": report.ReportEntry.from_folder,
    "write_page": _page,
    "RunFolder": lambda folder: [getattr(RunFolder(folder), name) for name in dir(RunFolder)],
    "RunFolder.clients": lambda folder: RunFolder(folder).clients(),
    "SeedGroupFolder": lambda folder: SeedGroupFolder(folder).exists,
}
NEED_CODE: dict[str, Callable[[Path], Any]] = {
    "load_model": hansa.load_model,
    "resume": lambda folder: hansa.resume(folder, rounds=3),
    "export": lambda folder: hansa.export(folder, folder.parent / "model.onnx"),
    "predict_from_folder": predict_from_folder,
}
NO_READERS = {"Key", "Document", "run_config"}  # the last runs what its caller has read


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    from hansa.runs.experiment import open_run

    folder = tmp_path_factory.mktemp("finished") / "run"
    open_run(config.from_yaml(SMALL, ["rounds=2"]), folder).execute()
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the finished run and the trap in it."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "trap.py").write_text(TRAP.format(mark=str(tmp_path / "touched")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("trap", None)
    yield tmp_path
    sys.modules.pop("trap", None)


def name_code(run: Path, key: str, code: str) -> None:
    """Edit the configuration of a run so that a key names code."""
    document = yaml.safe_load((run / "config.yaml").read_text())
    section = document
    *outer, last = key.split(".")
    for name in outer:
        section = section.setdefault(name, {})
    section[last] = code if key in PLAIN_KEYS else {"kind": code}
    if key in ("data.factory", "model.factory"):
        section.pop("name", None)
    if key == "local.steps":
        section.pop("epochs", None)
    (run / "config.yaml").write_text(yaml.safe_dump(document))


def command(*arguments: str) -> str:
    """Run a command in this process and return what it printed."""
    result = run_command(*arguments, width=400)
    logging.getLogger("hansa").handlers.clear()
    return result.output


def all_commands() -> set[str]:
    import typer

    def walk(group: Any, prefix: str) -> Iterator[str]:
        for name, each in group.commands.items():
            yield from walk(each, f"{prefix}{name} ") if hasattr(each, "commands") else [f"{prefix}{name}"]

    return set(walk(typer.main.get_command(app), ""))


def test_every_command_either_looks_or_needs_code():
    assert all_commands() == {*LOOKS, *NEEDS_CODE}


def test_every_public_reader_is_in_the_table():
    for module in (hansa, config, report):
        for name in module.__all__:
            each = getattr(module, name)
            takes = {"folder", "path", "text", "document", "config"}
            if callable(each) and takes & set(inspect.signature(each).parameters):
                assert name in {*READERS, *NEED_CODE, *NO_READERS}, name


def test_the_trap_works(place):
    with allow_code():
        name_code(place / "run", "sample", "trap:touch")
        with pytest.raises(HansaError):
            config.load(place / "run" / "config.yaml")
    assert (place / "touched").exists()


def _look(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every command that looks and every reader; nothing may be touched."""
    from hansa.study.report.live import ReportServer

    def serve_once(server: ReportServer, poll_interval: float = 0.5) -> None:
        server.watcher.refresh()
        server.watcher.page()

    monkeypatch.setattr(ReportServer, "serve_forever", serve_once)
    for name, calls in LOOKS.items():
        for arguments in calls:
            if name not in READ_NO_FOLDER:
                command(*name.split(), *(each.format(run="run") for each in arguments))
                assert not (place / "touched").exists(), (name, arguments)
    for name, read in READERS.items():
        with suppress(HansaError):
            read(place / "run")
        assert not (place / "touched").exists(), name
    assert "trap" not in sys.modules


@pytest.mark.parametrize("key", KEYS)
def test_looking_touches_no_trap(place, monkeypatch, key):
    name_code(place / "run", key, "trap:touch")
    assert config.code_names(RunFolder(place / "run").config) == ["trap:touch"]
    _look(place, monkeypatch)


@pytest.mark.parametrize("key", KEYS)
def test_what_needs_code_refuses_a_folder_of_others(place, key):
    name_code(place / "run", key, "trap:touch")
    for name, calls in NEEDS_CODE.items():
        for arguments in calls:
            output = command(*name.split(), *(each.format(run="run") for each in arguments))
            assert not (place / "touched").exists(), (name, arguments)
            assert "trap:touch" in output, (name, output)
            assert "--trust" in output, (name, output)
    for name, call in NEED_CODE.items():
        with pytest.raises(HansaError, match=r"trap:touch.*trust=True"):
            call(place / "run")
        assert not (place / "touched").exists(), name


@pytest.mark.parametrize("key", KEYS)
def test_functions_of_python_itself_are_never_called(place, key):
    name_code(place / "run", key, "os:mkdir")
    document = yaml.safe_load((place / "run" / "config.yaml").read_text())
    if key not in PLAIN_KEYS:
        *outer, last = key.split(".")
        section = document
        for name in outer:
            section = section[name]
        section[last]["path"] = str(place / "touched")
        (place / "run" / "config.yaml").write_text(yaml.safe_dump(document))
    for arguments in (["report", "run"], ["config", "show", "run/config.yaml"], ["predict", "run", "--trust"],
                      ["run", "run/config.yaml", "--trust", "-o", "new", "-q"]):  # fmt: skip
        output = command(*arguments)
        assert not (place / "touched").exists(), arguments
        if "run" in arguments[:1]:
            assert "is a module of Python itself" in output


def test_commands_that_read_no_folder_import_nothing(place):
    for name in sorted(READ_NO_FOLDER):
        for arguments in LOOKS[name]:
            command(*name.split(), *arguments)
    assert not (place / "touched").exists()
    assert "trap" not in sys.modules


MINE = """\
import hansa
import os
from torch import nn
from os import mkdir
from torch.nn import Linear

def plain():
    return nn.Linear(60, 10)

class Net(nn.Linear):
    def __init__(self):
        super().__init__(60, 10)

class Other:
    pass

alias = plain
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "looked_at.py").write_text(MINE)
    small = SMALL.replace("model: logistic", "model: {factory: 'looked_at:Net'}").replace("rounds: 3", "rounds: 2")
    (tmp_path / "small.yaml").write_text(small)
    yield tmp_path
    sys.modules.pop("looked_at", None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("looked_at:plain", "Write @hansa.component above it"),
        ("looked_at:alias", "Write @hansa.component above it"),
        ("looked_at:Other", "not a component"),
        ("looked_at:mkdir", "expected a component"),
        ("looked_at:os.mkdir", "expected a component"),
        ("looked_at:Linear", "is defined in torch.nn.modules.linear, not in looked_at"),
        ("looked_at:nn.init.zeros_", "is defined in torch.nn.init, not in looked_at"),
        ("builtins:eval", "module of Python itself"),
        ("subprocess:Popen", "module of Python itself"),
        ("torch.utils.bottleneck.__main__:main", "module of Python itself"),
        ("torch.hub:load", "Write @hansa.component above it"),
    ],
)
def test_only_components_are_imported(mine, name, reason):
    from hansa.config.import_path import import_object

    with allow_code(), pytest.raises(HansaError, match=reason):
        import_object(name)


def test_a_run_of_ones_own_needs_no_trust_and_one_of_others_does(mine, monkeypatch, tmp_path):
    command("run", "small.yaml", "-o", "run", "-q")
    assert oct(trust.list_path().stat().st_mode & 0o777) == "0o600"
    hansa.load_model("run")
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "list of another user"))
    with pytest.raises(trust.UntrustedFolderError, match=r"not on the list.*looked_at:Net\. .*--trust"):
        hansa.load_model("run")
    hansa.load_model("run", trust=True)
    assert "looked_at:Net" in command("resume", "run", "-r", "3", "-q")
    assert RunFolder("run").summary["rounds"] == 2
    command("resume", "run", "-r", "3", "-q", "--trust")
    assert RunFolder("run").summary["rounds"] == 3


def test_without_a_place_for_the_list_runs_work_and_are_not_trusted(mine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "file" / "list.txt"))
    command("run", "small.yaml", "-o", "run", "-q")
    assert "not on the list" in command("resume", "run", "-r", "3", "-q")
    command("resume", "run", "-r", "3", "-q", "--trust")
    assert RunFolder("run").summary["rounds"] == 3


def test_a_folder_of_others_with_the_same_settings_is_not_the_users_own(mine, tmp_path):
    """The id is random: nobody can write a folder that the list has, without a folder of this user."""
    command("run", "small.yaml", "-o", "run", "-q")
    (mine / "run" / trust.IDENTITY).unlink()
    assert "not on the list" in command("resume", "run", "-r", "3", "-q")
    (mine / "run" / trust.IDENTITY).write_text("0" * 32)
    assert "not on the list" in command("resume", "run", "-r", "3", "-q")


def test_a_group_of_seeds_of_others_needs_trust_too(mine, monkeypatch, tmp_path):
    command("run", "small.yaml", "-o", "group", "--seeds", "2", "-q")
    command("resume", "group", "-r", "3", "-q")
    assert [run.summary["rounds"] for run in SeedGroupFolder("group").runs] == [3, 3]
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "list of another user"))
    for arguments in (["resume", "group", "-r", "4", "-q"], ["run", "-o", "group", "--resume", "-q"]):
        assert "looked_at:Net. If you trust it: --trust" in command(*arguments)
    with pytest.raises(trust.UntrustedFolderError, match="looked_at:Net"):
        hansa.resume("group", rounds=4)
    with pytest.raises(trust.UntrustedFolderError, match="looked_at:Net"):
        hansa.load_model("group/seed-0", hansa.models.logistic, client=1)
    sys.modules.pop("looked_at", None)  # forked workers imported it, or this process
    assert "mcmahan2017" in command("cite", "group")
    command("report", "group", "-o", "page.html")
    assert "mcmahan2017" in (mine / "page.html").read_text()
    assert "looked_at" not in sys.modules


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_list_that_others_can_write_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "list.txt"))
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        trust.remember(folder, ["mine:net"] if folder == own else ["mine:other"])
    assert trust.is_listed(own, ["mine:net"])
    assert not trust.is_listed(own, ["mine:net", "mine:other"])
    assert not trust.is_listed(other, ["mine:net"])
    (tmp_path / "list.txt").chmod(0o620)
    assert not trust.is_listed(own, ["mine:net"])
