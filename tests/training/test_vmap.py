"""Clients trained together in one program: equal to one after the other, whoever is beside them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import local, presets, server
from hansa.core.errors import HansaError
from hansa.engine.pool import Pool
from hansa.engine.processes import ProcessGroup
from hansa.local.trainer import ClientJobs, LocalStep, train_by_steps
from hansa.local.work import Work
from hansa.training.execution_mode import with_vmap
from training import batched_models
from training.batched_models import Net, Regressor, Words, task

WORK: dict[str, Any] = {"local_lr": 0.1, "steps": 3, "batch_size": 8}
CPU = torch.device("cpu")
BOTH = ("vmap", "eager")


def run(method: Any, model: hansa.Task, rounds: int = 2, **options: Any) -> Any:
    options = {"workers": 1, "dtype": torch.float64, "evaluate_every": 0, "progress": False, **options}
    return hansa.run(method, model, rounds=rounds, **options)


METHODS = {
    "fedavg": lambda: presets.fedavg(**WORK),
    "fedavg, epochs": lambda: presets.fedavg(local_lr=0.1, epochs=2, batch_size=8, participation=0.8),
    "fedprox": lambda: presets.fedprox(mu=0.3, **WORK),
    "scaffold": lambda: presets.scaffold(**WORK),
    "feddyn": lambda: presets.feddyn(**WORK),
    "fedams": lambda: presets.fedams(**WORK),
    "fedcams": lambda: presets.fedcams(**WORK),
    "fednova": lambda: presets.fednova(**WORK, local_momentum=0.8),
    "decay and clip": lambda: presets.fedavg(**WORK, weight_decay=0.05).with_local(max_grad_norm=0.3),
    "all terms": lambda: presets.fedprox(mu=0.2, **WORK).with_local(momentum=0.7, weight_decay=0.05, max_grad_norm=0.5),
    "prox and decay": lambda: presets.fedprox(mu=0.2, **WORK, weight_decay=0.05),
    "kept momentum": lambda: presets.fedavg(**WORK).with_local(momentum=0.9, optimizer_state="kept"),
    "local adam": lambda: presets.fedavg(**WORK).with_local(optimizer=server.adam(), optimizer_state="kept"),
    "decoupled": lambda: presets.fedavg(**WORK).with_local(momentum=0.5, weight_decay=0.1, decoupled_weight_decay=True),
    "frozen": lambda: presets.fedavg(**WORK).with_local(frozen_blocks=local.blocks("head*"), max_grad_norm=0.3),
    "short batches": lambda: presets.fedavg(**WORK).with_local(batches="short"),
    "continued": lambda: presets.fedavg(**WORK).with_local(batches="continued"),
    "fedbuff": lambda: presets.fedbuff(size=4, **WORK),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_give_the_results_of_one_client_after_the_other(name):
    together, alone = (run(METHODS[name](), task(execution=each)) for each in BOTH)
    assert (together.params - alone.params).abs().max() < 1e-12
    assert (together.params - alone.task.start(alone.key, torch.float64)["model"]).abs().max() > 1e-3
    assert together.history[-1]["train_loss"] == pytest.approx(alone.history[-1]["train_loss"], abs=1e-12)


@pytest.mark.parametrize(("model", "kind"), [(Net, "classes"), (Regressor, "numbers"), (Words, "words")])
def test_models_give_the_results_of_one_client_after_the_other(model, kind):
    together, alone = (run(METHODS["scaffold"](), task(model, kind, execution=each)) for each in BOTH)
    assert (together.params - alone.params).abs().max() < 1e-12


def test_rows_with_weights_and_several_inputs_are_trained_together():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.net(torch.cat([left, right], dim=1))  # type: ignore[no-any-return]

    rows = batched_models.data()
    x, weights = rows.inputs, torch.linspace(0.5, 2, len(rows.targets), dtype=torch.float64)
    owners = torch.empty(len(x), dtype=torch.int64)
    for client in range(rows.population):
        owners[rows.rows(client)] = client
    inputs = {"left": x[:, :2], "right": x[:, 2:]}
    both = hansa.data.from_arrays(inputs, rows.targets, clients=owners, weights=weights, dtype=torch.float64)
    results = [run(METHODS["fedavg"](), hansa.Task(Both, cross_entropy, both, execution=b)) for b in BOTH]
    assert (results[0].params - results[1].params).abs().max() < 1e-12


def test_augmented_images_are_trained_together():
    draw = hansa.Key(1).numpy()
    owners = torch.arange(60) % 7
    images = hansa.data.from_arrays(
        draw.standard_normal((60, 1, 6, 6)), draw.integers(0, 3, 60), clients=owners.numpy()
    )

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3))

    def result(execution: str) -> Any:
        augment = [hansa.augment.crop(1), hansa.augment.flip()]
        work = presets.fedavg(local_lr=0.1, steps=3, batch_size=4)
        task = hansa.Task(convolution, cross_entropy, images, augment=augment, execution=execution)  # type: ignore
        return run(work, task)

    assert (result("vmap").params - result("eager").params).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "terms", [{}, {"momentum": 0.9}, {"prox_weight": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.2}]
)
def test_a_client_has_the_same_bits_whoever_is_beside_it(dtype, terms):
    model = with_vmap(task(), presets.fedavg(**WORK), dtype, CPU)
    trainer = model.trainer(dtype, CPU)
    x = model.start(hansa.Key(0), dtype)["model"]
    shift = torch.linspace(-0.1, 0.1, len(x), dtype=dtype)

    def jobs(*clients: int) -> ClientJobs:
        own = [LocalStep(0.1, x, shift=shift * client if terms else None, **terms) for client in clients]
        works = [Work(steps[client], 8) for client in clients]
        return ClientJobs(clients, works, [x] * len(clients), own, hansa.Key(2).child("local"))

    def deltas(*clients: int) -> dict[int, torch.Tensor]:
        results = trainer.train_clients(jobs(*clients))  # type: ignore[attr-defined]  # an optional fast path
        return dict(zip(clients, results.changes, strict=True))

    steps = {client: 2 + client % 4 for client in range(1, 12)}
    everyone, backwards = deltas(*steps), deltas(*reversed(steps))
    pairs = {**deltas(3, 8), **deltas(5)}
    for others in (backwards, pairs):
        for client, delta in others.items():
            assert torch.equal(delta, everyone[client])
    alone = train_by_steps(trainer, jobs(4)).changes[0]
    assert (alone - everyone[4]).abs().max() < (1e-6 if dtype == torch.float32 else 1e-14)


def test_results_do_not_depend_on_workers_threads_or_bytes():
    methods = {"scaffold": Net, "local adam": Net, "fedcams": Net}

    def result(name: str, engine: Any) -> Any:
        return hansa.Run(METHODS[name](), task(methods[name]), engine=engine, evaluate_every=0).advance(2).params

    serial = {name: result(name, hansa.engine.Serial) for name in methods}
    with closing(ProcessGroup()) as group:
        for name, workers in (("scaffold", 2), ("scaffold", 3), ("local adam", 3), ("fedcams", 2)):
            found = result(name, lambda *arguments, w=workers: Pool(*arguments, workers=w, group=group))
            assert torch.equal(serial[name], found)
    assert torch.equal(serial["local adam"], result("local adam", lambda *each: Pool(*each, workers=2, kind="thread")))
    assert torch.equal(serial["scaffold"], result("scaffold", hansa.engine.Loopback))


def test_a_resumed_run_has_the_bits_of_one_without_a_break(tmp_path):
    method = METHODS["kept momentum"]()
    whole = run(method, task(), rounds=4)
    run(method, task(), rounds=2, out=tmp_path / "run")
    assert torch.equal(whole.params, run(method, task(), rounds=4, out=tmp_path / "run").params)
    with pytest.raises(HansaError, match="changed since the run was started: model"):
        run(method, task(execution="eager"), rounds=5, out=tmp_path / "run")


REFUSED: dict[str, Any] = {
    "BatchNorm": (batched_models.Normed, METHODS["fedavg"]),
    "draws random numbers": (batched_models.Noisy, METHODS["fedavg"]),
    "torch.func.vmap does not support it": (batched_models.Dropping, METHODS["fedavg"]),
    "data-dependent control flow": (batched_models.Branching, METHODS["fedavg"]),
    "two gradients a step": (Net, lambda: presets.fedavg(**WORK).with_local(solver=local.sam(0.05))),
    "gossip between the steps": (Net, lambda: presets.dsgd(**WORK)),
    "keep blocks": (Net, lambda: presets.fedavg(**WORK).with_local(private_blocks=local.blocks("head*"))),
    "an embedding has padding_idx": (lambda: Words(padding_idx=0), METHODS["fedavg"]),
    "an embedding has max_norm": (lambda: Words(max_norm=1.0), METHODS["fedavg"]),
    "an embedding has sparse": (lambda: Words(sparse=True), METHODS["fedavg"]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_trained_together_is_refused_with_the_reason(reason):
    model, method = REFUSED[reason]
    kind = "words" if "embedding" in reason else "classes"
    with pytest.raises(HansaError, match=rf"execution='vmap'.*{reason}.*Omit execution"):
        with_vmap(task(model, kind), method(), torch.float64, CPU)


def test_without_the_word_clients_are_trained_one_after_the_other():
    made = task(execution="auto", sizes=(24,) * 40)
    assert with_vmap(made, METHODS["fedavg"](), torch.float32, CPU) is made
    with pytest.raises(HansaError, match=r"execution='fast'.*vmap"):
        task(execution="fast")


def test_a_client_that_fails_is_named_and_does_not_change_the_others():
    model = task(batched_models.Fragile, spoil=4)
    with pytest.raises(HansaError, match=r"round 0, client 4, step [012]: ValueError: a row is out of range"):
        run(METHODS["fedavg"](), model)
    planned = with_vmap(model, METHODS["fedavg"](), torch.float64, CPU)
    trainer = planned.trainer(torch.float64, CPU)
    x = planned.start(hansa.Key(0), torch.float64)["model"]
    train = trainer.train_clients  # type: ignore[attr-defined]  # an optional fast path

    def jobs(*clients: int) -> ClientJobs:
        count = len(clients)
        return ClientJobs(clients, [Work(2, 8)] * count, [x] * count, [LocalStep(0.1, x)] * count, hansa.Key(0))

    expected = train(jobs(1, 2, 3)).changes
    with pytest.raises(ValueError, match="out of range"):
        train(jobs(1, 2, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(expected, train(jobs(1, 2, 3)).changes, strict=True))


def test_a_client_that_overflows_drops_out_alone():
    together, alone = (run(METHODS["fedavg"](), task(batched_models.Far, spoil=4, execution=b)) for b in BOTH)
    assert together.history[-1]["lost"] == alone.history[-1]["lost"] == 1
    assert (together.params - alone.params).abs().max() < 1e-12
