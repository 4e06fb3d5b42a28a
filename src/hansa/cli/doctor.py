"""``hansa doctor``: describe the machine and the installation, with a remedy for what is missing."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import out, report_errors, say_json

_REQUIREMENT = re.compile(r"""([\w.-]+).*?;.*extra == ['"](?!dev|docs)([\w-]+)['"]""")
_NOT_INSTALLED = "not installed as a package"


class Finding(NamedTuple):
    """A fact about this installation, and what to do if something is missing."""

    name: str
    value: str
    remedy: str | None = None


@report_errors
def doctor(as_json: opt.AsJson = False) -> None:
    """Describe the machine, versions, native kernels, devices, extras and folders, and how to add what is missing."""
    parts = {"machine": _machine, "versions": _versions, "kernels": _kernels, "devices": _devices, "extras": _extras,
             "folders": _folders}  # fmt: skip
    findings = {name: [each._replace(value=_printable(each.value)) for each in find()] for name, find in parts.items()}
    if as_json:
        say_json({name: [each._asdict() for each in found] for name, found in findings.items()})
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, found in findings.items():
        for place, (name, value, remedy) in enumerate(found):
            advice = f"  [yellow]{escape(remedy)}[/]" if remedy else ""
            table.add_row("" if place else section, name, f"{escape(value)}{advice}")
    out().print(table)


def _printable(text: str) -> str:
    """Return text with paths as they are stored: in a C locale Python keeps their other bytes as surrogates.

    >>> _printable("/home/gr\\udcc3\\udcb6\\udcc3\\udc9fe")
    '/home/größe'
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _machine() -> Iterator[Finding]:
    from hansa.runs.folder import environment

    facts = environment()
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processor", str(facts["processor"]))
    cores, all_cores = int(facts["cores"] or 1), os.cpu_count() or 1
    yield Finding("cores", str(cores) if cores == all_cores else f"{cores} of {all_cores}")
    try:
        yield Finding("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    except (AttributeError, ValueError, OSError):  # the platform does not tell
        return


def _versions() -> Iterator[Finding]:
    from hansa import __version__

    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("hansa", f"{__version__} ({Path(__file__).parents[1]})")
    for name in ("torch", "numpy", "scipy", "safetensors", "pydantic"):
        installed = _version(name)
        yield Finding(name, installed or _NOT_INSTALLED, None if installed else f"pip install {name}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels() -> Iterator[Finding]:
    from hansa.core import native

    yield Finding("in use", native.describe(), native.remedy() or None)
    if sets := native.instruction_sets():
        yield Finding("available", ", ".join(native.TITLES[name] for name in sets))


def _devices() -> Iterator[Finding]:
    import torch

    from hansa.core.devices import available_devices

    there = available_devices()
    yield from (Finding(str(device), name) for device, name in there.items())
    if len(there) == 1:
        remedy = "This PyTorch is built for the CPU. pytorch.org has builds for accelerators."
        if torch.version.cuda or getattr(torch.version, "hip", None):
            remedy = "PyTorch sees no accelerator: check its driver."
        yield Finding("accelerator", "none", remedy)


def _extras() -> Iterator[Finding]:
    try:
        stated = requires("hansa") or []
    except PackageNotFoundError:
        yield Finding("hansa", _NOT_INSTALLED, "pip install hansa")
        return
    extras: dict[str, dict[str, str | None]] = {}
    for match in filter(None, map(_REQUIREMENT.match, stated)):
        extras.setdefault(match[2], {})[match[1]] = _version(match[1])
    for extra, packages in extras.items():
        value = ", ".join(f"{package} {installed or 'missing'}" for package, installed in packages.items())
        yield Finding(extra, value, None if all(packages.values()) else f"pip install 'hansa[{extra}]'")


def _folders() -> Iterator[Finding]:
    from hansa.data.files import data_folder
    from hansa.runs.trust import list_path

    runs = "Set HANSA_CREATED_RUNS to a file you may write. Or pass --trust to resume runs that name code."
    for name, path, remedy in (
        ("data", data_folder(), "Set HANSA_DATA to a folder you may write to."),
        ("list of created runs", list_path(), runs),
        ("temporary", Path(tempfile.gettempdir()), "Set TMPDIR to a folder you may write to."),
    ):
        nearest = next((each for each in (path, *path.parents) if os.path.exists(each)), path)
        if os.access(nearest, os.W_OK) and (nearest == path or nearest.is_dir()):
            yield Finding(name, str(path) if nearest == path else f"{path}, not created yet")
        else:
            yield Finding(name, f"{path}, not writable", remedy)
