"""Requirements of local solvers and local work."""

from __future__ import annotations

import torch

from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import MODEL
from hansa.local import Correction, LocalWork, Solver, SolverResult, Work
from hansa.local.solvers import BaseSolver
from hansa.local.work import BaseLocalWork
from hansa.testing.requirements import DTYPES, all_finite_tree, call_twice, check_component_contract, require, vector


def check_solver(component: Solver, dim: int = 23) -> None:
    """Check a local solver: it reports on its declared channels, keeps its declared rows, and a is its prox_weight.

    >>> from hansa.local import prox
    >>> check_solver(prox(0.1))
    """
    check_component_contract(component, Solver)
    channels, memory = with_defaults(component, BaseSolver).channels, with_defaults(component, BaseSolver).memory
    receives, prox_weight = (
        with_defaults(component, BaseSolver).receives,
        with_defaults(component, BaseSolver).prox_weight,
    )
    for dtype in DTYPES:
        got = {name: vector(dim, place, dtype) for place, name in enumerate((MODEL, *channels, *receives))}
        memory_rows: dict[str, torch.Tensor] = {}
        for round in range(3):
            correction = call_twice(component, "correction", component.correction, [got, memory_rows])
            require(
                isinstance(correction, Correction), component, "correction returns no Correction(prox_weight, shift)"
            )
            require(
                correction.prox_weight == prox_weight,
                component,
                f"its correction has prox_weight {correction.prox_weight}, but it declares {prox_weight}",
            )
            if correction.shift is not None:
                _check_form(component, "s of correction", correction.shift, dim, dtype)
            change = vector(dim, 10 + round, dtype)
            finished = call_twice(component, "finish", component.finish, [change, 3 + round, 0.05, got, memory_rows])
            require(isinstance(finished, SolverResult), component, "finish returns no SolverResult(reports, memory)")
            reports = set(finished.reports)
            require(reports == set(channels), component, f"reports on {sorted(reports)}, declares {sorted(channels)}")
            kept_rows = set(finished.memory)
            require(
                kept_rows == set(memory), component, f"keeps the rows {sorted(kept_rows)}, declares {sorted(memory)}"
            )
            for name, row in {**finished.reports, **finished.memory}.items():
                _check_form(component, f"{name} of finish", row, dim, dtype)
            memory_rows = dict(finished.memory)
        offset_of = with_defaults(component, BaseSolver).ascent_offset
        if offset_of is not None:
            gradients = [vector(4, 1, dtype), vector(6, 2, dtype).reshape(2, 3)]
            offset = call_twice(component, "ascent_offset", offset_of, [gradients])
            shapes = [tuple(e.shape) for e in offset]
            require(
                shapes == [(4,), (2, 3)], component, f"ascent_offset returns {shapes} for gradients of [(4,), (2, 3)]"
            )


def _check_form(component: Solver, place: str, row: torch.Tensor, dim: int, dtype: torch.dtype) -> None:
    form = (row.dtype, tuple(row.shape))
    require(form == (dtype, (dim,)), component, f"{place} is {form[0]} {form[1]} for {dtype} ({dim},)")
    require(all_finite_tree(row), component, f"{place} has NaN or infinity")


def check_work(component: LocalWork, population: int = 5) -> None:
    """Check local work: integer steps and a batch no larger than the client's data, as a function of its arguments.

    >>> from hansa.local import fixed
    >>> check_work(fixed(3))
    """
    check_component_contract(component, LocalWork)
    with_defaults(component, BaseLocalWork).check(population)
    common = with_defaults(component, BaseLocalWork).common
    for client in range(population):
        for samples in (1, 13, 200):
            for batch_size in (None, 1, 20):
                work = call_twice(
                    component, "draw", component.draw, [client, samples, batch_size, Key(3).child(client)]
                )
                require(isinstance(work, Work), component, f"draw gives a {type(work).__name__}, expected Work(...)")
                steps, batch = work
                require(type(steps) is int and steps >= 1, component, f"draw gives {steps!r} steps")
                fills = type(batch) is int and 1 <= batch <= samples
                require(fills, component, f"draw gives a batch of {batch!r} to a client with {samples} samples")
                require(common in (None, steps), component, f"draw gives {steps} steps, but common = {common} for all")
