"""Clients evaluated one by one: against torch by hand, with their own models, and never to the run's harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import hansa
from hansa import Key, presets
from hansa.config import from_yaml
from hansa.runs.client_columns import ClientColumns
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder
from hansa.training.trainer import batch_stream
from runs.people import Moody, Net, gini, owned_task

pytestmark = pytest.mark.usefixtures("shared_workers")

TUNED = {"steps": 3, "lr": 0.2, "batch_size": 4}


def method(**words: object) -> hansa.Algorithm:
    return presets.fedavg(**{"local_lr": 0.1, "steps": 3, "batch_size": 4, "participation": 0.5, **words})


def by_hand(task: hansa.Task, model: torch.nn.Module, client: int) -> tuple[float, float]:
    rows = task.data.test_owners == client  # type: ignore[attr-defined]
    with torch.no_grad():
        output, target = model.eval()(task.data.test_inputs[rows]), task.data.test_targets[rows]
    return float(cross_entropy(output, target)), float((output.argmax(1) == target).double().mean())


def tuned_by_hand(run: hansa.Run, task: hansa.Task, client: int, round: int) -> torch.nn.Module:
    model = run.model.train()
    own = task.data.rows(client)
    key = Key(0).child("personalise", round, client).child("batch")
    order = batch_stream(len(own), TUNED["steps"] * 4, key).reshape(3, 4)
    for batch in order:
        rows = own[torch.from_numpy(batch)]
        loss = cross_entropy(model(task.data.inputs[rows]), task.data.targets[rows])
        for value, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            value.data.sub_(slope, alpha=TUNED["lr"])
    return model


def check_marks(task: hansa.Task, run: hansa.Run, round: int, clients: list[int], rel: float) -> ClientColumns:
    found = run.clients().at_round(round)
    for client in clients:
        row = int(np.flatnonzero(found["client"] == client)[0])
        names = [f"{kind}_{name}" for kind in ("test", "personal") for name in ("loss", "accuracy")]
        marks = [found[name][row] for name in names]
        tuned = tuned_by_hand(run, task, client, round)
        assert marks == pytest.approx([*by_hand(task, run.model, client), *by_hand(task, tuned, client)], rel=rel)
    return found


def test_marks_are_those_of_the_model_on_each_clients_rows() -> None:
    task = owned_task(7, metrics={"gini": hansa.higher(gini)})
    run = hansa.run(method(), task, rounds=4, evaluate_every=2, personalise=TUNED)
    found = check_marks(task, run, 4, [0, 1, 2, 3, 4, 5], 1e-5)
    tested = ~np.isnan(found["test_loss"])
    assert found["client"][tested].tolist() == [0, 1, 2, 3, 4, 5]
    for row in np.flatnonzero(tested):
        own = task.data.test_owners == int(found["client"][row])  # type: ignore[attr-defined]
        targets = task.data.test_targets[own]
        if {0} == set(targets.tolist()) or 0 not in targets.tolist():
            assert np.isnan(found["test_gini"][row])
        else:
            with torch.no_grad():
                expected = gini(run.model.eval()(task.data.test_inputs[own]), targets)
            assert found["test_gini"][row] == pytest.approx(expected)
    assert not np.allclose(found["test_loss"][tested], found["personal_loss"][tested])


def test_the_history_has_mean_deviation_and_worst_tenth() -> None:
    run = hansa.run(method(), owned_task(13), rounds=5, evaluate_every=0, per_client=2, personalise=TUNED)
    assert ["client_accuracy" in record for record in run.history] == [False, True, False, True, True]
    last, marks = run.history[-1], run.clients().at_round(5)
    accuracy, loss = marks["test_accuracy"][:12].astype(float), marks["personal_loss"][:12].astype(float)
    assert last["client_accuracy"] == pytest.approx(accuracy.mean())
    assert last["client_accuracy_std"] == pytest.approx(accuracy.std())
    assert last["client_accuracy_worst"] == pytest.approx(np.sort(accuracy)[:2].mean())  # 12 clients: two of them
    assert last["personal_loss_worst"] == pytest.approx(np.sort(loss)[-2:].mean())
    assert hansa.runs.metrics.best(run.history, "client_loss_worst") == min(
        record["client_loss_worst"] for record in run.history if "client_loss_worst" in record
    )


METHODS = [
    method(),
    method().with_local(private_blocks=hansa.local.blocks("head*", "norm*")),
    presets.dsgd(local_lr=0.1, steps=2, batch_size=4),
    presets.cafga(clusters=2, steps=3, batch_size=4, local_lr=0.05),
]


def test_it_never_changes_the_run_and_is_the_same_for_any_workers() -> None:
    with hansa.workers(2):
        for made in METHODS:
            check_harmless(made)


def check_harmless(made: hansa.Algorithm) -> None:
    plain = hansa.run(made, owned_task(8, Moody), rounds=3, per_client=False, workers=1)
    runs = [hansa.run(made, owned_task(8, Moody), rounds=3, personalise=TUNED, workers=n) for n in (1, 2)]
    for run in runs:
        assert all(torch.equal(run.state.vectors[name], value) for name, value in plain.state.vectors.items())
        assert run.store.digest() == plain.store.digest()
        assert [record["train_loss"] for record in run.history] == [record["train_loss"] for record in plain.history]
    one, two = (run.clients() for run in runs)
    assert all(np.array_equal(one[name], two[name], equal_nan=one[name].dtype.kind == "f") for name in one)
    assert "personal_accuracy" in one
    assert "test_loss" not in plain.clients()


@pytest.mark.parametrize("private", [True, False])
def test_a_client_is_tested_with_its_own_head_or_model(private: bool) -> None:
    task, heads = owned_task(6), hansa.local.blocks("head*")
    of_own = presets.dsgd(local_lr=0.2, steps=2, batch_size=4)
    made = method(participation=1.0).with_local(private_blocks=heads) if private else of_own
    run = hansa.run(made, task, rounds=3)
    marks = run.clients().at_round(3)
    for client in range(5):
        loss = by_hand(task, run.client_model(client), client)[0]
        assert marks["test_loss"][client] == pytest.approx(loss, rel=1e-5)
        own = run.store.read(client)["local/private" if private else "local/row"]
        held = torch.nn.utils.parameters_to_vector(run.client_model(client).parameters())
        assert torch.equal(held[-len(own) :] if private else held, own)


def test_a_resumed_run_has_the_same_marks(tmp_path: Path) -> None:
    words = {"personalise": TUNED, "per_client": 2}
    whole = hansa.run(method(), owned_task(7, Moody), rounds=6, out=tmp_path / "whole", **words)
    hansa.run(method(), owned_task(7, Moody), rounds=4, out=tmp_path / "cut", checkpoint_every=3, **words)
    hansa.resume(tmp_path / "cut", method(), owned_task(7, Moody), rounds=6, **words)
    assert whole.clients()["personal_loss"].size
    columns = [RunFolder(tmp_path / name).clients() for name in ("cut", "whole")]
    assert repr(dict(columns[0])) == repr(dict(columns[1]))


def test_a_native_model_gives_the_marks_of_eager_torch() -> None:
    held = hansa.data.with_test_clients(hansa.data.federate("fashion-mini", clients=20), "labels")
    task = hansa.Task(lambda: hansa.models.build("logistic", classes=10, shape=(1, 28, 28)), cross_entropy, held)
    run = hansa.run(presets.fedavg(steps=2, batch_size=8, local_lr=0.05), task, rounds=1, personalise=TUNED)
    check_marks(task, run, 1, [0, 7, 19], 1e-4)


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    text = """
    rounds: 4
    workers: 1
    data: {name: fashion-mini, clients: 12, test_clients: 0.2}
    model: logistic
    local: {steps: 2, batch_size: 8}
    sample: {count: 3}
    evaluate: {every: 2, per_client: true, personalise: {steps: 2, lr: 0.05, batch_size: all}}
    """
    open_run(from_yaml(text), tmp_path / "x").execute()
    found = RunFolder(tmp_path / "x")
    assert {"client_accuracy_worst", "personal_accuracy_std"} <= set(found.metrics[-1])
    assert found.clients().at_round(4)["personal_accuracy"].shape == (12,)
    assert np.isnan(found.clients().at_round(3)["test_loss"]).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"per_client": True}, r"test rows have no owners.*test_clients=OWNERS"),
        ({"per_client": False, "personalise": TUNED}, "per_client=True beside it"),
        ({"per_client": 0}, "per_client=0"),
        ({"personalise": {"step": 3}}, "steps, lr and batch_size"),
        ({"personalise": 5}, "personalise=5"),
        ({"personalise": {"steps": 0}}, "steps=0"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, object], message: str) -> None:
    x, y = np.zeros((8, 5), np.float32), np.arange(8) % 3
    task = hansa.Task(Net, cross_entropy, hansa.data.from_arrays(x, y, clients=2, test=(x, y)))
    with pytest.raises(hansa.HansaError, match=message):
        hansa.run(method(), task, rounds=1, **words)


# --- the model of one client -----------------------------------------------------------------------------------------

COMMON = {"local_lr": 0.1, "steps": 3, "batch_size": 6}
WITH_MODELS = {
    "private": hansa.presets.fedavg(**COMMON).with_local(private_blocks=hansa.local.blocks("head*", "norm*")),
    "dsgd": hansa.presets.dsgd(topology=hansa.gossip.ring(), **COMMON),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WITH_MODELS)
def test_a_clients_model_is_the_same_from_memory_and_from_the_folder(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    task = owned_task(4, Moody)
    method = WITH_MODELS[name]
    run = hansa.run(method, task, rounds=3, workers=1, dtype=dtype)
    hansa.run(method, task, rounds=3, workers=1, dtype=dtype, out=tmp_path / "x")
    server = run.model.state_dict()
    for client in (0, 3):
        mine = run.client_model(client).state_dict()
        loaded = hansa.load_model(tmp_path / "x", client=client, algorithm=method, task=task).module.state_dict()
        assert all(torch.equal(mine[key], loaded[key]) and mine[key].dtype == loaded[key].dtype for key in mine)
        assert mine["head.weight"].dtype == dtype
        rows = run.store.read(client)
        if name == "dsgd":
            flat = torch.cat([mine[entry.name].flatten() for entry in task.layout.parameters])
            assert torch.equal(flat.sort().values, rows["local/row"][: task.layout.dim].sort().values)
        else:
            assert torch.equal(mine["inner.weight"], server["inner.weight"])
            assert not torch.equal(mine["head.weight"], server["head.weight"])
            assert rows["local/private"].numel() == 6 * 3 + 3 + 12
            assert not torch.equal(mine["norm.running_mean"], server["norm.running_mean"])
    ours, theirs = (run.client_model(client).state_dict() for client in (0, 3))
    assert not torch.equal(ours["head.weight"], theirs["head.weight"])


def test_what_there_is_not_is_told(tmp_path: Path) -> None:
    task = owned_task(4)
    hansa.run(hansa.presets.fedavg(**COMMON), task, rounds=1, workers=1, out=tmp_path / "x")
    again = {"algorithm": hansa.presets.fedavg(**COMMON), "task": task}
    with pytest.raises(hansa.HansaError, match="clients have no models of their own"):
        hansa.load_model(tmp_path / "x", client=1, **again)
    with pytest.raises(hansa.HansaError, match=r"client=4\): expected a client's number, from 0 to 3"):
        hansa.load_model(tmp_path / "x", client=4, **again)
    with pytest.raises(hansa.HansaError, match="started in Python: load_model"):
        hansa.load_model(tmp_path / "x", client=1)
