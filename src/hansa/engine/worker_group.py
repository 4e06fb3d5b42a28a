"""Jobs, and what workers say about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from hansa.core.errors import HansaError
from hansa.core.types import Vector
from hansa.engine.requests import EvaluationRequest, Recall, RecallExam, Request


class NotShareable(HansaError):
    """A method or task that the asked-for kind of worker cannot take; the run goes on without."""


class StartError(HansaError):
    """Workers that never came to work."""


@dataclass(slots=True, eq=False)
class Job:
    """One request, where its answer is awaited, and how many workers died of it. ``block`` says before which others it
    must be begun."""

    request: Request
    cost: float
    home: deque[Job]
    recall: Recall | RecallExam | None = None
    block: int = 0
    deaths: int = 0
    answer: Any = field(default=None, repr=False)

    def recalled(self) -> Request:
        """The request with what clients remember, for whoever does it now; it is not kept here."""
        if self.recall is None or isinstance(self.request, EvaluationRequest):
            return self.request
        return self.recall(self.request)  # type: ignore[arg-type]


class Member(Protocol):
    """A worker: its jobs, the oldest first, are under way or next."""

    jobs: deque[Job]

    @property
    def ready(self) -> bool: ...


class Ready(NamedTuple):
    """A worker has come to work."""

    worker: Any


class Answered(NamedTuple):
    """A worker's job is done: the oldest that it was given, unless another is named."""

    worker: Any
    answer: Any
    job: Job | None = None


class Gone(NamedTuple):
    """A worker is no more; ``unable`` says that it could not begin, with its traceback as the cause, ``blameless`` that
    its work had no part in it."""

    worker: Any
    cause: str
    unable: bool = False
    blameless: bool = False


Event: TypeAlias = Ready | Answered | Gone


class Crew(Protocol):
    """The workers of a pool, processes or threads; each may be given ``ahead`` jobs at a time."""

    members: list[Any]
    ahead: int

    def hire(self) -> None: ...

    def dismiss(self, worker: Any) -> None: ...

    def publish(self, kind: type, vectors: Iterable[Vector]) -> None: ...

    def give(self, worker: Any, job: Job) -> None: ...

    def wait(self, timeout: float | None = None) -> list[Event]:
        """What has happened since, as soon as something has; who waits may be put to work meanwhile."""
        ...

    def close(self) -> None: ...
