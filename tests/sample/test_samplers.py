from __future__ import annotations

import numpy as np
import pytest

from hansa import HansaError, Key, sample
from hansa.core.types import Population

TEN = Population((1,) * 10)


@pytest.mark.parametrize(
    "sampler",
    [
        sample.uniform(0.3), sample.uniform(count=3), sample.weighted(participation=0.3),
        sample.weighted(tuple(range(10)), count=3), sample.explore(0.3),
    ],
    ids=repr,
)  # fmt: skip
def test_seeds_and_rounds_differ(sampler):
    draws = {tuple(sampler.select(r, TEN, Key(s)) for r in range(6)) for s in range(4)}
    assert len(draws) == 4


def test_uniform_is_uniform():
    counts = np.zeros(10)
    for round in range(3000):
        counts[list(sample.uniform(0.3).select(round, TEN, Key(0)))] += 1
    # each count is hypergeometric with mean 900 and standard deviation about 25
    assert np.abs(counts - 900).max() < 110


@pytest.mark.parametrize(("fraction", "size"), [(0.1, 1), (0.25, 3), (0.01, 1), (1.0, 10), (0.34, 3)])
def test_a_fraction_becomes_the_nearest_number_and_at_least_one(fraction, size):
    assert len(sample.uniform(fraction).select(0, TEN, Key(0))) == size


def test_weighted_follows_its_weights_and_never_takes_a_zero():
    sampler, counts = sample.weighted((0.0, 1.0, 3.0), count=1), np.zeros(3)
    for round in range(2000):
        counts[list(sampler.select(round, Population((1, 1, 1)), Key(0)))] += 1
    assert counts[0] == 0
    assert abs(counts[2] / 2000 - 0.75) < 0.05


def test_explore_visits_everybody_before_anybody_again():
    sampler = sample.explore(0.3)
    for lap in range(3):
        visited = [c for turn in range(4) for c in sampler.select(4 * lap + turn, TEN, Key(0))]
        assert sorted(visited) == list(range(10))


def test_explore_then_uniform_is_uniform_after_the_first_lap():
    sampler, plain = sample.explore(0.5, then="uniform"), sample.uniform(count=5)
    assert [sampler.select(r, TEN, Key(0)) for r in range(2, 6)] == [plain.select(r, TEN, Key(0)) for r in range(2, 6)]


def test_availability_takes_only_those_who_are_there_and_cycles():
    sampler = sample.availability([[0, 1, 2, 3], [7]], count=2)
    assert set(sampler.select(2, TEN, Key(0))) <= {0, 1, 2, 3}
    assert sampler.select(3, TEN, Key(0)) == (7,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sample.uniform(1.5), r"uniform\(participation=1.5\): expected 0 < participation <= 1"),
        (lambda: sample.uniform(0.0), "participation=0.0"),
        (lambda: sample.uniform(), "expected one of the two"),
        (lambda: sample.uniform(0.1, 3), "expected one of the two"),
        (lambda: sample.uniform(count=0), "count=0"),
        (lambda: sample.uniform(count=11).check(10), "count=11.*<= 10"),
        (lambda: sample.weighted((1.0, -1.0), count=1), r"weights\[1\]=-1.0"),
        (lambda: sample.weighted((1.0, 0.0), count=2).check(2), "only 1 have a weight above 0"),
        (lambda: sample.weighted((1.0,), count=1).check(2), "1 numbers for 2 clients"),
        (lambda: sample.weighted("size", count=1), "weights='size'"),
        (lambda: sample.explore(0.1, then="later"), "then='later'"),
        (lambda: sample.replay([]), "at least one round"),
        (lambda: sample.replay([[1], []]), "at least one client"),
        (lambda: sample.replay([[1, 1]]), "twice in round 0"),
        (lambda: sample.replay([[1], [12]]).check(10), "round 1 names client 12, the population has clients 0 to 9"),
        (lambda: sample.replay([[-1]]).check(10), "names client -1"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(HansaError, match=message):
        make()


def test_a_share_of_clients_is_the_decimal_that_was_written():
    hundred = Population((1,) * 100)  # 0.145 * 100 is 14.499999999999998
    for share, count in ((0.29, 29), (0.145, 15), (0.144, 14), (1 / 3, 33)):
        assert len(sample.uniform(share).select(0, hundred, Key(0))) == count
    groups = (tuple(range(100)),)
    assert len(sample.per_cluster(0.145).bind(groups).select(0, hundred, Key(0))) == 15


@pytest.mark.parametrize("reporters", [2, 0.5])
def test_reporters_of_each_cluster_are_numpys_draws_with_its_own_address(reporters):
    """Half of three and half of four clients are two."""
    clusters, ten = ((4, 0, 9), (1, 2, 3, 8), (7, 5, 6)), Population((1,) * 10)
    for round in range(20):
        expected = []
        for cluster in clusters:
            draw = Key(3).child("sample", round, "cluster", min(cluster)).numpy()
            expected += [cluster[i] for i in draw.choice(len(cluster), 2, replace=False, shuffle=False)]
        assert sample.per_cluster(reporters, clusters).select(round, ten, Key(3)) == tuple(sorted(expected))


def test_a_random_number_of_participants():
    sampler = sample.varying(2, 4)
    population = Population((1,) * 10)
    rounds = [sampler.select(number, population, Key(1)) for number in range(3000)]
    sizes = [len(clients) for clients in rounds]
    assert {size: sizes.count(size) for size in (2, 3, 4)} == pytest.approx(dict.fromkeys((2, 3, 4), 1000), rel=0.1)
    taken = [sum(client in clients for clients in rounds) for client in range(10)]
    assert taken == pytest.approx([900] * 10, rel=0.12)  # E[n]/N = 0.3
    with pytest.raises(HansaError, match="<= 3"):
        sampler.check(3)
    with pytest.raises(HansaError, match="high"):
        sample.varying(4, 2)
