"""Whether a client's result depends on who trained before it: found by training once on a used and once on a fresh
shell, and comparing the bits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.local.descent import LocalStep, descend
from hansa.local.solvers import Correction
from hansa.local.work import Work
from hansa.training import random_state

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleShell

log = logging.getLogger("hansa")

_STEPS, _ROWS, _LR = 1, 4, 0.01


def warn_of_memory(task: Task, used: ModuleShell, fresh: ModuleShell) -> None:
    """Train client B after client A on one shell and at once on another; say by name what differs.

    Both start from the same vectors with the same key, so they must agree to the last bit. Where they do not, results
    depend on the number of workers and on resumes, and a warning says so.
    """
    samples = task.population.samples
    first, second = 0, len(samples) - 1
    vectors = task.start(Key(0), used.dtype)
    try:
        with random_state.kept():
            _train(used, first, samples[first], vectors)
            after = _train(used, second, samples[second], vectors)
            alone = _train(fresh, second, samples[second], vectors)
    except Exception as problem:  # what is wrong with the model, its first round tells better
        log.debug("%s: not compared on two shells: %s", task.name, problem)
        return
    if all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(after, alone, strict=True)):
        return
    moved = [(entry.name, entry.view(after[0]), entry.view(alone[0])) for entry in task.layout.parameters]
    wrong = [name for name, a, b in moved if not torch.equal(a, b)]
    where = ", ".join(used.private.strange[:5]) or "something outside the module"
    log.warning(
        "%s: a client's result depends on who trained before it (its %s differ): the model remembers or draws what "
        "cannot be put back, perhaps in %s. Results will depend on the number of workers and on resumes. Keep such "
        "state in buffers, and draw from torch's, NumPy's or Python's generators.",
        task.name,
        ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "") if wrong else "losses or buffers",
        where,
    )


@torch.no_grad()
def _train(shell: ModuleShell, client: int, samples: int, vectors: Vectors) -> tuple[torch.Tensor, ...]:
    x, buffers = vectors[MODEL], vectors.get(BUFFERS)
    shell.load(x, buffers)
    descent = LocalStep(_LR, x, Correction())
    losses = descend(shell, client, Work(_STEPS, min(_ROWS, samples)), descent, Key(0).child("purity", client))
    now = shell.read_buffers()
    return (shell.y.clone(), losses) if now is None else (shell.y.clone(), losses, now.clone())
