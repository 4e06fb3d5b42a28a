"""What a module has beside the vectors that are sent: state that belongs to it, and weights that trainers share.

Before each client a module is as after construction, with the parameters and buffers that the client received: other
buffers, attributes, containers, plain objects and hooks are put back in place, and generators are seeded from the
client's key. A module whose results still depend on who trained before is refused (`check_repeatable`).

Frozen weights are parameters with ``requires_grad=False`` and buffers that training does not change. They keep their
dtype if that is narrow, and the trainers of a process and device share one copy: a base model in bfloat16 with a
trained float32 part (LoRA, a new head) so takes the memory that it takes in PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.object_state import GENERATOR_TYPES, ObjectState, bitwise_equal
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.local.step import LocalStep
from hansa.local.trainer import take_steps
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.probe import SHARED_BYTES

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")


class _Constant(NamedTuple):
    """A tensor that training must not change, with the dict of its module that holds it, and a copy of it; of a large
    one its version."""

    name: str
    owner: dict[str, Any]
    tensor: torch.Tensor
    version: int
    saved: torch.Tensor | None

    @property
    def changed(self) -> bool:
        """Whether the module has written to the tensor, or has another one in its place."""
        current = self.owner.get(self.name.rpartition(".")[2])
        if current is None or not (current is self.tensor or bitwise_equal(current, self.tensor)):
            return True
        return self.tensor._version != self.version if self.saved is None else not bitwise_equal(current, self.saved)


class ModuleState:
    """A snapshot of a module's state, apart from its parameters and the buffers that are ``sent``.

    Weights in ``frozen`` are replaced by the shared ones, or by those of ``like``, the state of a trainer with the same
    dtype and device. Buffers in ``constant`` were left unchanged by training.
    """

    def __init__(
        self,
        module: nn.Module,
        sent: Collection[str] = (),
        constant: Collection[str] = (),
        frozen: Mapping[str, torch.Tensor] | None = None,
        like: ModuleState | None = None,
    ) -> None:
        frozen = dict(frozen or {})
        shared = frozen if like is None else frozen | {each.name: each.tensor for each in like._constants}
        self._constants: list[_Constant] = []
        for prefix, part in module.named_modules():
            for owner in (part._parameters, part._buffers):
                for own, tensor in owner.items():
                    name = f"{prefix}.{own}" if prefix else own
                    if tensor is None or not (name in frozen or name in constant):
                        continue
                    common = shared[name].detach() if name in frozen else tensor
                    if common.dtype == tensor.dtype and common.device == tensor.device and common is not tensor:
                        if owner is part._parameters:
                            tensor.data = common
                        else:
                            owner[own] = tensor = common
                    saved = tensor.detach().clone() if tensor.nbytes < SHARED_BYTES else None
                    self._constants.append(_Constant(name, owner, tensor, tensor._version, saved))
        large = {each.name for each in self._constants if each.saved is None}
        others = [buffer for name, buffer in module.named_buffers() if name in {*sent, *large}]
        self._state = ObjectState(module, map(id, [*module.parameters(), *others]))
        own = [each for part in module.modules() for each in vars(part).values() if isinstance(each, GENERATOR_TYPES)]
        known = set(map(id, own))
        self.generators = [*own, *(each for each in self._state.generators if id(each) not in known)]
        self.unrestorable = self._state.unrestorable

    def restore(self) -> None:
        """Put back the state of the snapshot."""
        self._state.restore()

    def check(self) -> None:
        """Raise if training has changed a weight that is neither sent nor restored, but common to all clients."""
        for each in self._constants:
            if each.changed:
                raise HansaError(
                    f"{each.name} was left unchanged by the first batch, or is frozen, and was changed by a later one: "
                    "it is not averaged, and workers share it. Write to it in every training step, or register it as a "
                    "buffer with persistent=False if it belongs to the client."
                )

    def seed(self, key: Key) -> None:
        """Seed the generators that belong to the module."""
        for position, generator in enumerate(self.generators):
            random_state.seed_generator(generator, key.child("own", position))


def check_repeatable(task: Task, used: ModuleTrainer, unused: ModuleTrainer) -> None:
    """Raise if a client's result depends on which clients were trained before it.

    Client B is trained after client A on one trainer, and alone on another, from the same vectors with the same key.
    Both results must have equal bits. Otherwise results depend on the number of workers and on resumes.
    """
    samples = task.population.samples
    first, second = 0, len(samples) - 1
    vectors = task.start(Key(0), used.dtype)
    try:
        with random_state.preserve_rng():
            _train_one_step(used, first, samples[first], vectors)
            after = _train_one_step(used, second, samples[second], vectors)
            alone = _train_one_step(unused, second, samples[second], vectors)
    except Exception as error:  # the first round reports it better
        log.debug("%s: not compared on two trainers: %s", task.name, error)
        return
    if all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(after, alone, strict=True)):
        return
    parameters = [(entry.name, entry.view(after[0]), entry.view(alone[0])) for entry in task.layout.parameters]
    different = [name for name, a, b in parameters if not torch.equal(a, b)]
    shown = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "") if different else "losses or buffers"
    places = ", ".join(used.module_state.unrestorable[:5]) or "a global object"
    raise HansaError(
        f"{task.name}: a client's result depends on who trained before it (its {shown} differ): the model has state or "
        f"draws that cannot be restored, perhaps in {places}. Results would depend on the number of workers and on "
        "resumes. Keep such state in buffers or attributes of the module, and draw from torch's, NumPy's or Python's "
        "generators."
    )


@torch.no_grad()
def _train_one_step(trainer: ModuleTrainer, client: int, samples: int, vectors: Vectors) -> tuple[torch.Tensor, ...]:
    x = vectors[MODEL]
    trainer.load(x, vectors.get(BUFFERS))
    losses = take_steps(trainer, client, Work(1, min(4, samples)), LocalStep(0.01, x), Key(0).child("purity", client))
    buffers = trainer.read_buffers()
    return (trainer.y.clone(), losses) if buffers is None else (trainer.y.clone(), losses, buffers.clone())
