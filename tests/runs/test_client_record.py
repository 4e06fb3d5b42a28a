"""What every client did: the record equals what the engine reports, survives kills, and names damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import hansa
from hansa import presets
from hansa.rounds.faults import faults
from hansa.runs import client_record
from hansa.runs.client_record import INITIAL_SEAL, ClientRecord
from hansa.runs.store.io import DamagedFileError
from runs.people import task_of

pytestmark = pytest.mark.usefixtures("shared_workers")


def method(**words: object) -> hansa.Algorithm:
    return presets.fedavg(local_lr=0.1, steps=3, batch_size=4, participation=0.5, **words)


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return list(one) == list(two) and all(
        np.array_equal(one[n], two[n], equal_nan=one[n].dtype.kind == "f") for n in one
    )


def test_it_has_each_participant_of_each_round_with_its_own_numbers() -> None:
    seen: list[dict[int, tuple[float, float]]] = []

    def look(probe: hansa.measures.Probe) -> dict[str, float]:
        seen.append({client: float(vectors["model"].norm()) for client, vectors in probe.received.items()})
        return {}

    run = hansa.run(method(), task_of(7), rounds=4, measures=[look])
    found = run.clients()
    assert list(zip(found["round"].tolist(), found["client"].tolist(), strict=True)) == [
        (record["round"], client) for record in run.history for client in record["clients"]
    ]
    for place, norms in enumerate(seen, start=1):
        rows = found.at_round(place)
        assert rows["norm"].tolist() == pytest.approx([norms[c] for c in rows["client"].tolist()], rel=1e-6)
        assert rows["loss"].mean() == pytest.approx(run.history[place - 1]["train_loss"], rel=1e-6)
        for name in ("up_bytes", "down_bytes", "peer_bytes"):
            assert rows[name].sum() == run.history[place - 1][name]
    by = found.by_client()
    assert by["participations"].sum() == len(found["client"])
    assert by["up_bytes"].sum() == run.ledger.up_bytes
    last = found["loss"][np.flatnonzero(found["client"] == by["client"][0])[-1]]
    assert by["loss"][0] == last


def test_the_lost_were_asked_and_not_admitted() -> None:
    run = hansa.run(method(), task_of(7), rounds=6, faults=faults(before=0.3, after=0.2))
    found = run.clients()
    assert (~found["admitted"]).sum() == sum(record["lost"] for record in run.history) > 0
    assert found["asked"].all()
    assert np.isnan(found["loss"][~found["admitted"]]).all()
    assert (found["up_bytes"][~found["admitted"]] == 0).all()
    assert (found["down_bytes"] > 0).all()


def test_gossip_is_counted_for_those_who_sent_it() -> None:
    run = hansa.run(presets.cafga(clusters=2, steps=4, batch_size=4, local_lr=0.05), task_of(8), rounds=2)
    found = run.clients()
    assert found["peer_bytes"].sum() == run.ledger.peer_bytes > 0
    assert 0 < found["asked"].sum() < len(found["asked"])  # who only talked to neighbours is there too


def test_it_is_the_same_for_any_number_of_workers() -> None:
    alone, pair = (hansa.run(method(), task_of(7), rounds=3, workers=workers).clients() for workers in (1, 2))
    assert same(alone, pair)


def test_a_run_that_was_killed_has_the_record_of_one_that_was_not(tmp_path: Path) -> None:
    whole = hansa.run(method(), task_of(7), rounds=9, out=tmp_path / "whole", checkpoint_every=4)

    class Killed(BaseException):
        pass

    def kill(run: hansa.Run, record: dict[str, object]) -> None:
        if record["round"] == 7:
            raise Killed

    with pytest.raises(Killed):
        hansa.run(method(), task_of(7), rounds=9, out=tmp_path / "cut", checkpoint_every=4, callbacks=[kill])
    torn = tmp_path / "cut" / "clients.columns"
    assert client_record.read_columns(torn)["round"].max() == 7  # beyond the checkpoint of round 4
    torn.write_bytes(torn.read_bytes() + b"HCC1half a block")
    again = hansa.resume(tmp_path / "cut", method(), task_of(7))
    assert torn.read_bytes() == (tmp_path / "whole" / "clients.columns").read_bytes()
    assert same(again.clients(), whole.clients())
    assert same(again.clients(), hansa.run(method(), task_of(7), rounds=9).clients())  # in memory too


@pytest.mark.parametrize("where", [20, 90, 300, -3])
def test_damage_is_named_and_never_read(tmp_path: Path, where: int) -> None:
    hansa.run(method(), task_of(7), rounds=4, out=tmp_path / "x", checkpoint_every=2)
    path = tmp_path / "x" / "clients.columns"
    content = bytearray(path.read_bytes())
    content[where] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"clients\.columns"):
        client_record.read_columns(path)
    with pytest.raises(hansa.HansaError, match=r"clients\.columns"):
        hansa.resume(tmp_path / "x", method(), task_of(7), rounds=6)


def test_another_runs_record_is_refused_and_a_fallback_goes_on_from_what_is_sound(tmp_path: Path) -> None:
    for seed in (0, 1):
        hansa.run(method(), task_of(7), rounds=6, seed=seed, out=tmp_path / f"{seed}", checkpoint_every=2)
    path, expected = tmp_path / "0" / "clients.columns", (tmp_path / "0" / "clients.columns").read_bytes()
    shutil.copy(tmp_path / "1" / "clients.columns", path)
    with pytest.raises(DamagedFileError, match="not the record of the checkpoint of round 6"):
        hansa.resume(tmp_path / "0", method(), task_of(7), rounds=8)
    path.write_bytes(expected[: len(expected) // 2 + 200] + b"\0" * 40)
    hansa.resume(tmp_path / "0", method(), task_of(7), rounds=8, fallback=True)
    assert path.read_bytes().startswith(expected)


def test_a_folder_without_a_record_begins_one(tmp_path: Path) -> None:
    """As hansa 0.1 left them: no file, no seal in the checkpoint."""
    path = tmp_path / "clients.columns"
    record = ClientRecord.load(path, 5, None)
    record.add(6, work={"client": np.array([3]), "loss": np.array([0.5], np.float32)})
    assert client_record.read_columns(path)["round"].tolist() == [6]
    assert client_record.is_intact(path, 5, INITIAL_SEAL.hex())
    assert client_record.is_intact(path, 5, None)


def test_columns_keep_every_value_whatever_its_size(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    record, rounds = ClientRecord(tmp_path / "x"), []
    for round in range(1, 30):
        clients = np.sort(draw.choice(100_000, int(draw.integers(1, 60)), replace=False))
        table = {
            "client": clients,
            "loss": draw.standard_normal(len(clients)).astype(np.float32),
            "norm": np.full(len(clients), np.inf, np.float32),
            "up_bytes": draw.integers(0, 1 << int(draw.integers(1, 62)), len(clients)),
        }
        record.add(round, work=table, test={"client": clients[:1], "test_auc": np.array([np.nan], np.float32)})
        rounds.append(table)
    found = record.columns()
    for name in rounds[0]:
        assert np.array_equal(found[name], np.concatenate([table[name] for table in rounds])), name
    assert np.isnan(found["test_auc"]).all()
    assert list(record.columns("client", "loss")) == ["client", "loss"]
    with pytest.raises(hansa.HansaError, match=r"no column 'lss'.*loss"):
        record.columns("lss")


def test_ten_thousand_clients_and_a_thousand_rounds_fit_in_a_hundred_megabytes() -> None:
    """All of them in every round, the worst case: a tenth of it is encoded, every round the same."""
    draw, record = np.random.default_rng(0), ClientRecord()
    for round in range(1, 11):
        clients = np.arange(10_000)
        ones = np.ones(10_000, np.int64)
        numbers = draw.standard_normal((4, 10_000)).astype(np.float32)
        tested = {} if round % 10 else {"client": clients, "test_loss": numbers[2], "test_accuracy": numbers[3]}
        work = {"client": clients, "asked": ones, "admitted": ones, "loss": numbers[0], "norm": numbers[1],
                "up_bytes": 116_064 * ones, "down_bytes": 116_064 * ones, "peer_bytes": 0 * ones}  # fmt: skip
        record.add(round, work=work, test=tested)
    assert sum(map(len, record._blocks)) * 100 < 100e6


def test_frames_and_files(tmp_path: Path) -> None:
    run = hansa.run(method(), task_of(7), rounds=3)
    found = run.clients()
    pandas = pytest.importorskip("pandas")
    assert found.frame().shape == (len(found["client"]), 9)
    assert found.write_csv(tmp_path / "x.csv").read_text("utf-8").count("\n") == len(found["client"]) + 1
    again = pandas.read_csv(tmp_path / "x.csv")
    assert np.array_equal(again["loss"].to_numpy().astype(np.float32), found["loss"])
    with np.load(found.write_npz(tmp_path / "x.npz"), allow_pickle=False) as arrays:
        assert same({name: arrays[name] for name in arrays.files}, found)
