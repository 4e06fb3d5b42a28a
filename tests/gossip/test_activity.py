"""Activity: the right number, fair, a function of the address, and replayed exactly."""

from __future__ import annotations

import numpy as np
import pytest

from hansa import gossip
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.gossip.activity import count_of

RULES = [
    gossip.everyone(),
    gossip.selected(),
    gossip.resample(2),
    gossip.resample(0.4),
    gossip.bernoulli(0.5),
    gossip.replay([[[0, 3, 7]]]),
]


@pytest.mark.parametrize(("m", "expected"), [(1, 1), (3, 3), (10, 10), (0.25, 3), (0.2, 2), (0.01, 1), (1.0, 10)])
def test_resample_takes_a_count_or_a_share(m: float, expected: int) -> None:
    assert len(gossip.resample(m).draw(0, 0, range(10), Key(0))) == expected
    assert count_of("resample", "m", m, 10) == expected


def test_resample_is_afresh_at_every_step_round_and_cluster_and_fair() -> None:
    rule, key = gossip.resample(2), Key(7)
    drawn = {(r, s): tuple(rule.draw(r, s, range(8), key)) for r in range(40) for s in range(20)}
    assert len(set(drawn.values())) == 28  # all pairs of eight occur
    counts = np.bincount([client for pair in drawn.values() for client in pair], minlength=8)
    assert np.abs(counts - 200).max() < 5 * np.sqrt(800 * 0.25 * 0.75)
    steps = [drawn[0, s] for s in range(20)]
    assert steps != [drawn[1, s] for s in range(20)]
    neighbours = [tuple(c - 8 for c in rule.draw(0, s, range(8, 16), key)) for s in range(20)]
    assert steps != neighbours
    assert steps == [tuple(rule.draw(0, s, range(8), key)) for s in range(20)]


def test_resample_uses_the_address_of_the_cohorts_first_client() -> None:
    chance = Key(5).child("active", 3, 4, 2).numpy()
    expected = sorted(4 + i for i in chance.choice(6, 2, replace=False, shuffle=False).tolist())
    assert gossip.resample(2).draw(3, 2, range(4, 10), Key(5)) == expected


def test_resample_takes_all_where_losses_left_no_more_than_m() -> None:
    assert gossip.resample(3).draw(0, 0, [4, 2], Key(0)) == [2, 4]
    assert gossip.resample(3).draw(0, 0, [], Key(0)) == []
    assert gossip.bernoulli(0.5).draw(0, 0, [], Key(0)) == []


def test_bernoulli_is_a_coin_for_each_client() -> None:
    rule = gossip.bernoulli(0.25)
    drawn = [set(rule.draw(0, step, range(6), Key(1))) for step in range(4000)]
    sigma = np.sqrt(4000 * 0.25 * 0.75)
    for i in range(6):
        assert abs(sum(i in computing for computing in drawn) - 1000) < 5 * sigma
        for j in range(i):  # independent: both with chance 1/16
            both = sum({i, j} <= computing for computing in drawn)
            assert abs(both - 250) < 5 * np.sqrt(4000 * (1 / 16) * (15 / 16))
    assert set() in drawn
    assert gossip.bernoulli(1.0).draw(0, 0, range(4), Key(0)) == [0, 1, 2, 3]


def test_replay_gives_each_cluster_its_own_and_starts_again() -> None:
    rule = gossip.replay([[[4, 0], [1, 5]], [[2], [3, 7]]])
    rule.check([[0, 1, 2, 3], [4, 5, 6, 7]], steps=2)
    assert [rule.draw(0, 0, c, Key(0)) for c in ([0, 1, 2, 3], [4, 5, 6, 7])] == [[0], [4]]
    assert [rule.draw(5, 1, c, Key(0)) for c in ([0, 1, 2, 3], [4, 5, 6, 7])] == [[3], [7]]
    assert rule.draw(1, 0, [4, 5, 6, 7], Key(0)) == []


