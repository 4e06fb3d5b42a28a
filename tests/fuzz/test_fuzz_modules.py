"""The short form of the fuzzing of modules; ``make fuzz`` runs the long one."""

from __future__ import annotations

import pytest

from fuzz.fuzz_modules import DRAWS, HABITS, NORMS, WRAPS, check

pytestmark = pytest.mark.usefixtures("shared_workers")


def test_modules_of_other_people_train_as_in_a_plain_loop() -> None:
    plans = [check(1, number, workers=False) for number in range(40)]
    assert {wrap for plan in plans for wrap in plan.wraps} == set(WRAPS)
    assert {plan.norm for plan in plans} == set(NORMS)
    assert {habit for plan in plans for habit in plan.habits} == set(HABITS)
    assert {(plan.tied, plan.lazy) for plan in plans} == {(tied, lazy) for tied in (0, 1) for lazy in (0, 1)}
    assert sum(not set(plan.habits) & set(DRAWS) for plan in plans) > 10


@pytest.mark.parametrize("number", range(6))
def test_two_workers_equal_one_for_modules_of_other_people(number: int) -> None:
    check(2, number)
