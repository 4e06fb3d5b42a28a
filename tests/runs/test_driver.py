from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch

import hansa
from contracts.small import NAMES, bowls, small
from hansa import presets
from hansa.core.protocols import citations
from hansa.runs.driver import Run, RunOptions, RunOptionsDict
from hansa.study.api import compare, resume, run, search


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_are_bit_identical_and_others_are_not(name):
    runs = [hansa.run(small(name), bowls(), rounds=6, seed=s).params for s in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    draws_nothing = name in ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad", "ha_fed")
    assert torch.equal(runs[0], runs[2]) is draws_nothing


def test_evaluation_is_as_often_as_asked_and_always_at_the_end():
    run = hansa.run(presets.fedavg(steps=1), bowls(), rounds=7, evaluate_every=3)
    assert ["loss" in record for record in run.history] == [False, False, True, False, False, True, True]


def test_the_best_model_is_kept_in_memory_in_the_folder_and_across_a_resume(tmp_path):
    draw = torch.Generator().manual_seed(0)
    inputs, owners = torch.randn(30, 4, generator=draw), [0] * 4 + [1] * 15 + [2] * 11
    rows = hansa.data.from_arrays(
        inputs, inputs @ torch.ones(4, 1), clients=owners, test=(inputs, inputs.sum(1)[:, None])
    )
    task, make = hansa.Task(lambda: torch.nn.Linear(4, 1), torch.nn.functional.mse_loss, rows), torch.nn.Linear
    rate = hansa.local.piecewise((0.1, 0.1, 0.1, 0.9, 0.9, 0.9))
    method = presets.fedavg(local_lr=rate, steps=2, batch_size=4, participation=1.0)
    whole = hansa.run(method, task, rounds=6, keep_params=True, keep_best="test_loss")
    losses = [record["test_loss"] for record in whole.history]
    kept = losses.index(min(losses))
    assert 1 < kept < 5
    folder = tmp_path / "run"
    hansa.run(method, task, rounds=6, keep_best="test_loss", out=folder, checkpoint_every=1,
              callbacks=[lambda run, record: run.state.round == kept + 2])  # fmt: skip
    parts = hansa.run(method, task, rounds=6, keep_best="test_loss", out=folder)
    for model in (whole.model, parts.model, hansa.load_model(folder, model=lambda: make(4, 1)).module):
        found = torch.cat([parameter.flatten() for parameter in model.parameters()])
        assert torch.equal(found, whole.trajectory[kept])
    assert torch.equal(parts.params, whole.params)
    with pytest.raises(hansa.HansaError, match=r"no metric 'test_los'\. Did you mean test_loss"):
        hansa.run(method, task, rounds=1, keep_best="test_los")


def test_cite_names_exactly_the_parts_in_use(capsys):
    assert citations(presets.fedavg()) == ["mcmahan2017"]
    assert set(citations(presets.scaffold())) == {"karimireddy2020", "mcmahan2017"}
    assert set(citations(presets.fedams())) == {"wang2022", "mcmahan2017"}
    assert citations(presets.fednova()) == ["wang2020"]
    assert set(citations(presets.feddyn())) == {"acar2021", "mcmahan2017"}
    text = hansa.cite(presets.fedprox(steps=hansa.local.hybrid_plus()))
    assert capsys.readouterr().out.strip() == text
    assert text.count("@") == 3
    assert all(key in text for key in ("li2020", "zeng2024", "mcmahan2017"))


def test_fedaware_explores_everybody_once_and_only_then_looks_for_the_shortest_combination():
    algorithm = presets.fedaware(explore=True, participation=0.2, steps=2)
    assert algorithm.sampler == hansa.sample.explore(0.2, then="uniform")
    run = hansa.run(algorithm, bowls(10), rounds=8, seed=3)
    assert sorted(client for record in run.history[:5] for client in record["clients"]) == list(range(10))
    assert ["density" in record for record in run.history] == [False] * 4 + [True] * 4
    given = presets.fedaware(explore=True, sampler=hansa.sample.uniform(0.5), steps=2)
    assert given.sampler == hansa.sample.uniform(0.5)


def test_a_run_whose_every_update_was_refused_says_why_and_does_not_succeed():
    said = r"every update of all 3 rounds was refused, so the model never changed \(norm; client \d+ in round 3: "
    with pytest.raises(hansa.HansaError, match=said):
        hansa.run(presets.fedavg(steps=1, participation=0.5), bowls(), rounds=3, max_norm=1e-12)
    gone = hansa.run(presets.fedavg(steps=1), bowls(), rounds=2, faults=hansa.faults(before=1.0))
    assert gone.history[-1]["participants"] == 0  # nobody was refused: they were told to vanish


TASK = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
OPTIONS = [field.name for field in fields(RunOptions)]


def documented(function):
    text = inspect.getdoc(function).split("Args:\n")[1].split("\n\n")[0]
    return re.findall(r"^    (\w+): ", text, re.M)


def test_run_declares_and_documents_every_argument_and_every_option():
    declared = {name: getattr(hint, "__forward_arg__", hint) for name, hint in RunOptionsDict.__annotations__.items()}
    assert declared == {field.name: field.type for field in fields(RunOptions)}
    signature = [name for name in inspect.signature(run).parameters if name != "options"]
    assert documented(run) == [*signature, *OPTIONS]


@pytest.mark.parametrize("function", [compare, search, resume])
def test_the_other_functions_document_their_arguments(function):
    assert documented(function) == list(inspect.signature(function).parameters)


def test_single_options_replace_those_given_together():
    options = RunOptions(quorum=2, evaluate_every=0)
    both = Run(hansa.presets.fedavg(), TASK, options=options, quorum=3)
    assert (both.options.quorum, both.options.evaluate_every) == (3, 0)
    assert options.changed() == {"quorum": 2, "evaluate_every": 0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"quorum": 0}, r"run\(quorum=0\)"),
        ({"max_norm": -1.0}, r"run\(max_norm=-1.0\)"),
        ({"evaluate_every": -1}, r"run\(evaluate_every=-1\)"),
        ({"dtype": torch.int64}, r"run\(dtype=torch.int64\)"),
        ({"personalise": 3}, r"run\(personalise=3\)"),
        ({"personalise": {"step": 3}}, "steps, lr and batch_size"),
    ],
)
def test_a_wrong_option_is_refused_everywhere(wrong, message):
    with pytest.raises(hansa.HansaError, match=message):
        RunOptions(**wrong)
    with pytest.raises(hansa.HansaError, match=message):
        hansa.run(hansa.presets.fedavg(), TASK, rounds=1, **wrong)