def test_numbers_become_rules() -> None:
    assert gossip.as_activity(3) == gossip.resample(3)
    assert gossip.as_activity(0.5) == gossip.bernoulli(0.5)
    assert gossip.as_activity(1.0) == gossip.everyone()
    assert gossip.as_activity(gossip.resample(0.5)) == gossip.resample(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gossip.resample(0), r"resample\(m=0\): expected a whole number >= 1"),
        (lambda: gossip.resample(1.5), r"resample\(m=1.5\): expected 0 < m <= 1. .* for a count give a whole number"),
        (lambda: gossip.resample(True), r"resample\(m=True\)"),
        (lambda: gossip.bernoulli(0.0), r"bernoulli\(p=0.0\): expected 0 < p <= 1"),
        (lambda: gossip.bernoulli(2), r"bernoulli\(p=2\)"),
        (lambda: gossip.replay([]), r"replay\(rounds=\[\]\): expected for each round, for each step, a list"),
        (lambda: gossip.replay([[[0]], []]), "for each round"),
        (lambda: gossip.replay([[[0.5]]]), "a list of different client ids"),
        (lambda: gossip.replay([[[0], [2, 1, 2]]]), "a list of different client ids"),
        (lambda: gossip.replay([[[0], [9]]]).check([[0, 1], [2, 3]]), "step 1 names client 9, which is in no cluster"),
        (
            lambda: gossip.replay([[[0], [1]], [[0]]]).check([[0, 1]], steps=2),
            "round 1 has 1 steps",
        ),
        (lambda: gossip.replay([[[0]]]).draw(3, 1, [0], Key(0)), "round 0 has 1 steps, step 1 was asked for"),
        (lambda: gossip.resample(3).check([[0, 1, 2], [3, 4]]), r"resample\(m=3\): expected .* <= 2"),
        (lambda: gossip.as_activity("all"), r"gossip\(active='all'\): expected a count, a probability or an activity"),
        (lambda: gossip.as_activity(True), r"gossip\(active=True\)"),
        (
            lambda: count_of("ha_fed", "reporters", 9, 8),
            r"ha_fed\(reporters=9\): .* <= 8",
        ),
    ],
)
def test_bad_activity_is_refused_with_the_offending_number(make: object, message: str) -> None:
    with pytest.raises(HansaError, match=message):
        make()  # type: ignore[operator]


def test_resampling_among_those_available_never_draws_others_and_is_fair() -> None:
    rule = gossip.available([[0, 2, 4, 6], [1, 3]], gossip.resample(2))
    drawn = [rule.draw(0, step, range(8), Key(3)) for step in range(400)]
    counts = {client: sum(client in step for step in drawn) for client in range(8)}
    assert all(len(step) == 2 for step in drawn)
    assert {client for client, count in counts.items() if count} == {0, 2, 4, 6}
    assert all(abs(counts[client] - 200) < 50 for client in (0, 2, 4, 6))
    assert rule.draw(1, 0, range(8), Key(3)) == [1, 3]
    assert rule.draw(2, 0, [5, 7], Key(3)) == []
    assert rule.draw(2, 0, [4, 5, 7], Key(3)) == [4]  # after dropouts
    assert gossip.available([[0, 1, 2]]).among([5]).draw(0, 0, range(4), Key(0)) in ([0], [1], [2])


def test_traces_of_unknown_clients_and_empty_ones_are_refused() -> None:
    with pytest.raises(HansaError, match="names client 9"):
        gossip.available([[0], [9]]).check([[0, 1], [2, 3]])
    for trace in ([], [["a"]]):
        with pytest.raises(HansaError, match="trace"):
            gossip.available(trace)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_the_draws_of_several_steps_are_those_of_each(rule):
    clients = [9, 3, 7, 0, 5]
    steps = range(1) if isinstance(rule, gossip.replay) else range(2, 9)
    expected = [rule.draw(4, step, clients, Key(1)) for step in steps]
    assert rule.draw_steps(4, steps, clients, Key(1)) == expected


def test_a_subclass_that_draws_otherwise_is_asked_at_every_step():
    class first(gossip.resample):
        def draw(self, round, step, clients, key):
            return sorted(clients)[: 1 + step]

    assert first(2).draw_steps(0, range(3), [5, 4, 6], Key(0)) == [[4], [4, 5], [4, 5, 6]]
