"""Lightning modules as tasks: the bits of the plain task, their own metrics, and refusals of what cannot be kept."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hansa
from hansa.training import from_lightning

METHOD = hansa.presets.fedams(local_lr=0.1, server_lr=0.1, epochs=1, batch_size=8)
try:
    from lightning import LightningModule as Base
except ImportError:  # the adapter asks for the methods only

    class Base(nn.Module):  # type: ignore[no-redef]
        """As much of a LightningModule as is asked for."""

        automatic_optimization = True

        def log(self, name: str, value: Any) -> None:
            raise AssertionError("replaced")

        log_dict = configure_optimizers = on_train_batch_start = log  # type: ignore[assignment]

    Base.__name__ = "LightningModule"


def table() -> Any:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(140, 4, generator=draw)
    y = (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 1).long()
    owners = torch.repeat_interleave(torch.arange(3), torch.tensor([60, 30, 10]))
    return hansa.data.from_arrays(x[:100], y[:100], clients=owners, test=(x[100:], y[100:]))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.head = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.hidden(x))))


class Lit(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.head = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.hidden(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        found = output.argmax(1)
        hit = ((found == 1) & (y == 1)).sum()
        self.log_dict({"val_loss": functional.cross_entropy(output, y), "val_recall": hit / (y == 1).sum()})

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def recall(output: torch.Tensor, target: torch.Tensor) -> float:
    return float(((output.argmax(1) == 1) & (target == 1)).sum() / (target == 1).sum())


@pytest.mark.usefixtures("shared_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_it_is_the_plain_task_to_the_bit(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hansa")
    lit = hansa.run(METHOD, from_lightning(Lit, table(), execution="eager"), rounds=3, seed=2, workers=workers)
    assert "Lit: configure_optimizers is not used" in caplog.text
    task = hansa.Task(Plain, functional.cross_entropy, table(), metrics={"recall": recall}, execution="eager")
    plain = hansa.run(METHOD, task, rounds=3, seed=2)
    assert torch.equal(lit.params, plain.params)
    for name in ("test_recall", "test_accuracy"):
        assert [record[name] for record in lit.history] == [record[name] for record in plain.history]
    assert [record["test_loss"] for record in lit.history] == pytest.approx([r["test_loss"] for r in plain.history])


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Lit):
    def on_train_batch_start(self, *batch: Any) -> None:
        pass


class Penalised(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] + sum(each.square().sum() for each in self.parameters())


class Twice(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return functional.cross_entropy(self(x) + self(2 * x), y)


class Scaled(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return functional.cross_entropy(self(x / 10), y)


class Wordy(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return "done"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "manual optimization: the steps of clients are the method's"),
        (Hooked, "on_train_batch_start would not be called"),
        (Penalised, "use weight_decay of the method"),
        (Twice, r"it calls self\(...\) 2 times"),
        (Scaled, r"Move what it does to the inputs into forward\(\)"),
        (Wordy, "training_step returned 'done': expected the loss"),
        (Plain, "expected a module with training_step"),
        (Lit(), "expected the class, or lambda: Lit"),
    ],
)
def test_what_cannot_be_kept_is_refused(module: Any, message: str) -> None:
    with pytest.raises(hansa.HansaError, match=message):
        from_lightning(module, table())


class Delayed(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_delay", self(batch[0]).abs().mean())


def test_a_direction_may_have_to_be_said() -> None:
    with pytest.raises(hansa.HansaError, match="delay"):
        from_lightning(Delayed, table())
    task = from_lightning(Delayed, table(), better={"delay": "lower"})
    assert task.directions["delay"] == "lower"


def test_metrics_of_torchmetrics_are_computed_over_all_test_rows() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="not exercised: pip install 'hansa[lightning]'")

    class Measured(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.f1(self(batch[0]), batch[1])
            self.log("val_f1", self.f1)

    run = hansa.run(METHOD, from_lightning(Measured, table()), rounds=2)
    data = table()
    expected = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    model = run.model.eval()
    assert run.history[-1]["test_f1"] == pytest.approx(float(expected(model(data.test_inputs), data.test_targets)))
