"""Which components a pace combines with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hansa.aggregate import BaseAggregator
from hansa.compress import direct
from hansa.core.errors import HansaError
from hansa.core.protocols import walk_components, with_defaults
from hansa.local.phase import LocalPhase
from hansa.pace.base import Pace, buffered, synchronous
from hansa.sample import Sampler
from hansa.server import dyn


def check_pace_composition(name: str, pace: Pace, local: LocalPhase, channels: Mapping[str, Any]) -> None:
    """Raise for components that would silently compute something else with this pace.

    Args:
        name: Name of the algorithm.
        pace: Its pace.
        local: Its local phase.
        channels: Its channels.
    """
    if local.mixing is not None and pace != synchronous():
        raise _refusal(
            name, pace, "clients that gossip exchange after every step and finish together, from one version. "
            "Use synchronous()."
        )  # fmt: skip
    if not isinstance(pace, buffered):
        return
    for label, channel in channels.items():
        if not isinstance(channel.downlink, direct):
            raise _refusal(
                name, pace, f"the downlink of {label!r} is {channel.downlink!r}: all clients share one replica, but "
                "clients at work hold different versions. Use direct()."
            )  # fmt: skip
        if any(isinstance(part, dyn) for part in walk_components(channel.server)):
            raise _refusal(
                name, pace, "FedDyn's server replaces the model by the mean of the clients' models minus h/alpha, "
                "which holds for updates of one version only. Use another preset, or synchronous()."
            )  # fmt: skip
        if isinstance(pace.size, int):
            check_enough_updates(name, pace, channels, pace.size)


def check_enough_updates(name: str, pace: Pace, channels: Mapping[str, Any], size: int) -> None:
    """Raise for aggregators that need more updates than a server step has.

    Args:
        name: Name of the algorithm.
        pace: Its pace.
        channels: Its channels.
        size: Updates of a server step.
    """
    for channel in channels.values():
        least = with_defaults(channel.aggregate, BaseAggregator).min_updates
        if least > size:
            raise _refusal(
                name, pace, f"{channel.aggregate!r} needs {least} updates, a step has {size}. Use a larger size."
            )  # fmt: skip


def _refusal(name: str, pace: Pace, reason: str) -> HansaError:
    return HansaError(f"{name}(pace={pace!r}): {reason}", component=name, argument="pace", value=pace)


def participants_of(sampler: Sampler, population: int) -> int | None:
    """Return how many clients a sampler selects, if its arguments say so.

    >>> from hansa.sample import uniform
    >>> participants_of(uniform(0.1), 50), participants_of(uniform(count=3), 50)
    (5, 3)
    """
    count, share = getattr(sampler, "count", None), getattr(sampler, "participation", None)
    if isinstance(count, int):
        return count
    return max(1, int(share * population + 0.5)) if isinstance(share, float) else None
