"""Clients trained together in one program: equal to one after the other, whoever is beside them."""

from __future__ import annotations

import logging
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
from hansa.local.step import LocalStep
from hansa.local.trainer import ClientJob, train_by_steps
from hansa.local.work import Work
from hansa.training.batched_loss import draw_factors, record_dropout
from hansa.training.client_batching import NotBatchable, choose_client_batching, with_client_batching
from training import batched_models
from training.batched_models import Dropping, Net, Recurrent, Regressor, Words, task

WORK: dict[str, Any] = {"local_lr": 0.1, "steps": 3, "batch_size": 8}
CPU = torch.device("cpu")


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
    together, alone = (run(METHODS[name](), task(Dropping, together=each)) for each in (True, False))
    assert together.batches_clients
    assert not alone.batches_clients
    assert (together.params - alone.params).abs().max() < 1e-12
    assert (together.params - alone.task.start(alone.key, torch.float64)["model"]).abs().max() > 1e-3
    assert together.history[-1]["train_loss"] == pytest.approx(alone.history[-1]["train_loss"], abs=1e-12)


@pytest.mark.parametrize(
    ("model", "kind"), [(Net, "classes"), (Regressor, "numbers"), (Words, "words"), (Recurrent, "classes")]
)
def test_models_give_the_results_of_one_client_after_the_other(model, kind):
    together, alone = (run(METHODS["scaffold"](), task(model, kind, together=each)) for each in (True, False))
    assert (together.params - alone.params).abs().max() < 1e-12


def test_cells_that_torch_fuses_are_trained_together_where_that_is_faster():
    method = presets.fedavg(**WORK)
    plan = choose_client_batching(task(Recurrent, together=None), method, torch.float64, CPU)
    assert plan.composed
    assert not choose_client_batching(task(Net), method, torch.float64, CPU, required=True).composed
    one, two = (run(method, task(Recurrent, together=None), workers=workers) for workers in (1, 2))
    assert one.batches_clients
    assert torch.equal(one.params, two.params)


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
    results = [run(METHODS["fedavg"](), hansa.Task(Both, cross_entropy, both, batch_clients=b)) for b in (True, False)]
    assert results[0].batches_clients
    assert (results[0].params - results[1].params).abs().max() < 1e-12


def test_augmented_images_are_trained_together():
    draw = hansa.Key(1).numpy()
    owners = torch.arange(60) % 7
    images = hansa.data.from_arrays(
        draw.standard_normal((60, 1, 6, 6)), draw.integers(0, 3, 60), clients=owners.numpy()
    )

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3))

    def result(together: bool) -> Any:
        augment = [hansa.augment.crop(1), hansa.augment.flip()]
        work = presets.fedavg(local_lr=0.1, steps=3, batch_size=4)
        options = {"augment": augment, "native": False, "batch_clients": together}
        return run(work, hansa.Task(convolution, cross_entropy, images, **options))

    assert (result(True).params - result(False).params).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "terms", [{}, {"momentum": 0.9}, {"prox_weight": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.2}]
)
def test_a_client_has_the_same_bits_whoever_is_beside_it(dtype, terms):
    model = with_client_batching(task(Dropping), presets.fedavg(**WORK), dtype, CPU)
    trainer = model.trainer(dtype, CPU)
    x = model.start(hansa.Key(0), dtype)["model"]
    shift = torch.linspace(-0.1, 0.1, len(x), dtype=dtype)

    def job(client: int, steps: int) -> ClientJob:
        step = LocalStep(0.1, x, shift=shift * client if terms else None, **terms)
        return ClientJob(x, client, Work(steps, 8), step, hansa.Key(2).child("local", client))

    def deltas(*jobs: ClientJob) -> dict[int, torch.Tensor]:
        results = trainer.train_clients(list(jobs))  # type: ignore[attr-defined]  # an optional fast path
        return {each.client: result.delta for each, result in zip(jobs, results, strict=True)}

    steps = {client: 2 + client % 4 for client in range(1, 12)}
    everyone = deltas(*(job(client, count) for client, count in steps.items()))
    backwards = deltas(*(job(client, steps[client]) for client in reversed(steps)))
    pairs = {**deltas(job(3, steps[3]), job(8, steps[8])), **deltas(job(5, steps[5]))}
    for others in (backwards, pairs):
        for client, delta in others.items():
            assert torch.equal(delta, everyone[client])
    alone = train_by_steps(trainer, job(4, steps[4]))
    assert (alone.delta - everyone[4]).abs().max() < (1e-6 if dtype == torch.float32 else 1e-14)


def test_results_do_not_depend_on_workers_threads_or_bytes():
    methods = {"scaffold": Dropping, "local adam": Net, "fedcams": Net}

    def result(name: str, engine: Any) -> Any:
        return hansa.Run(METHODS[name](), task(methods[name]), engine=engine, evaluate_every=0).advance(2).params

    serial = {name: result(name, hansa.engine.Serial) for name in methods}
    with ProcessGroup() as group:
        for name, workers in (("scaffold", 2), ("scaffold", 3), ("local adam", 3), ("fedcams", 2)):
            found = result(name, lambda *arguments, w=workers: Pool(*arguments, workers=w, group=group))
            assert torch.equal(serial[name], found)
    assert torch.equal(serial["local adam"], result("local adam", lambda *each: Pool(*each, workers=2, kind="thread")))
    assert torch.equal(serial["scaffold"], result("scaffold", hansa.engine.Loopback))


