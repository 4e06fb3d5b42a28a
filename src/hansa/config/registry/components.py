"""The kinds of parts: what each is called, which ones there are, and what one must be able to do.

A part is found in one of three ways: by its name among those of Hansa, by its name among those that installed packages
bring (`hansa.config.registry.plugins`), or as MODULE:NAME in code of one's own (`hansa.config.registry.import_path`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

from hansa import aggregate, compress, data, gossip, local, presets, sample, schedule, server
from hansa.algorithm import Algorithm
from hansa.config.registry import import_path, plugins
from hansa.config.registry.plugins import Plugin, plain
from hansa.config.registry.signatures import WELL_KNOWN, hints, returned
from hansa.core.errors import HansaError, short_repr, suggestion
from hansa.rounds import ledger
from hansa.rounds.faults import faults
from hansa.training import augment, losses

Factory: TypeAlias = Callable[..., Any]
Keys: TypeAlias = tuple[str | int, ...]


class Misfit(HansaError):
    """Something that cannot be made as written; ``keys`` say where inside it, from the outermost."""

    def __init__(self, keys: Keys, message: str) -> None:
        super().__init__(f"{'.'.join(map(str, keys))}: {message}" if keys else message)
        self.keys, self.message = keys, message

    def under(self, *keys: str | int) -> Misfit:
        """The same, seen from further outside."""
        return Misfit((*keys, *self.keys), self.message)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of part. An argument annotated with its ``protocol`` takes such parts.

    ``methods`` are those of the protocol that a part must have; with none, it must be an instance of the protocol.
    ``default`` is the one that is meant where a file gives arguments and no name, ``listed`` makes one of a list.
    Where ``function`` names an argument, a function that has it is a part as it is, not what makes one.
    """

    name: str
    protocol: Any
    built_in: Mapping[str, Factory]
    methods: tuple[str, ...] = ()
    word: str = ""
    default: str | None = None
    listed: Factory | None = None
    function: str = ""

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.word or self.name

    @property
    def plugins(self) -> dict[str, Plugin]:
        """Those that installed packages bring; a name that Hansa has keeps its meaning."""
        found = plugins.of_kind(self.name)
        for name in found.keys() & self.built_in.keys():
            plugins.warn_once(f"{found.pop(name)}: Hansa has a {self.title} of that name, which counts.")
        return found

    @property
    def names(self) -> list[str]:
        """All that can be named, without importing what is not needed yet."""
        return [*self.built_in, *self.plugins]

    def items(self) -> Iterator[tuple[str, Factory]]:
        """All of them by name; a plug-in that cannot be loaded is told and left out."""
        yield from self.built_in.items()
        for name, plugin in self.plugins.items():
            try:
                yield name, self._factory(plugin.load(), str(plugin))
            except HansaError as error:
                plugins.warn_once(str(error))

    def knows(self, name: str) -> bool:
        """Whether a word is the name of one, or names code."""
        return import_path.is_place(name) or plain(name) in self.built_in or plain(name) in self.plugins

    def find(self, name: str) -> Factory:
        """What makes the part of that name, or `Misfit`."""
        if import_path.is_place(name):
            try:
                return self._factory(import_path.find(name), repr(name))
            except HansaError as error:
                raise Misfit((), str(error)) from error
        if plain(name) in self.built_in:
            return self.built_in[plain(name)]
        if plain(name) in self.plugins:
            plugin = self.plugins[plain(name)]
            try:
                return self._factory(plugin.load(), str(plugin))
            except HansaError as error:
                raise Misfit((), str(error)) from error
        raise Misfit((), f"no {self.title} {short_repr(name)}. {suggestion(plain(name), self.names)}")

    def _factory(self, found: Any, place: str) -> Factory:
        """What is called to make one: a class or function as it is; a part that was made already makes itself."""
        if not isinstance(found, type) and not inspect.isroutine(found) and not self.lacks(found):
            return lambda: found
        if self.function and inspect.isfunction(found) and self.function in inspect.signature(found).parameters:
            return _with_options(found, self.function)
        if not callable(found):
            raise HansaError(f"{place}: expected a {self.title} or what makes one, found {found!r}.")
        return found  # type: ignore[no-any-return]

    def lacks(self, part: Any) -> str:
        """What keeps something from being a part of this kind; nothing, if it is one.

        >>> KINDS["server"].lacks(server.scale()), KINDS["server"].lacks(compress.sign())
        ('', 'it has no method init(x)')
        """
        if not self.methods:
            wanted = self.protocol.__name__
            return "" if isinstance(part, self.protocol) else f"it is no {wanted}"
        for method in self.methods:
            signature = _wanted(self.protocol, method)
            found = getattr(part, method, None)
            if not callable(found):
                return f"it has no method {method}{_shown(signature)}"
            if not _takes(found, signature):
                return f"its method {method} cannot be called as {method}{_shown(signature)}"
        return ""

    def makes(self, factory: Any) -> bool:
        """Whether a class, or a function by what it says that it returns, makes parts of this kind."""
        made = factory
        if inspect.isfunction(factory):
            made = returned(factory)
        if not isinstance(made, type) or made is self.protocol or getattr(made, "_is_protocol", False):
            return False
        if not self.methods:
            return issubclass(made, self.protocol)
        return all(
            inspect.isfunction(found := getattr(made, method, None))
            and _takes(found, _wanted(self.protocol, method), bound=False)
            for method in self.methods
        )


