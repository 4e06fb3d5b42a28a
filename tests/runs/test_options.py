"""The options of a run: one declaration for the functions, the class, the configuration and the documentation."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch

import hansa
from hansa.runs.driver import Run, RunOptions, RunOptionsDict
from hansa.study.api import compare, resume, run, search

TASK = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
NAMES = [field.name for field in fields(RunOptions)]


def documented(function):
    text = inspect.getdoc(function).split("Args:\n")[1].split("\n\n")[0]
    return re.findall(r"^    (\w+): ", text, re.M)


def test_run_declares_and_documents_every_argument_and_every_option():
    declared = {name: getattr(hint, "__forward_arg__", hint) for name, hint in RunOptionsDict.__annotations__.items()}
    assert declared == {field.name: field.type for field in fields(RunOptions)}
    signature = [name for name in inspect.signature(run).parameters if name != "options"]
    assert documented(run) == [*signature, *NAMES]


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
