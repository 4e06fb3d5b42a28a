"""Activities: which clients compute a gradient at a local step. The others still gossip."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import ClassVar, Protocol, runtime_checkable

from hansa.core.bounds import Checked, bound, round_share, share_or_count
from hansa.core.errors import HansaError, check_fraction, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.native.random_draws import draws_without_replacement
from hansa.core.protocols import check_component, missing_methods, with_defaults

QUARTER = "0.25 takes a quarter; for a count give a whole number."


@runtime_checkable
class Activity(Protocol):
    """A rule for which clients compute, as a function of (round, step, cohort, key).

    >>> isinstance(everyone(), Activity)
    True
    """

    __slots__ = ()

    @abstractmethod
    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Return the computing clients of one cohort at one step, in ascending order."""


class BaseActivity(Checked, Activity):
    """The optional traits of activities, with their defaults.

    >>> everyone().among([1, 2])
    everyone()
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()

    def check(self, cohorts: Sequence[Sequence[int]], steps: int | None = None) -> None:
        """Raise if the rule does not support these clusters or this number of local steps."""
        return

    def among(self, reporters: Sequence[int]) -> Activity:
        """Return the rule for a round with these reporters."""
        return self

    def draw_steps(self, round: int, steps: Sequence[int], clients: Sequence[int], key: Key) -> list[list[int]]:
        """Return `draw` of each of the steps; a rule may draw them together."""
        return [self.draw(round, step, clients, key) for step in steps]


require_activity = partial(
    check_component, protocol=Activity, noun="a rule for who computes", example="everyone() is one."
)


def count_of(component: str, argument: str, value: float, clients: int) -> int:
    """Return the number of clients meant by a count (int) or a fraction (float) of a group.

    >>> count_of("resample", "m", 2, 8), count_of("resample", "m", 0.25, 10)
    (2, 3)
    """
    if isinstance(value, float):
        share_or_count(component, argument, value, QUARTER)
        return max(1, round_share(value, clients))
    check_integer(component, argument, value, "A cluster has no more clients.", maximum=clients)
    return value


def as_activity(active: float | Activity) -> Activity:
    """Convert to an activity: a count m means ``resample(m)``, a probability p ``bernoulli(p)``, 1.0 ``everyone()``.

    Args:
        active: A number, a probability, or an activity.

    >>> as_activity(2), as_activity(0.5), as_activity(1.0)
    (resample(m=2), bernoulli(p=0.5), everyone())
    """
    if isinstance(active, int) and not isinstance(active, bool):
        return resample(active)
    if isinstance(active, float):
        return everyone() if active == 1 else bernoulli(active)
    if isinstance(active, bool | type) or missing_methods(active, Activity):
        raise invalid_argument("gossip", "active", active, "a count, a probability or an activity such as resample(2)")
    return active


@dataclass(frozen=True, slots=True)
class everyone(BaseActivity):
    """All clients of the cohort at every step ([HAFED] Alg. 1 and 2).

    >>> everyone()
    everyone()
    """

    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Return the cohort."""
        return sorted(clients)


@dataclass(frozen=True, slots=True)
class selected(BaseActivity):
    """The round's reporters, at every step: AFGA without re-sampling.

    Args:
        reporters: The round's reporters; set by the round.

    >>> selected().among([5, 6]).draw(0, 0, [4, 5, 6, 7], Key(0))
    [5, 6]
    """

    reporters: tuple[int, ...] | None = field(default=None, repr=False)

    def among(self, reporters: Sequence[int]) -> selected:
        """Return the rule with these reporters."""
        return selected(tuple(reporters))

    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Return the reporters in the cohort, or the whole cohort if the reporters are not set."""
        return sorted(clients if self.reporters is None else set(self.reporters).intersection(clients))


@dataclass(frozen=True, slots=True)
class resample(BaseActivity):
    """m clients of the cohort, drawn anew at every step ([AFGA] Alg. 1 and 2).

    Args:
        m: Clients per cohort: a number, a fraction, or None for as many as report.

    >>> len(resample(2).draw(0, 0, [4, 5, 6, 7], Key(0)))
    2
    >>> resample().among([4, 5, 7])
    resample(m=3)
    """

    m: int | float | None = field(default=None, metadata=bound(share_or_count, QUARTER))
    cites: ClassVar[tuple[str, ...]] = ("afga2024",)

    def among(self, reporters: Sequence[int]) -> resample:
        """Return the rule with the number of reporters."""
        return resample(len(reporters)) if self.m is None else self

    def check(self, cohorts: Sequence[Sequence[int]], steps: int | None = None) -> None:
        """Raise if a cluster is smaller than m."""
        if self.m is not None:
            count_of("resample", "m", self.m, min(map(len, cohorts)))

    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Draw m of the cohort without replacement, or all of it if dropouts leave fewer."""
        return self._draw(round, [step], clients, key)[0]

    def draw_steps(self, round: int, steps: Sequence[int], clients: Sequence[int], key: Key) -> list[list[int]]:
        """Draw for each of the steps, in one native call."""
        if type(self).draw is not resample.draw:  # of a subclass
            return BaseActivity.draw_steps(self, round, steps, clients, key)
        return self._draw(round, steps, clients, key)

    def _draw(self, round: int, steps: Sequence[int], clients: Sequence[int], key: Key) -> list[list[int]]:
        cohort = sorted(clients)
        m = count_of("resample", "m", self.m, len(cohort)) if isinstance(self.m, float) else self.m
        if m is None:
            raise HansaError("resample(): the number of reporters is not set. Give m: resample(2) draws two.")
        if m >= len(cohort):
            return [cohort] * len(steps)
        keys = key.child("active", round, cohort[0]).digests(steps)
        return [sorted([cohort[i] for i in drawn]) for drawn in draws_without_replacement(keys, len(cohort), m)]


