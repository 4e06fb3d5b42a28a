"""The training loss at the mean of all local models: the global loss of Fig. 4 of the HA-Fed paper."""

from __future__ import annotations

from typing import Any

from hansa.core.errors import check_integer
from hansa.core.types import MODEL
from hansa.rounds.measures.base import Probe


class local_mean_loss:
    """f_global = f(w') at w' = mean_i w_i, where w_i is client i's model after the round's local work and f is the mean
    loss over all clients' training samples ([HAFED] F.1); recorded as ``local_mean_loss``.

    The mean is over all clients that trained, reporters or not, before any compression. It is not the server's next
    model, whose training loss is ``global_loss``. ``train_loss`` is the paper's f_local. Measured every ``every``-th
    round: ``hansa.run(..., measures=[hansa.measures.local_mean_loss(task)])``.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, measures=[local_mean_loss(task)])
    >>> round(done.history[-1]["local_mean_loss"], 4)
    0.4083
    """

    def __init__(self, task: Any, every: int = 1) -> None:
        check_integer("local_mean_loss", "every", every)
        self.every = every
        self._task = task.on_training_data() if hasattr(task, "on_training_data") else task
        self._trainer: Any = None

    def wants_mean(self, round: int) -> bool:
        """Return whether the measure needs the mean in this round."""
        return (round + 1) % self.every == 0

    def __call__(self, probe: Probe) -> dict[str, float]:
        if probe.mean is None:
            return {}
        like = probe.mean[MODEL]
        if self._trainer is None:
            self._trainer = self._task.trainer(like.dtype, like.device)
        metrics = self._task.evaluate(self._trainer, probe.mean)
        return {"local_mean_loss": metrics["test_loss"] if "test_loss" in metrics else metrics["loss"]}
