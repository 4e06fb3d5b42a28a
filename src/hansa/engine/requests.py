"""What an engine asks of a worker, and how a worker, process or thread, does it."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError
from hansa.core.protocols import declared
from hansa.core.types import Vectors
from hansa.local import Trainer
from hansa.rounds import client_round, client_rounds
from hansa.rounds.messages import WorkOrder
from hansa.training import TaskLike
from hansa.training.client_evaluation import Exam, marks


@runtime_checkable
class Divisible(Protocol):
    """A task whose evaluation can be shared out: fixed pieces, whatever the number of workers, folded in their order.

    Its shells have ``evaluate(vectors, start, stop)``, which gives one part for ``total``.
    """

    def pieces(self) -> Sequence[tuple[int, int]]: ...

    def total(self, parts: Sequence[Any]) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationRequest:
    """An evaluation of vectors on one piece of the test rows, or by the task as a whole."""

    vectors: Vectors
    piece: tuple[int, int] | None = None


Request: TypeAlias = WorkOrder | EvaluationRequest | Exam
log = logging.getLogger("hansa")

BUNDLE = 32  # orders that are done together at most
_MOMENT = 0.05  # seconds that they may take, so that nobody waits for them
_CHANGES = 1 << 22  # bytes of changes that may be held meanwhile
Recall: TypeAlias = Callable[[WorkOrder], WorkOrder]
RecallExam: TypeAlias = Callable[[Exam], Exam]
_LOOPS = ("hansa.rounds", "hansa.local", "hansa.gossip")  # where `client` and `t` name the client and the step


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """An error on its way to the caller: what failed, and the traceback of where it did."""

    what: str
    trace: str

    def error(self) -> HansaError:
        error = HansaError(self.what)
        error.__cause__ = WorkerTraceback(self.trace)
        return error


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text: the cause of the error that the caller sees."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Arithmetic(NamedTuple):
    """The settings of torch that change numbers; workers take over those of the run."""

    dtype: torch.dtype
    precision: str
    mkldnn: bool
    deterministic: bool
    flush_denormal: bool

    @classmethod
    def here(cls) -> Arithmetic:
        """The settings of this thread."""
        denormal = torch.full((1,), 1e-310, dtype=torch.float64)
        return cls(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            bool(torch.backends.mkldnn.enabled),
            torch.are_deterministic_algorithms_enabled(),
            float(denormal.mul(1.0).sum()) == 0.0,
        )

    def apply(self) -> None:
        """Make them those of this process and thread."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.mkldnn.set_flags(self.mkldnn)  # type: ignore[no-untyped-call]
        torch.use_deterministic_algorithms(self.deterministic)
        self.apply_to_thread()

    def apply_to_thread(self) -> None:
        """Those that each thread has of its own, and one intra-op thread: their number changes the last bits."""
        torch.set_flush_denormal(self.flush_denormal)
        torch.set_num_threads(1)


def as_it_is(order: WorkOrder) -> WorkOrder:
    """The order with the memory it has."""
    return order


def perform(request: Request, algorithm: Algorithm, task: TaskLike, shell: Any) -> Any:
    """A report for an order, a part of an evaluation, clients' marks for an exam; an error becomes a `Failure`."""
    try:
        if isinstance(request, WorkOrder):
            return client_round(algorithm, request, shell, task.population)
        if isinstance(request, Exam):
            return marks(algorithm, task, shell, request)
        if request.piece is None:
            return task.evaluate(shell, request.vectors)
        return shell.evaluate(request.vectors, *request.piece)
    except Exception as error:
        return Failure(str(blamed(request, error)), traceback.format_exc())


def perform_all(requests: Sequence[Request], algorithm: Algorithm, task: TaskLike, shell: Any) -> list[Any]:
    """`perform` of several, orders together; where one of them fails each is done alone, so that it is told by name."""
    orders = [request for request in requests if isinstance(request, WorkOrder)]
    if len(orders) == len(requests) and (len(orders) > 1 or declared(shell, Trainer, "releases_gil")):
        try:
            return list(client_rounds(algorithm, orders, shell, task.population))
        except Exception as error:
            log.debug("%d orders one by one after %s", len(orders), error)
    return [perform(request, algorithm, task, shell) for request in requests]


class Bundle:
    """How many orders are worth being done together: few enough to take a moment, and to keep their changes at hand.
    It is one where steps are not native: there is nothing to be won, and code of the user's might mind."""

    def __init__(self, shell: Any) -> None:
        self._native: bool = declared(shell, Trainer, "releases_gil")
        self._each = math.inf

    def note(self, orders: int, seconds: float) -> None:
        """So many took so long."""
        self._each = seconds / orders

    def size(self, order: WorkOrder) -> int:
        """How many like this one."""
        if not self._native:
            return 1
        entries = sum(packet.dim for sent in order.broadcasts.values() for packet in sent.packets)
        return int(max(1, min(BUNDLE, _MOMENT / max(self._each, 1e-9), _CHANGES // max(1, 4 * entries))))


def blamed(request: Request, error: Exception) -> HansaError:
    """The error that names where another happened: round, client and step."""
    return HansaError(f"{_scene(request, error)}: {type(error).__name__}: {error}")


def describe(request: Request) -> str:
    """A request in words.

    >>> describe(EvaluationRequest({}, (0, 500)))
    'the evaluation of test rows 0 to 499'
    """
    if isinstance(request, WorkOrder):
        who = ", ".join(map(str, request.clients[:5])) + (", ..." if len(request.clients) > 5 else "")
        return f"round {request.round}, client{'s' if len(request.clients) > 1 else ''} {who}"
    if isinstance(request, Exam):
        return f"the evaluation of clients {request.clients[0]} to {request.clients[-1]}"
    if request.piece is None:
        return "the evaluation"
    return f"the evaluation of test rows {request.piece[0]} to {request.piece[1] - 1}"


def cost(request: Request) -> float:
    """Samples passed forward and backward: what work items are ordered by. A forward pass is a third."""
    if isinstance(request, WorkOrder):
        return float(request.work.steps * request.work.batch_size * len(request.clients))
    if isinstance(request, Exam):
        steps = 0 if request.tuned is None else request.tuned.steps * (request.tuned.batch_size or 32)
        return float(len(request.clients) * (10 + steps))
    return 0.0 if request.piece is None else (request.piece[1] - request.piece[0]) / 3


def _scene(request: Request, error: BaseException) -> str:
    """Where it happened: the loop's own variables tell the client and the step, at no cost to the loop."""
    if not isinstance(request, WorkOrder):
        return describe(request)
    seen: dict[str, int] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(_LOOPS):
            seen |= {name: value for name, value in frame.f_locals.items() if name in ("client", "t")}
    if "client" not in seen:
        return describe(request)
    return f"round {request.round}, client {seen['client']}" + (f", step {seen['t']}" if "t" in seen else "")