@pytest.mark.parametrize("requested", [None, True])
def test_a_resumed_run_has_the_bits_of_one_without_a_break(requested, tmp_path, monkeypatch):
    """It follows the record of its checkpoint, also where the rule would now choose otherwise."""
    method = METHODS["kept momentum"]()
    whole = run(method, task(Dropping, together=requested), rounds=4)
    assert whole.batches_clients == (requested is True or whole.batches_clients)
    run(method, task(Dropping, together=requested), rounds=2, out=tmp_path / "run")
    gain = 0.0 if not whole.batches_clients else 1e9
    monkeypatch.setattr("hansa.training.client_batching._MIN_GAIN", gain)
    resumed = run(method, task(Dropping, together=requested), rounds=4, out=tmp_path / "run")
    assert resumed.batches_clients == whole.batches_clients
    assert torch.equal(whole.params, resumed.params)


def test_a_changed_request_is_refused_on_resume(tmp_path):
    run(METHODS["fedavg"](), task(), rounds=1, out=tmp_path / "run")
    with pytest.raises(HansaError, match="changed since the run was started: model"):
        run(METHODS["fedavg"](), task(together=False), rounds=2, out=tmp_path / "run")


def test_dropout_draws_the_numbers_of_eager_steps():
    drop, x = nn.Dropout(0.3), torch.ones(5, 7)
    (call,) = record_dropout(lambda: drop(x))
    assert call == ((5, 7), torch.float32, 0.3)
    keys = [hansa.Key(0).child(number) for number in range(3)]
    (factors,) = draw_factors([call], keys, torch.Generator(), CPU)
    for key, factor in zip(keys, factors, strict=True):
        hansa.training.random_state.seed_all(key, CPU)
        assert torch.equal(drop(x), factor)


REFUSED = {
    "BatchNorm": (batched_models.Normed, METHODS["fedavg"], {}),
    "other than dropout": (batched_models.Noisy, METHODS["fedavg"], {}),
    "data-dependent control flow": (batched_models.Branching, METHODS["fedavg"], {}),
    "two gradients a step": (Net, lambda: presets.fedavg(**WORK).with_local(solver=local.sam(0.05)), {}),
    "gossip between the steps": (Net, lambda: presets.dsgd(**WORK), {}),
    "keep blocks": (Net, lambda: presets.fedavg(**WORK).with_local(private_blocks=local.blocks("head*")), {}),
    "it is compiled": (Net, METHODS["fedavg"], {"compiled": True}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_trained_together_is_refused_with_the_reason(reason, caplog):
    model, method, options = REFUSED[reason]
    made = task(model, together=None)
    made.compile = options.get("compiled", False)
    with pytest.raises(NotBatchable, match=reason):
        choose_client_batching(made, method(), torch.float64, CPU, required=True)
    with caplog.at_level(logging.INFO, logger="hansa"):
        assert with_client_batching(made, method(), torch.float64, CPU) is made
    assert "clients are trained one after the other: " in caplog.text
    made.batch_clients = True
    with pytest.raises(HansaError, match=rf"batch_clients=True.*{reason}.*Omit batch_clients"):
        with_client_batching(made, method(), torch.float64, CPU)


def choice(sizes: tuple[int, ...], method: Any) -> Any:
    return choose_client_batching(task(together=None, sizes=sizes), method, torch.float32, CPU)


def test_the_choice_is_a_function_of_the_task_and_the_method():
    sizes = (9, 24, 14, 31, 8, 19, 12, 27, 10, 16, 22, 40) * 3
    first = choice(sizes, presets.fedavg(**WORK))
    assert first == choice(sizes, presets.fedavg(**WORK))
    assert first.models == 32
    assert first.batch_size == 8
    assert first.gain > 2
    for method, reason in (
        (presets.fedavg(**WORK, participation=0.1), "4 clients with batches of 8 take part"),
        (presets.fedavg(local_lr=0.1, steps=2, batch_size=30), "fewer than 30 samples"),
        (presets.fedavg(local_lr=0.1, steps=2, batch_size=None), "different numbers"),
        (presets.fedasync(**WORK), "1 clients with batches"),
    ):
        with pytest.raises(NotBatchable, match=reason):
            choice(sizes, method)
    full = choice((11,) * 20, presets.fedavg(local_lr=0.1, steps=2, batch_size=None))
    assert (full.batch_size, full.models, full.multiple) == (11, 24, 8)


def test_a_client_that_fails_is_named_and_does_not_change_the_others():
    model = task(batched_models.Fragile, spoil=4)
    with pytest.raises(HansaError, match=r"round 0, client 4, step [012]: ValueError: a row is out of range"):
        run(METHODS["fedavg"](), model)
    planned = with_client_batching(model, METHODS["fedavg"](), torch.float64, CPU)
    trainer = planned.trainer(torch.float64, CPU)
    x = planned.start(hansa.Key(0), torch.float64)["model"]
    jobs = [ClientJob(x, client, Work(2, 8), LocalStep(0.1, x), hansa.Key(client)) for client in (1, 2, 3)]
    train = trainer.train_clients  # type: ignore[attr-defined]  # an optional fast path
    expected = [result.delta for result in train(jobs)]
    bad = ClientJob(x, 4, Work(2, 8), LocalStep(0.1, x), hansa.Key(4))
    with pytest.raises(ValueError, match="out of range"):
        train([*jobs, bad])
    assert all(torch.equal(a, b.delta) for a, b in zip(expected, train(jobs), strict=True))


def test_a_client_that_overflows_drops_out_alone():
    together, alone = (run(METHODS["fedavg"](), task(batched_models.Far, spoil=4, together=b)) for b in (True, False))
    assert together.history[-1]["lost"] == alone.history[-1]["lost"] == 1
    assert (together.params - alone.params).abs().max() < 1e-12
