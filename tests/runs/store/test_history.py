"""A store on disk against a dict: commits, crashes, rollbacks and reopenings in any order."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hansa.core.keys import Key
from hansa.runs.store import DiskStore, index, io
from torture.disks import Dead, Hasty, PowerCut

Model = dict[int, dict[str, torch.Tensor]]
ROWS = st.dictionaries(
    st.integers(0, 4),
    st.dictionaries(st.sampled_from(["a", "b", "server/m"]), st.integers(0, 99), max_size=3),
    max_size=4,
)


def value(name: str, number: int) -> torch.Tensor:
    size = {"a": 3, "b": 200, "server/m": 700}[name]
    return torch.from_numpy(Key(number).child(name).numpy().normal(size=size)).float()


class History(RuleBasedStateMachine):
    """``past[g]`` is what the store held at generation g, ``said[g]`` what was kept when g was written."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.past: list[Model] = [{}]
        self.said: list[set[int]] = [set()]
        self.kept: set[int] = set()
        self.open()

    def open(self, at_round: int | None = None) -> None:
        with io.use_disk(Hasty()):
            self.store = DiskStore(self.folder, at_round=at_round)

    def after(self, rows: Model) -> Model:
        new = copy.copy(self.past[-1])
        for client, named in rows.items():
            if named:
                new[client] = {**new.get(client, {}), **named}
        return new

    def wrote(self, rows: Model) -> None:
        self.past.append(self.after(rows))
        self.said.append(set(self.kept))

    @rule(numbers=ROWS)
    def commit(self, numbers: dict[int, dict[str, int]]) -> None:
        rows = {client: {name: value(name, n) for name, n in named.items()} for client, named in numbers.items()}
        with io.use_disk(Hasty()):
            self.store.commit(len(self.past) - 1, rows)
        self.wrote(rows)

    @rule(numbers=ROWS, at=st.integers(0, 25), seed=st.integers(0, 1000))
    def lose_power(self, numbers: dict[int, dict[str, int]], at: int, seed: int) -> None:
        rows = {client: {name: value(name, n) for name, n in named.items()} for client, named in numbers.items()}
        disk = PowerCut(at, Key(seed).numpy())
        finished = True
        with io.use_disk(disk):
            try:
                self.store.commit(len(self.past) - 1, rows)
            except Dead:
                finished = False
        self.store.close()
        disk.cut()
        self.open()
        if finished or self.store.generation == len(self.past):
            self.wrote(rows)
        self.kept = set(self.said[-1])

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        self.kept = data.draw(st.sets(st.sampled_from(sorted(self.kept | {len(self.past) - 1}))))
        self.store.retain(self.kept)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        self.kept = set(self.said[-1])

    @precondition(lambda self: any(g < len(self.past) - 1 for g in self.said[-1]))
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        goal = data.draw(st.sampled_from(sorted(g for g in self.said[-1] if g < len(self.past) - 1)))
        self.store.close()
        self.open(at_round=goal)
        self.kept = {g for g in self.said[-1] if g <= goal}
        del self.past[goal + 1 :], self.said[goal + 1 :]
        self.said[goal] = set(self.kept)

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        now = self.past[-1]
        assert self.store.generation == len(self.past) - 1
        assert self.store.clients() == sorted(now)
        assert set(self.store.retained) == self.kept
        for client in range(5):
            mine = {name: row for name, row in now.get(client, {}).items() if not name.startswith("server/")}
            found = self.store.read(client)
            assert found.keys() == mine.keys()
            assert all(torch.equal(found[name], mine[name]) for name in mine)
            if "server/m" in now.get(client, {}):
                assert torch.equal(self.store.read_many([client], "server/m")[0], now[client]["server/m"])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


def test_a_store_is_a_dict_with_a_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LOG", 2)
    chosen = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(History, settings=chosen)
