"""Parts that other packages bring: the entry points of the group ``hansa.parts``, named KIND.NAME.

A package says in its pyproject.toml, ``compressor.ternary`` being the kind of part and the name it goes by::

    [project.entry-points."hansa.parts"]
    "compressor.ternary" = "hansa_ternary:ternary"

Only names are read until a part is asked for; a package that is broken is told by its name and breaks nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hansa.core.errors import HansaError

GROUP = "hansa.parts"
log = logging.getLogger("hansa")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One part of an installed package, not imported yet."""

    kind: str
    name: str
    package: str
    entry: EntryPoint

    def load(self) -> Any:
        """The part's class or function; importing it runs the package's code."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:  # whatever a strange package does when it is imported
            raise HansaError(
                f"{self}: cannot be loaded ({type(error).__name__}: {error}). Mend or uninstall that package."
            ) from error

    def __str__(self) -> str:
        return f"{self.kind}.{self.name} of the package {self.package}"


@cache
def installed() -> tuple[Plugin, ...]:
    """All plug-ins there are, by kind, name and package."""
    found = []
    for entry in entry_points(group=GROUP):
        kind, _, name = entry.name.partition(".")
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        found.append(Plugin(kind, plain(name), package, entry))
    return tuple(sorted(found, key=lambda plugin: (plugin.kind, plugin.name, plugin.package)))


def of_kind(kind: str) -> dict[str, Plugin]:
    """The plug-ins of a kind by name; of two packages with one name the first in the alphabet has it."""
    found: dict[str, Plugin] = {}
    for plugin in installed():
        if plugin.kind == kind and plugin.name:
            if plugin.name in found:
                warn_once(f"{plugin}: {found[plugin.name].package} has a part of that name, which counts.")
            found.setdefault(plugin.name, plugin)
    return found


def plain(name: str) -> str:
    """A name as it is looked up: capitals, dashes and spaces do not matter, nor does the plus of FedMGDA+.

    >>> plain("Erdos-Renyi"), plain("FedMGDA+")
    ('erdos_renyi', 'fedmgda')
    """
    return name.strip().lower().replace("+", "").replace("-", "_").replace(" ", "_")


@cache
def warn_once(message: str) -> None:
    """A warning about an installed package: once a process is enough."""
    log.warning("plug-in %s", message)


def forget() -> None:
    """Look again at what is installed, for programs that change it while they run."""
    installed.cache_clear()
    warn_once.cache_clear()
