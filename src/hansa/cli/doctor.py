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

_REQUIREMENT = re.compile(r"""([\w.-]+).*?;.*extra == ['"]([\w-]+)['"]""")
_DEVELOPMENT = ("dev", "docs")


class Finding(NamedTuple):
    """A line of the report: a fact about this installation, and what to do if something is missing."""

    section: str
    name: str
    value: str
    remedy: str = ""


@report_errors
def doctor(
    as_json: opt.AsJson = False,
) -> None:
    """Describe the machine, versions, native kernels, devices, extras and folders, and how to add what is missing."""
    findings = list(collect())
    if as_json:
        sections = dict.fromkeys(each.section for each in findings)
        record = {
            section: [
                {"name": each.name, "value": each.value, "remedy": each.remedy or None}
                for each in findings
                if each.section == section
            ]
            for section in sections
        }
        say_json(record)
    else:
        out().print(_table(findings))


def collect() -> Iterator[Finding]:
    """Yield all findings about this machine and installation."""
    for part in (_machine, _versions, _kernels, _devices, _extras, _folders):
        for each in part():
            yield each._replace(value=_printable(each.value))


def _printable(text: str) -> str:
    """Return text with paths as they are stored: in a C locale Python keeps their other bytes as surrogates.

    >>> _printable("/home/gr\\udcc3\\udcb6\\udcc3\\udc9fe")
    '/home/größe'
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _machine() -> Iterator[Finding]:
    from hansa.runs.folder import environment

    facts = environment()
    yield Finding("machine", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("machine", "processor", str(facts["processor"]))
    cores, all_cores = int(facts["cores"] or 1), os.cpu_count() or 1
    yield Finding("machine", "cores", str(cores) if cores == all_cores else f"{cores} of {all_cores}")
    if memory := _memory():
        yield Finding("machine", "memory", f"{memory / 2**30:.1f} GiB")


def _memory() -> int | None:
    """Return the bytes of memory, where the platform tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _versions() -> Iterator[Finding]:
    from hansa import __version__

    yield Finding("versions", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("versions", "hansa", f"{__version__} ({Path(__file__).parents[1]})")
    for name in ("torch", "numpy", "scipy", "safetensors", "pydantic"):
        installed = _version(name)
        remedy = "" if installed else f"pip install {name}"
        yield Finding("versions", name, installed or "not installed as a package", remedy)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels() -> Iterator[Finding]:
    from hansa.core import native

    yield Finding("kernels", "in use", native.describe(), native.remedy())
    if sets := native.instruction_sets():
        yield Finding("kernels", "available", ", ".join(native.TITLES[name] for name in sets))


def _devices() -> Iterator[Finding]:
    import torch

    from hansa.core.devices import available_devices

    there = available_devices()
    for device, name in there.items():
        yield Finding("devices", str(device), name)
    if len(there) == 1:
        built_for = torch.version.cuda or getattr(torch.version, "hip", None)
        remedy = (
            "PyTorch sees no accelerator: check its driver."
            if built_for
            else "This PyTorch is built for the CPU. pytorch.org has builds for accelerators."
        )
        yield Finding("devices", "accelerator", "none", remedy)


def _extras() -> Iterator[Finding]:
    try:
        stated = requires("hansa") or []
    except PackageNotFoundError:
        yield Finding("extras", "hansa", "not installed as a package", "pip install hansa")
        return
    extras: dict[str, list[str]] = {}
    for requirement in stated:
        if (match := _REQUIREMENT.match(requirement)) and match[2] not in _DEVELOPMENT:
            extras.setdefault(match[2], []).append(match[1])
    for extra, packages in extras.items():
        missing = [package for package in packages if _version(package) is None]
        present = [f"{package} {_version(package)}" for package in packages if package not in missing]
        value = ", ".join([*present, *(f"{package} missing" for package in missing)])
        yield Finding("extras", extra, value, f"pip install 'hansa[{extra}]'" if missing else "")


def _folders() -> Iterator[Finding]:
    from hansa.data.files import data_folder
    from hansa.runs.trust import list_path

    folders = {
        "data": (data_folder(), "Set HANSA_DATA to a folder you may write to."),
        "list of created runs": (
            list_path(),
            "Set HANSA_CREATED_RUNS to a file you may write. Or pass --trust to resume runs that name code.",
        ),
        "temporary": (Path(tempfile.gettempdir()), "Set TMPDIR to a folder you may write to."),
    }
    for name, (path, remedy) in folders.items():
        writable = _can_write(path)
        there = "" if path.exists() else ", not created yet"
        yield Finding("folders", name, f"{path}{there if writable else ', not writable'}", "" if writable else remedy)


def _can_write(path: Path) -> bool:
    """Return whether a file or folder can be written or created, without creating anything."""
    try:
        nearest = next(each for each in (path, *path.parents) if each.exists())
    except (OSError, StopIteration):
        return False
    return os.access(nearest, os.W_OK) and (nearest == path or nearest.is_dir())


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = None
    for each in findings:
        remedy = f"  [yellow]{escape(each.remedy)}[/]" if each.remedy else ""
        table.add_row("" if each.section == section else each.section, each.name, f"{escape(each.value)}{remedy}")
        section = each.section
    return table
