"""Worker processes that stay between runs: one start serves a comparison, several seeds, a sweep, a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

from hansa.core.errors import check_integer
from hansa.engine.processes import Processes

_current: ContextVar[workers | None] = ContextVar("hansa.workers", default=None)


class workers:
    """Runs within ``with hansa.workers(2):`` share two worker processes, which are started once and end with the block.

    A run that says no number of workers of its own takes this one; without a number it takes workers when that pays,
    as elsewhere. Results never depend on it. Between two runs workers forget the last one's data and give its memory
    back. `hansa.compare`, several seeds and sweeps keep their workers by themselves.

    >>> with workers(2) as staff:
    ...     staff.count, here() is staff
    (2, True)
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None:
            check_integer("workers", "count", count, "None uses all cores when that pays.")
        self.count = count
        self._crew: Processes | None = None
        self._lent = False
        self._tokens: list[Token[workers | None]] = []

    @property
    def started(self) -> int:
        """How many processes there are."""
        return 0 if self._crew is None else len(self._crew.members)

    def borrow(self) -> Processes | None:
        """The processes, for one run at a time; None while another has them."""
        if self._lent:
            return None
        if self._crew is None:
            self._crew = Processes()
        self._lent = True
        return self._crew

    def give_back(self, crew: Processes) -> None:
        """A run has ended."""
        if crew is self._crew:
            self._lent = False

    def close(self) -> None:
        """End the processes."""
        if self._crew is not None:
            self._crew.close()
        self._crew, self._lent = None, False

    def __enter__(self) -> workers:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())
        if not self._tokens:
            self.close()


def here() -> workers | None:
    """Those of the innermost ``with`` around."""
    return _current.get()


@contextmanager
def keep_workers() -> Iterator[workers]:
    """Those of the ``with`` around, or else some that end with this one."""
    staff = here()
    if staff is not None:
        yield staff
        return
    with workers() as staff:
        yield staff