@dataclass(frozen=True, slots=True)
class available(BaseActivity):
    """Another rule among the clients that can compute in the round; the others gossip without computing.

    Args:
        trace: For each round, the clients that can compute; the rounds repeat.
        activity: The rule; by default as many as report are drawn anew at every step.

    >>> available([[4, 6], [5]], resample(2)).draw(0, 0, [4, 5, 6, 7], Key(0))
    [4, 6]
    """

    trace: Sequence[Sequence[int]]
    activity: Activity = field(default_factory=resample, metadata=bound(require_activity))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        try:
            rounds = tuple(tuple(sorted({index(client) for client in clients})) for clients in self.trace)
        except TypeError:
            rounds = ()
        if not rounds:
            raise invalid_argument("available", "trace", self.trace, "for each round, a list of client ids")
        object.__setattr__(self, "trace", rounds)

    def among(self, reporters: Sequence[int]) -> available:
        """Return the rule for a round with these reporters."""
        return available(self.trace, with_defaults(self.activity, BaseActivity).among(reporters))

    def check(self, cohorts: Sequence[Sequence[int]], steps: int | None = None) -> None:
        """Raise if a listed client is in no cluster."""
        for number, clients in enumerate(self.trace):
            _check_members(f"available: round {number}", clients, cohorts)
        with_defaults(self.activity, BaseActivity).check(cohorts, steps)

    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Draw among the clients of the cohort that can compute."""
        candidates = set(self.trace[round % len(self.trace)]).intersection(clients)
        return self.activity.draw(round, step, sorted(candidates), key) if candidates else []


@dataclass(frozen=True, slots=True)
class bernoulli(BaseActivity):
    """Each client independently with probability p; at some steps none computes ([HAFED] App. F.3).

    Args:
        p: Probability with which a client computes.

    >>> bernoulli(0.5).p
    0.5
    """

    p: float = field(metadata=bound(check_fraction))
    cites: ClassVar[tuple[str, ...]] = ("hafed2023",)

    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Draw independently for each client of the cohort."""
        cohort = sorted(clients)
        if not cohort:
            return []
        coins = key.child("active", round, cohort[0], step).numpy().random(len(cohort))
        return [client for client, coin in zip(cohort, coins.tolist(), strict=True) if coin < self.p]


@dataclass(frozen=True, slots=True)
class replay(BaseActivity):
    """Recorded computing clients per round and step, over all clusters; the rounds repeat.

    Args:
        rounds: For each round, for each step, the computing clients.

    >>> replay([[[0, 5], [1, 4]]]).draw(7, 1, [4, 5, 6, 7], Key(0))
    [4]
    """

    rounds: Sequence[Sequence[Sequence[int]]]

    def __post_init__(self) -> None:
        try:
            rounds = tuple(tuple(tuple(sorted(map(index, step))) for step in steps) for steps in self.rounds)
        except TypeError:
            rounds = ()
        once = all(len(set(step)) == len(step) for steps in rounds for step in steps)
        if not rounds or not all(rounds) or not once:
            expected = "for each round, for each step, a list of different client ids"
            raise invalid_argument("replay", "rounds", self.rounds, expected)
        object.__setattr__(self, "rounds", rounds)

    def check(self, cohorts: Sequence[Sequence[int]], steps: int | None = None) -> None:
        """Raise if a listed client is in no cluster, or a round has too few steps."""
        for number, round_steps in enumerate(self.rounds):
            if steps is not None and len(round_steps) < steps:
                raise HansaError(f"replay: round {number} has {len(round_steps)} steps, not {steps} local steps.")
            for step, clients in enumerate(round_steps):
                _check_members(f"replay: round {number}, step {step}", clients, cohorts)

    def draw(self, round: int, step: int, clients: Sequence[int], key: Key) -> list[int]:
        """Return the recorded clients in the cohort."""
        number = round % len(self.rounds)
        recorded = self.rounds[number]
        if step >= len(recorded):
            raise HansaError(f"replay: round {number} has {len(recorded)} steps: no step {step} (from 0).")
        cohort = set(clients)
        return [client for client in recorded[step] if client in cohort]


def _check_members(owner: str, clients: Sequence[int], cohorts: Sequence[Sequence[int]]) -> None:
    members = {client for cohort in cohorts for client in cohort}
    if unknown := sorted(set(clients) - members):
        raise HansaError(f"{owner} names client {unknown[0]}, which is in no cluster.")
