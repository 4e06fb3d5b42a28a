"""References read off the code: the command line, the configuration, the public names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from packages import PACKAGES


def cli() -> Iterator[str]:
    """Every command with its arguments and options."""
    import click
    import typer

    from hansa.cli.app import app

    yield "# Command line\n"
    yield from _commands(typer.main.get_command(app), "hansa", click)


def _commands(command: Any, name: str, click: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for each, below in sorted(command.commands.items()):
            yield from _commands(below, f"{name} {each}", click)
        return
    yield f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n"
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
        shown = flags if isinstance(parameter, click.Option) else f"`{parameter.make_metavar(click.Context(command))}`"
        default = parameter.default
        told = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
        rows.append(f"| {shown} | {_cell(getattr(parameter, 'help', '') or '')} | {_cell(str(told))} |")
    if rows:
        yield "| | | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def config() -> Iterator[str]:
    """Every section and key of a configuration file, as editors show them."""
    from hansa.config.sections import Config

    yield "# Configuration\n\nAll keys of a YAML file. Everything has a default; `hansa config example` prints one.\n"
    yield from _section(Config, "")


def _section(section: Any, name: str) -> Iterator[str]:
    from hansa.config.loader import key_descriptions

    rows, below, texts = [], [], key_descriptions().get(section.__name__, {})
    for key, field in section.model_fields.items():
        kind = field.annotation
        inner = kind if isinstance(kind, type) and hasattr(kind, "model_fields") else None
        if inner is not None:
            below.append((inner, f"{name}.{key}".lstrip(".")))
        told = texts.get(key) or (inspect.getdoc(inner) or "" if inner else "")
        default = "" if field.is_required() or inner is not None or field.default is None else f"`{field.default}`"
        rows.append(f"| `{key}` | {_cell(told)} | {_cell(default)} |")
    title = f"## {name}\n\n{inspect.getdoc(section)}\n" if name else ""
    yield f"{title}\n| key | what it is | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    for inner, path in below:
        yield from _section(inner, path)


def names() -> Iterator[str]:
    """A line a page: its name, and the full names of what is public there."""
    import hansa

    yield " ".join(["package", *(f"hansa.{name}" for name in _described(hansa))])
    for package in PACKAGES:
        module = importlib.import_module(f"hansa.{package}")
        yield " ".join([package, *(f"hansa.{package}.{name}" for name in _described(module))])


def _described(module: Any) -> list[str]:
    listed = getattr(module, "__all__", None)
    found = []
    for name in listed or [name for name in vars(module) if not name.startswith("_")]:
        value = getattr(module, name)
        if listed is None and getattr(value, "__module__", "") != module.__name__:
            continue
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("hansa"):
            found.append(name)
    return sorted(found, key=str.lower)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print("\n".join({"cli": cli, "config": config, "names": names}[sys.argv[1]]()))
