"""Runs that must be the same: every number that they hold, bit for bit, and all that they recorded but for times."""

from __future__ import annotations

import torch

from hansa.runs.driver import Run
from torture.kill import sha


def untimed(run: Run, *left_out: str) -> str:
    """A history without seconds, as text, since NaN is not NaN."""
    without = {"seconds", *left_out}
    return repr([{name: value for name, value in record.items() if name not in without} for record in run.history])


def assert_same_run(found: Run, expected: Run) -> None:
    assert sha(found.checkpoint_state()) == sha(expected.checkpoint_state())
    assert found.store.digest() == expected.store.digest()
    assert untimed(found) == untimed(expected)
    ours, theirs = found.clients(), expected.clients()
    assert list(ours) == list(theirs)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    if expected.options.keep_params:
        assert torch.equal(found.trajectory, expected.trajectory)
