"""Components of other packages: entry points of the group ``hansa.parts``, named KIND.NAME.

A package declares them in its pyproject.toml; here ``compressor`` is the kind and ``ternary`` the name::

    [project.entry-points."hansa.parts"]
    "compressor.ternary" = "hansa_ternary:ternary"

Only names are read until a component is used. A broken package is reported by name and does not affect others.
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
    """A component of an installed package, not imported yet."""

    kind: str
    name: str
    package: str
    entry: EntryPoint

    def load(self) -> Any:
        """Import the class or function; this runs the package's code."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:  # importing runs foreign code
            raise HansaError(
                f"{self}: cannot be loaded ({type(error).__name__}: {error}). Fix or uninstall that package."
            ) from error

    def __str__(self) -> str:
        return f"{self.kind}.{self.name} of the package {self.package}"


@cache
def installed_plugins() -> tuple[Plugin, ...]:
    """Return all plug-ins, sorted by kind, name and package."""
    plugins = []
    for entry in entry_points(group=GROUP):
        kind, _, name = entry.name.partition(".")
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        plugins.append(Plugin(kind, normalize_name(name), package, entry))
    return tuple(sorted(plugins, key=lambda plugin: (plugin.kind, plugin.name, plugin.package)))


def plugins_of_kind(kind: str) -> dict[str, Plugin]:
    """Return the plug-ins of a kind by name; the first package in alphabetical order wins."""
    by_name: dict[str, Plugin] = {}
    for plugin in installed_plugins():
        if plugin.kind == kind and plugin.name:
            if plugin.name in by_name:
                warn_once(f"{plugin}: {by_name[plugin.name].package} has a component of that name, which is used.")
            by_name.setdefault(plugin.name, plugin)
    return by_name


def normalize_name(name: str) -> str:
    """Return a name as it is looked up: without capitals, dashes, spaces and the plus of FedMGDA+.

    >>> normalize_name("Erdos-Renyi"), normalize_name("FedMGDA+")
    ('erdos_renyi', 'fedmgda')
    """
    return name.strip().lower().replace("+", "").replace("-", "_").replace(" ", "_")


@cache
def warn_once(message: str) -> None:
    """Warn about an installed package, once per process."""
    log.warning("plug-in %s", message)


def clear_cache() -> None:
    """Clear the cache, for programs that install packages while they run."""
    installed_plugins.cache_clear()
    warn_once.cache_clear()
