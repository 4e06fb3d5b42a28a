"""``hansa doctor``: describe the machine and the installation, with a remedy for what is missing."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from hansa.cli import options as opt
from hansa.cli.console import print_table, say_json

_REQUIREMENT = re.compile(r"""([\w.-]+).*?;.*extra == ['"](?!dev|docs)([\w-]+)['"]""")


class Finding(NamedTuple):
    """A fact about this installation, and what to do if something is missing."""

    name: str
    value: str
    remedy: str | None = None


def doctor(as_json: opt.AsJson = False) -> None:
    """Describe the machine, versions, native kernels, devices and extras, and how to add what is missing."""
    parts = {"machine": _machine, "versions": _versions, "kernels": _kernels, "devices": _devices, "extras": _extras}
    findings = {name: list(find()) for name, find in parts.items()}
    if as_json:
        say_json({section: [fact._asdict() for fact in facts] for section, facts in findings.items()})
        return
    print_table(
        (),
        [
            ("" if index else section, fact.name, Text.assemble(fact.value, (f"  {fact.remedy or ''}", "yellow")))
            for section, facts in findings.items()
            for index, fact in enumerate(facts)
        ],
    )


def _machine() -> Iterator[Finding]:
    from hansa.runs.folder import environment

    facts = environment()
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processor", str(facts["processor"]))
    cores, all_cores = int(facts["cores"] or 1), os.cpu_count() or 1
    yield Finding("cores", str(cores) if cores == all_cores else f"{cores} of {all_cores}")
    try:
        yield Finding("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    except (AttributeError, ValueError, OSError):  # not available on this platform
        return


def _versions() -> Iterator[Finding]:
    from hansa import __version__

    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("hansa", f"{__version__} ({Path(__file__).parents[1]})")
    yield from (Finding(name, version(name)) for name in ("torch", "numpy", "scipy", "safetensors", "pydantic"))


def _kernels() -> Iterator[Finding]:
    from hansa.core import native

    yield Finding("in use", native.describe(), native.remedy() or None)
    if sets := native.instruction_sets():
        yield Finding("available", ", ".join(native.TITLES[name] for name in sets))


def _devices() -> Iterator[Finding]:
    import torch

    from hansa.core.devices import available_devices

    devices = available_devices()
    yield from (Finding(str(device), name) for device, name in devices.items())
    if len(devices) == 1:
        remedy = "This PyTorch is built for the CPU. pytorch.org has builds for accelerators."
        if torch.version.cuda or getattr(torch.version, "hip", None):
            remedy = "PyTorch sees no accelerator: check its driver."
        yield Finding("accelerator", "none", remedy)


def _extras() -> Iterator[Finding]:
    extras: dict[str, dict[str, str]] = {}
    for match in filter(None, map(_REQUIREMENT.match, requires("hansa") or [])):
        packages = extras.setdefault(match[2], {})
        try:
            packages[match[1]] = version(match[1])
        except PackageNotFoundError:
            packages[match[1]] = "missing"
    for extra, packages in extras.items():
        value = ", ".join(map(" ".join, packages.items()))
        yield Finding(extra, value, f"pip install 'hansa[{extra}]'" if "missing" in packages.values() else None)
