from __future__ import annotations

import collections

import pytest

from hansa import HansaError, Key, algorithm, local, presets, training
from mistakes import refused


def test_epochs_count_passes_rounded_down_but_never_to_nothing():
    assert local.epochs(3).draw(0, 50, 20, Key(0)) == (7, 20)
    assert local.epochs(0.1).draw(0, 50, 20, Key(0)) == (1, 20)
    assert local.epochs(2).draw(0, 5, 20, Key(0)) == (2, 5)
    assert local.epochs(2).draw(0, 50, None, Key(0)) == (2, 50)
    assert local.epochs(0.3).draw(0, 10, 1, Key(0)) == (3, 1)


class jittered(local.fixed):
    """A component that a user derived from a built-in one."""

    def draw(self, client, samples, batch_size, key):
        return super().draw(client, samples, batch_size, key)._replace(steps=1 + client % 3)


@pytest.mark.parametrize(
    "steps",
    [local.fixed(3), local.fixed(tuple(range(1, 11))), local.epochs(1.5), local.random_steps(1, 9), jittered(3)],
    ids=["fixed", "fixed by client", "epochs", "random", "user's own"],
)
@pytest.mark.parametrize("batches", ["full", "short"])
def test_the_works_of_many_clients_are_those_of_each(steps, batches):
    phase = algorithm.LocalPhase(lr=0.1, steps=steps, batch_size=4, batches=batches)
    samples, clients, key = [3, 9, 4, 7, 9, 30, 1, 2, 9, 5], [1, 2, 4, 5, 8, 9], Key(0).child("work", 7)
    works = phase.draw_works(clients, samples, key)
    assert works == tuple(phase.draw_work(client, samples[client], key.child(client)) for client in clients)
    assert len({id(work) for work in works}) == len(set(works))


def test_hybrid_plus_draws_epochs_and_batch_as_published():
    seen = collections.Counter()
    for r in range(500):
        steps, batch = local.hybrid_plus(epochs=(2, 5), min_batch=10).draw(0, 37, None, Key(r))
        assert 10 <= batch <= 37
        options = {max(1, (e * 37) // batch) for e in (2, 3, 4, 5)}
        assert steps in options
        seen[batch] += 1
    assert set(seen) == set(range(10, 38))
    assert local.hybrid_plus(min_batch=10).draw(0, 4, None, Key(0)).batch_size == 4  # all of them


test_wrong_arguments_are_named = refused(
    (lambda: local.fixed(0), r"fixed\(steps=0\)"),
    (lambda: local.fixed([1, 0]), r"fixed\(steps=0\)"),
    (lambda: local.fixed(2.5), "steps=2.5"),
    (lambda: local.epochs(0), "epochs=0"),
    (lambda: local.random_steps(3, 2), "high=2"),
    (lambda: local.hybrid_plus(epochs=(5, 2)), r"epochs=\(5, 2\)"),
    (lambda: local.hybrid_plus(min_batch=0), "min_batch=0"),
    (lambda: local.drawn(epochs=0), "epochs=0"),
    (lambda: local.drawn(epochs=1, batch=-2), "batch=-2"),
    (lambda: local.between(5, 2), "high=2"),
    (lambda: local.one_of([]), "at least one number"),
    (lambda: local.one_of([1, 2], [0.5, 0.6]), "sum to 1"),
    (lambda: local.lognormal(0.0), "median=0.0"),
    (lambda: local.deadline(0.0), "seconds=0.0"),
    (lambda: local.prox(-1.0), r"prox\(mu=-1.0\)"),
    (lambda: local.dyn(0.0), r"dyn\(alpha=0.0\)"),
    (lambda: local.step_decay(0.1, every=0), "every=0"),
    (lambda: local.cosine(0.1, rounds=5, floor=0.2), "floor=0.2"),
    (lambda: local.piecewise([]), "at least one number"),
    (lambda: local.warmup(-0.1, rounds=3), "lr=-0.1"),
)


def test_steps_for_the_wrong_number_of_clients_are_refused():
    import torch

    import hansa

    task = training.quadratic(torch.ones(3, 2, 2), torch.ones(3, 2))
    with pytest.raises(HansaError, match="2 numbers for 3 clients"):
        hansa.run(presets.fedavg(steps=local.fixed([1, 2])), task, rounds=1)


def test_effective_steps_is_the_weight_of_the_gradients_under_momentum_and_pull():
    # constant gradient 1: y - x = -lr * effective
    for momentum, pull in [(0.0, 0.0), (0.9, 0.0), (0.0, 0.7), (0.5, 0.7)]:
        y, v = 0.0, 0.0
        for _ in range(5):
            v = momentum * v + 1.0 + pull * y
            y = y - 0.1 * v
        assert local.effective_steps(5, 0.1, momentum, pull) == pytest.approx(-y / 0.1)


def test_drawn_work_follows_its_distributions():
    part = local.drawn(epochs=local.one_of([1, 3]), batch=local.between(5, 7))
    seen = {part.draw(0, 30, None, Key(r)) for r in range(200)}
    assert seen == {(max(1, e * 30 // b), b) for e in (1, 3) for b in (5, 6, 7)}


def test_a_device_keeps_its_speed_and_is_stopped_by_the_deadline_or_its_epochs():
    slow = local.deadline(3.0, speed=local.lognormal(4.0, 1.0))
    steps = {client: {slow.draw(client, 1000, 10, Key(r)).steps for r in range(5)} for client in range(30)}
    assert all(len(own) == 1 for own in steps.values())
    assert len({min(own) for own in steps.values()}) > 10
    assert local.deadline(100.0, speed=5.0, epochs=2).draw(0, 50, 10, Key(0)).steps == 10
    assert local.deadline(0.01, speed=5.0).draw(0, 50, 10, Key(0)).steps == 1
    jittered = local.deadline(10.0, speed=10.0, jitter=0.3)
    assert len({jittered.draw(0, 5000, 10, Key(r)).steps for r in range(20)}) > 5


def test_chances_are_followed():
    part = local.one_of([1.0, 2.0], chances=[0.25, 0.75])
    draws = [part.draw(Key(r).numpy(), 1) for r in range(2000)]
    assert abs(draws.count(2.0) / 2000 - 0.75) < 0.04
