from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hansa.aggregate.min_norm import min_norm
from hansa.core.keys import Key
from mistakes import refused
from oracle.minnorm import authors_weights, simplex_weights

solver: Any = importlib.import_module("hansa.aggregate.min_norm")  # the module, whose name the function hides

Matrix = NDArray[np.float64]


def shortest(vectors: Matrix) -> Matrix:
    """The shortest vector of the hull by Lawson-Hanson."""
    return np.asarray(simplex_weights(vectors) @ vectors)


def rows(case: int) -> Matrix:
    """200 cases: n in 1..300, any rank, with and without a common direction, lengths over three decades."""
    draw = Key(7).child("rows", case).numpy()
    n = int(draw.integers(1, 301)) if case % 4 else int(draw.integers(1, 30))
    rank = int(draw.integers(1, n + 1))
    vectors = draw.normal(size=(n, rank)) @ np.linalg.qr(draw.normal(size=(n, rank)))[0].T
    vectors += [0.0, 0.3, 1.0][case % 3] * draw.normal(size=n)
    if case % 5 == 0:
        vectors *= 10 ** draw.uniform(-1.5, 1.5, size=(n, 1))
    return np.asarray(vectors)


@pytest.mark.parametrize("block", range(10))
def test_point_agrees_with_nonnegative_least_squares_and_the_certificate_holds(block: int) -> None:
    for case in range(20 * block, 20 * block + 20):
        vectors = rows(case)
        gram = vectors @ vectors.T
        answer = min_norm(gram)
        weights = answer.weights.numpy()
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-13)
        point, expected = weights @ vectors, shortest(vectors)
        scale = np.sqrt(np.diag(gram).max())
        if np.linalg.norm(expected) > 1e-6 * scale:
            assert np.linalg.norm(point - expected) <= 1e-6 * np.linalg.norm(expected), case
        else:  # zero is in the hull; a Gram matrix in float64 knows a length to 1e-8 of its rows' at best
            assert np.linalg.norm(point) <= 1e-7 * scale, case
        gradient = gram @ weights
        assert answer.value == pytest.approx(weights @ gradient, rel=1e-9, abs=1e-14 * scale**2)
        assert answer.gap == pytest.approx(max(0, weights @ gradient - gradient.min()), abs=1e-13 * scale**2)
        assert answer.gap <= 1e-8 * answer.value + 1e-13 * scale**2, case


@pytest.mark.parametrize("n", [1, 2, 10, 60])
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_box_optimum_meets_the_optimality_conditions(n: int, spread: float) -> None:
    draw = Key(8).child(n, str(spread)).numpy()
    vectors = draw.normal(size=(n, 40)) + draw.normal(size=40)
    base = draw.dirichlet(np.full(n, 5.0))
    low, high = np.clip(base - spread / n, 0, 1), np.clip(base + spread / n, 0, 1)
    answer = min_norm(vectors @ vectors.T, lower=low, upper=high)
    weights = answer.weights.numpy()
    assert (weights >= low).all()
    assert (weights <= high).all()
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    gradient = vectors @ (weights @ vectors)
    # no weight that can fall may be dearer than one that can rise
    can_fall, can_rise = weights > low + 1e-12, weights < high - 1e-12
    if can_fall.any() and can_rise.any():
        assert gradient[can_fall].max() <= gradient[can_rise].min() + 1e-9 * answer.value
    assert answer.value <= base @ vectors @ vectors.T @ base * (1 + 1e-12)


def degenerate() -> dict[str, tuple[Matrix, float]]:
    draw = Key(10).numpy()
    row = draw.normal(size=12)
    spread = draw.normal(size=(9, 12))
    return {
        "one row": (row[None], float(row @ row)),
        "one zero row": (np.zeros((1, 3)), 0.0),
        "all zero": (np.zeros((7, 3)), 0.0),
        "a zero row among others": (np.vstack([spread, np.zeros(12)]), 0.0),
        "identical": (np.tile(row, (20, 1)), float(row @ row)),
        "opposite": (np.vstack([row, -3 * row]), 0.0),
        "opposite pairs": (np.vstack([spread, -spread]), 0.0),
        "one direction, many lengths": (np.outer(np.arange(2.0, 40.0), row), float(4 * row @ row)),
        "every row twice": (np.vstack([spread, spread]), float(shortest(spread) @ shortest(spread))),
        "tiny": (1e-150 * spread, 1e-300 * float(shortest(spread) @ shortest(spread))),
        "huge": (1e150 * spread, 1e300 * float(shortest(spread) @ shortest(spread))),
    }