KINDS: dict[str, Kind] = {}
"""Every kind by name. The names are those that an entry point begins with."""


def add(
    name: str,
    protocol: Any,
    rooms: ModuleType | Mapping[str, Factory],
    methods: tuple[str, ...] = (),
    *,
    homes: tuple[str, ...] = (),
    word: str = "",
    default: str | None = None,
    listed: Factory | None = None,
    function: str = "",
) -> Kind:
    """Declare a kind: its own parts are those that a room makes public, or the ones given by name.

    ``methods``: those that the protocol marks abstract, if it marks any; ``homes``: the modules of a room that have
    such parts, so that the others need not be imported.
    """
    if getattr(protocol, "_is_protocol", False) and not methods:
        methods = tuple(each for each in vars(protocol) if each in protocol.__abstractmethods__)
    empty = Kind(name, protocol, {}, methods, word)
    table = rooms if isinstance(rooms, Mapping) else {
        each: made for each in rooms.__all__ if each.islower()
        if not homes or rooms.HOMES[each] in homes
        if empty.makes(made := getattr(rooms, each))
    }  # fmt: skip
    WELL_KNOWN[protocol.__name__] = protocol
    KINDS[name] = Kind(name, protocol, table, methods, word, default, listed, function)
    return KINDS[name]


def _with_options(function: Factory, last: str) -> Factory:
    """What makes a part of a function: with the arguments behind the one called ``last`` settled, if there are any."""
    parameters = list(inspect.signature(function).parameters.values())
    behind = parameters[[each.name for each in parameters].index(last) + 1 :]

    def make(**options: Any) -> Any:
        return partial(function, **options) if options else function

    make.__signature__ = inspect.Signature(behind)  # type: ignore[attr-defined]
    make.__annotations__ = {each.name: hints(function).get(each.name, Any) for each in behind}
    return make


def strays() -> list[str]:
    """Entry points of no kind that is known, each with what was perhaps meant."""
    return [f"{plugin}: no kind {plugin.kind!r}. {suggestion(plugin.kind, KINDS)}"
            for plugin in plugins.installed() if plugin.kind not in KINDS or not plugin.name]  # fmt: skip


def _wanted(protocol: Any, method: str) -> inspect.Signature:
    parameters = list(inspect.signature(getattr(protocol, method)).parameters.values())
    return inspect.Signature(parameters[1:])


def _takes(method: Any, wanted: inspect.Signature, *, bound: bool = True) -> bool:
    """Whether a method can be called with the arguments that its protocol has."""
    try:
        found = inspect.signature(method)
    except (TypeError, ValueError):  # of compiled code nothing is known
        return True
    places: list[object] = [] if bound else [None]
    keywords: dict[str, object] = {}
    for parameter in wanted.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keywords[parameter.name] = None
        elif parameter.default is inspect.Parameter.empty:
            places.append(None)
    try:
        found.bind(*places, **keywords)
    except TypeError:
        return False
    return True


def _shown(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


COMPRESSOR = add("compressor", compress.Compressor, compress)
UPLINK = add("uplink", compress.Uplink, compress)
DOWNLINK = add("downlink", compress.Downlink, compress)
AGGREGATE = add("aggregate", aggregate.Aggregator, aggregate)
SERVER = add("server", server.ServerTransform, server, word="server transform", listed=server.chain)
SAMPLER = add("sampler", sample.Sampler, sample, default="uniform")
TOPOLOGY = add("topology", gossip.Topology, gossip)
CLUSTERING = add("clustering", gossip.Clustering, gossip)
ACTIVITY = add("activity", gossip.Activity, gossip)
SCHEDULE = add("schedule", schedule.Schedule, local, ("at",))
WORK = add("work", local.LocalWork, local, word="kind of local work")
DISTRIBUTION = add("distribution", local.Distribution, local, ("draw",))
SOLVER = add("solver", local.Solver, local, word="local solver")
BLOCKS = add(
    "blocks", local.blocks, {"blocks": local.blocks}, word="choice of blocks", default="blocks", listed=local.blocks
)
AUGMENT = add("augment", augment.Augmentation, augment, word="augmentation", function="generator")
LOSS = add("loss", losses.Loss, losses, ("sums",))
PARTITION = add("partition", data.Partition, data, ("split",), homes=("hansa.data.partitions", "hansa.data.split"))
LINK_MODEL = add(
    "link_model",
    ledger.LinkModel,
    {"custom": ledger.LinkModel, "afga": ledger.afga},
    ("seconds",),
    word="link model",
    default="custom",
)
FAULTS = add(
    "fault_plan", faults, {"faults": faults}, ("strike_orders", "strike_reports"), word="fault plan", default="faults"
)
PRESET = add("preset", Algorithm, presets.catalogue())
