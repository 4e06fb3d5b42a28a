"""Client loops: custom training code instead of the local steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from hansa.core.bounds import Checked
from hansa.core.errors import HansaError, naming_client
from hansa.core.keys import Key
from hansa.core.protocols import check_component, with_defaults
from hansa.core.types import Vector, Vectors

if TYPE_CHECKING:
    from hansa.local.trainer import ClientJobs, LocalResults, Trainer


class LoopResult(NamedTuple):
    """The result of a client loop.

    Args:
        loss: The training loss, for the record.
        memory: The rows that the client keeps, tensors of any shape; they replace those of the same name.
        reports: A vector as long as the model for each channel of the loop.

    >>> LoopResult(0.5).memory
    {}
    """

    loss: float
    memory: Mapping[str, Vector] = {}
    reports: Mapping[str, Vector] = {}


@runtime_checkable
class ClientLoop(Protocol):
    """Custom training code that replaces the local steps of a client."""

    __slots__ = ()

    @abstractmethod
    def train(
        self, model: torch.nn.Module, batches: Sequence[Any], lr: float, received: Vectors, memory: Vectors, key: Key
    ) -> LoopResult:
        """Train a client's model in place. The change of its parameters and buffers is the client's update.

        Args:
            model: The module as after construction, in training mode, with the parameters and buffers received, and
                the client's own private blocks.
            batches: The (inputs, targets) of each step of the round. Reading one seeds torch's, NumPy's and Python's
                generators, and the module's own, as an ordinary step does.
            lr: The local learning rate of the round.
            received: A copy of the vector of each channel.
            memory: A copy of the client's rows, as of the last round in which its update was accepted.
            key: The address of this client's draws in this round, for your own generators.
        """


class BaseClientLoop(Checked, ClientLoop):
    """The optional traits of client loops, with their defaults.

    >>> BaseClientLoop.channels, BaseClientLoop.receives
    ((), ())
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    channels: ClassVar[tuple[str, ...]] = ()
    """Channels, besides the model, that it receives and reports on."""
    receives: ClassVar[tuple[str, ...]] = ()
    """Channels that it only receives; the server makes them."""


def require_loop(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a client loop."""
    example = "A class with train(self, model, batches, lr, received, memory, key) makes one."
    check_component(owner, argument, value, ClientLoop, "a client loop", example)
    try:
        signature(value.train).bind(*range(6))  # type: ignore[attr-defined]
    except TypeError as error:
        raise HansaError(f"{owner}({argument}={type(value).__name__}): expected a client loop. {example}") from error


def train_by_loop(
    trainer: Trainer, loop: ClientLoop, jobs: ClientJobs, lr: float, got: Vectors, memory: Mapping[int, Vectors]
) -> tuple[LocalResults, list[LoopResult]]:
    """Train clients one after the other by a custom loop; ``memory`` has the rows of clients that have any."""
    from hansa.local.trainer import BaseTrainer, LocalResults

    run, channels = with_defaults(trainer, BaseTrainer).run_loop, with_defaults(loop, BaseClientLoop).channels
    results, finished = LocalResults(), []
    for index, (client, x) in enumerate(zip(jobs.clients, jobs.models, strict=True)):
        key, rows = jobs.key_of(index), jobs.batches_of(index)
        with naming_client(client):
            trainer.load(x, jobs.buffers_of(index))
            if rows is None:
                rows = trainer.batches(client, jobs.works[index], key.child("batch"))
            result = run(loop, client, rows, lr, _copies(got), _copies(memory.get(client, {})), key)
            _check_result(loop, result, channels, x)
        loss = float(torch.as_tensor(result.loss, dtype=torch.float64).detach())
        results.add_model(x, trainer.y, [loss], trainer.read_buffers(), keep_model=jobs.keep_models)
        finished.append(LoopResult(loss, _copies(result.memory), _copies(result.reports)))
    return results, finished


def _copies(rows: Mapping[str, Vector]) -> Vectors:
    return {name: row.detach().clone() for name, row in rows.items()}


def _check_result(loop: ClientLoop, result: object, channels: Sequence[str], x: torch.Tensor) -> None:
    name = f"{type(loop).__name__}.train"
    if not isinstance(result, LoopResult):
        raise HansaError(f"{name}: returned a {type(result).__name__}, expected LoopResult(loss, memory, reports).")
    if set(result.reports) != set(channels):
        raise HansaError(f"{name}: reports on {sorted(result.reports)}, but declares channels = {tuple(channels)}.")
    for row, value in (*result.memory.items(), *result.reports.items()):
        if not isinstance(value, torch.Tensor) or (row in result.reports and value.shape != x.shape):
            expected = f"a vector of {len(x)} numbers" if row in result.reports else "a tensor"
            raise HansaError(f"{name}: {row!r} is a {type(value).__name__}, expected {expected}.")