@pytest.mark.parametrize("solver", ["exact", "authors"])
@pytest.mark.parametrize("name", degenerate())
def test_degenerate_rows(name: str, solver: Any) -> None:
    vectors, value = degenerate()[name]
    answer = min_norm(vectors @ vectors.T, solver=solver)
    scale = float((vectors**2).sum(1).max())
    assert answer.weights.sum() == pytest.approx(1)
    assert float(answer.weights.min()) >= 0
    if solver == "exact":
        assert answer.value == pytest.approx(value, rel=1e-9, abs=1e-14 * scale)
    assert answer.value <= max(value, 0) + 0.02 * scale


def test_equal_rows_get_equal_weights() -> None:
    assert torch.equal(min_norm(np.ones((4, 4))).weights, torch.full((4,), 0.25, dtype=torch.float64))


def test_answer_is_the_same_bits_again_and_on_any_number_of_threads() -> None:
    vectors = Key(11).numpy().normal(size=(300, 120))
    gram = torch.from_numpy(vectors @ vectors.T)
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(min_norm(gram))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(answers[0].weights, other.weights) for other in answers)


def test_single_precision_inner_products_are_taken_as_they_are() -> None:
    vectors = torch.from_numpy(Key(12).numpy().normal(size=(80, 30)) + 1).float()
    expected = shortest(vectors.double().numpy())
    point = min_norm(vectors @ vectors.T).weights.numpy() @ vectors.double().numpy()
    assert np.linalg.norm(point - expected) <= 1e-2 * np.linalg.norm(expected)


test_bad_input_is_refused_by_name = refused(
    ((np.ones((2, 3)), {}), "square"),
    ((np.ones(3), {}), "square"),
    ((np.ones((0, 0)), {}), "at least one row"),
    ((np.array([[1.0, 0.0], [0.0, np.nan]]), {}), "row 1 .* not finite"),
    ((np.array([[np.inf, 0.0], [0.0, 1.0]]), {}), "row 0 .* not finite"),
    ((np.array([[1.0, 0.5], [0.0, 1.0]]), {}), "not symmetric"),
    ((np.array([[-1.0, 0.0], [0.0, 1.0]]), {}), "not a Gram matrix"),
    ((np.array([[1.0, 2.0], [2.0, 1.0]]), {}), "not a Gram matrix"),
    ((np.array([[1.0, -0.9, -0.9], [-0.9, 1.0, -0.9], [-0.9, -0.9, 1.0]]), {}), "negative eigenvalue"),
    ((np.eye(2), {"lower": 0.6}), "lower sums to 1.2"),
    ((np.eye(2), {"upper": 0.4}), "upper to 0.8"),
    ((np.eye(2), {"lower": 0.5, "upper": 0.4}), "lower <= upper"),
    ((np.eye(2), {"lower": -0.1}), "0 <= lower"),
    ((np.eye(2), {"lower": np.zeros(3)}), "each of the 2 rows"),
    ((np.eye(2), {"upper": float("nan")}), "finite"),
    ((np.eye(2), {"tolerance": 0.0}), "tolerance > 0"),
    ((np.eye(3), {"solver": "authors", "upper": 0.5}), "Omit lower and upper"),
    ((np.eye(2), {"solver": "quick"}), "solver='quick'"),
    by=lambda given: min_norm(given[0], **given[1]),
)


@pytest.mark.parametrize("n", [1, 2, 3, 12, 60])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_authors_solver_is_their_loop_over_the_vectors(n: int, shift: float) -> None:
    rows = np.random.default_rng(n).standard_normal((n, 30)) + shift
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = authors_weights(rows)
    answer = min_norm(rows @ rows.T, solver="authors")
    assert answer.weights.numpy() == pytest.approx(expected, abs=1e-7)
    exact = min_norm(rows @ rows.T)
    assert answer.value >= exact.value
    assert np.sum((answer.weights.numpy() @ rows - exact.weights.numpy() @ rows) ** 2) <= answer.gap * (1 + 1e-9)
    assert answer.certificate.iterations <= 1000


def test_among_many_rows_the_few_that_matter_give_the_answer_of_all(monkeypatch) -> None:
    draw = np.random.default_rng(5)
    rows = draw.standard_normal((400, 30))
    rows[:, 0] += 4
    gram = torch.from_numpy(rows @ rows.T)
    factored = []
    interior = solver._Problem.interior_point
    monkeypatch.setattr(solver._Problem, "interior_point", lambda self: factored.append(self.size) or interior(self))
    few = min_norm(gram)
    assert max(factored, default=0) < 400  # the interior point never saw all rows
    monkeypatch.setattr(solver, "MANY", 10**9)
    all_at_once = min_norm(gram)
    assert max(factored) == 400
    for found in (few, all_at_once):
        assert found.certificate.relative_gap < 1e-10
    x, y = few.weights.numpy() @ rows, all_at_once.weights.numpy() @ rows
    assert np.allclose(x, y, atol=1e-6 * np.linalg.norm(x))
