"""A record against a dict: rounds, checkpoints, crashes, resumes and reopenings in any order."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from hansa.core.keys import Key
from hansa.runs.record import RunRecord
from hansa.runs.store import DiskStore
from torture.disks import Dead, PowerCut, use_disk

Model = dict[int, dict[str, torch.Tensor]]
ROWS = st.dictionaries(
    st.integers(0, 4),
    st.dictionaries(st.sampled_from(["a", "b", "server/m"]), st.integers(0, 99), max_size=3),
    max_size=4,
)


def value(name: str, number: int) -> torch.Tensor:
    size = {"a": 3, "b": 20_000, "server/m": 17_000 + 1000 * (number % 4)}[name]
    return torch.from_numpy(Key(number).child(name).numpy().normal(size=size)).float()


class History(RuleBasedStateMachine):
    """``past[g]`` is what the store held at generation g; ``saved`` are the rounds with a checkpoint."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.past: list[Model] = [{}]
        self.saved: list[int] = []
        RunRecord.create(self.folder).close()
        self.open()

    def open(self) -> None:
        self.record = RunRecord(self.folder, writing=True)
        self.store = DiskStore(self.record)

    def close(self) -> None:
        self.record.close()

    def write(self, numbers: dict[int, dict[str, int]], save: bool) -> None:
        rows = {client: {name: value(name, n) for name, n in named.items()} for client, named in numbers.items()}
        round = len(self.past)
        self.store.commit(round - 1, rows)
        self.record.add_round({"round": round}, b"\0\0\0\0")
        if save:
            self.record.save_checkpoint({"x": value("b", round)}, {"round": round}, keep=3)
        self.record.commit()

    def wrote(self, numbers: dict[int, dict[str, int]], save: bool) -> None:
        new = copy.copy(self.past[-1])
        for client, named in numbers.items():
            if named:
                new[client] = {**new.get(client, {}), **{name: value(name, n) for name, n in named.items()}}
        self.past.append(new)
        self.saved = [*self.saved, len(self.past) - 1][-3:] if save else self.saved

    @rule(numbers=ROWS, save=st.booleans())
    def close_round(self, numbers: dict[int, dict[str, int]], save: bool) -> None:
        self.write(numbers, save)
        self.wrote(numbers, save)

    @rule(numbers=ROWS, save=st.booleans(), at=st.integers(0, 8), seed=st.integers(0, 1000))
    def lose_power(self, numbers: dict[int, dict[str, int]], save: bool, at: int, seed: int) -> None:
        disk = PowerCut(at, Key(seed).numpy())
        finished = True
        with use_disk(disk):
            try:
                self.write(numbers, save)
            except Dead:
                finished = False
        self.close()
        disk.cut()
        self.open()
        if finished or self.store.generation == len(self.past):
            self.wrote(numbers, save)

    @rule()
    def reopen(self) -> None:
        self.close()
        self.open()

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        if not self.saved:
            return
        goal = data.draw(st.sampled_from(self.saved))
        self.close()
        self.record = RunRecord(self.folder, writing=True)
        checkpoint = self.record.load_checkpoint(goal)
        assert torch.equal(checkpoint.state["x"], value("b", goal))
        assert [each["round"] for each in self.record.rewind(checkpoint.head)] == list(range(1, goal + 1))
        self.store = DiskStore(self.record)
        self.saved = [round for round in self.saved if round <= goal]
        del self.past[goal + 1 :]

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "record"):
            return
        now = self.past[-1]
        assert self.store.generation == len(self.past) - 1 == len(list(self.record.rounds()))
        assert self.store.clients() == sorted(now)
        assert self.record.checkpoint_rounds() == self.saved
        for client in range(5):
            mine = {name: row for name, row in now.get(client, {}).items() if not name.startswith("server/")}
            found = self.store.read(client)
            assert found.keys() == mine.keys()
            assert all(torch.equal(found[name], mine[name]) for name in mine)
            if "server/m" in now.get(client, {}):
                assert torch.equal(self.store.read_many([client], "server/m")[0], now[client]["server/m"])

    def teardown(self) -> None:
        if hasattr(self, "record"):
            self.close()
            shutil.rmtree(self.folder)


def test_a_record_is_a_dict_with_a_past() -> None:
    chosen = settings(
        max_examples=20,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(History, settings=chosen)
