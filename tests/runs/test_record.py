"""The record of a run: it comes back as it was written, a foreign or damaged one is refused by one sentence."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa import HansaError, presets
from hansa.config import from_preset
from hansa.core.keys import Key
from hansa.core.types import State
from hansa.rounds.faults import faults
from hansa.runs import metrics
from hansa.runs.client_columns import encode_clients, join_rounds
from hansa.runs.driver import MAX_DROPPED_IN_CHECKPOINT, Run
from hansa.runs.experiment import digest_name, find_folder, open_run
from hansa.runs.folder import RunFolder
from hansa.runs.record import RunRecord
from hansa.runs.store import DamagedFileError, database, io
from hansa.runs.store.database import DATABASE, ROWS
from hansa.study.session import plan_jobs
from runs.people import task_of
from torture.disks import Counting, use_disk
from torture.kill import sha

pytestmark = pytest.mark.usefixtures("shared_workers")
FACTS = {"seed": 3, "config": "c0ffee", "loss": float("nan"), "position": {"metrics": 1234}}
SMALL = ("data.name=synthetic", "data.clients=4", "rounds=3", "local.steps=1", "workers=1", "checkpoint.every=1")


@pytest.fixture
def done(tmp_path: Path) -> RunFolder:
    open_run(from_preset("fedavg", SMALL), tmp_path / "out").execute()
    return RunFolder(tmp_path / "out")


def vector(*path: int | str, size: int = 50) -> torch.Tensor:
    return torch.from_numpy(Key(9).child(*path).numpy().normal(size=size))


def tree() -> State:
    x = vector("x")
    return {
        "round": 12,
        "server": {"model": {"m": x, "v": x.square().float(), "t": torch.tensor(3), "on": torch.tensor([True, False])}},
        "aggregate": {"model": {}, "control": [vector("a"), [vector("b").bfloat16()], {"c": torch.empty(0, 3)}]},
        "shared": {"whole": x, "part": x[5:9], "again": x, "turned": x.reshape(5, 10).T},
        "large": vector("large", size=30_000),
        "dotted": {"a": {"b": vector("one")}, "a.b": vector("two")},
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0, 1e-310], dtype=torch.float64),
        "plain": [1, -(2**70), 0.1, float("nan"), float("inf"), -0.0, 5e-324, True, None, "π / $", "", [], {}],
        "slash/name": "kept",
    }


def saved(folder: Path, *states: State, keep: int = 3) -> Path:
    io.make_folder(folder)
    RunRecord.create(folder).close()
    for number, state in enumerate(states, start=1):
        with RunRecord(folder, writing=True) as record:
            record.save_checkpoint(state, {"round": number, **FACTS}, keep=keep)
            record.commit()
    return folder


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_tree_comes_back_with_every_bit_and_type_and_shares_no_memory(tmp_path: Path) -> None:
    with RunRecord(saved(tmp_path, tree())) as record:
        state, facts, _ = record.load_checkpoint()
    assert sha(facts) == sha({"round": 1, **FACTS})
    assert sha(state) == sha(tree())
    state["shared"]["whole"].zero_()
    assert torch.equal(state["shared"]["part"], vector("x")[5:9])
    assert torch.equal(state["shared"]["again"], vector("x"))


def test_three_checkpoints_are_kept_or_as_many_as_asked(tmp_path: Path) -> None:
    states = [{"x": vector(number, size=20_000)} for number in range(1, 7)]
    with RunRecord(saved(tmp_path / "three", *states)) as record:
        assert record.checkpoint_rounds() == [4, 5, 6]
        for round in (4, 5, 6):
            assert sha(record.load_checkpoint(round).state) == sha(states[round - 1])
    assert (tmp_path / "three" / ROWS).stat().st_size <= 4 * (160_000 + 4096)  # their slots are used again
    with RunRecord(saved(tmp_path / "one", *states, keep=1)) as record:
        assert record.checkpoint_rounds() == [6]
    with RunRecord.create(tmp_path / "one") as record, pytest.raises(HansaError, match="keep=0"):
        record.save_checkpoint({}, {"round": 1}, keep=0)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"server": {"m": (1, 2)}}, r"state\.server\.m='tuple'"),
        ({"list": [0, {"deep": object()}]}, r"state\.list\[1\]\.deep='object'"),
        ({"rows": {3: 1}}, r"state\.rows=3"),
        ({"rows": {"$tensor": 1}}, r"state\.rows='\$tensor'"),
        ({"x": torch.zeros(1, dtype=torch.complex64)}, r"state\.x='torch\.complex64'"),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_by_its_place(tmp_path: Path, state: Any, words: str) -> None:
    with RunRecord.create(tmp_path) as record:
        with pytest.raises(HansaError, match=words):
            record.save_checkpoint(state, {"round": 0})
        assert record.checkpoint_rounds() == []


def test_a_round_is_one_transaction_after_the_rows_are_synced(tmp_path: Path) -> None:
    config = from_preset("scaffold", [*SMALL, "model=cnn_29k", "data.name=synthetic_images", "rounds=2"])
    try:
        experiment = open_run(config, tmp_path / "out")
    except HansaError:  # no such data here: rows of any size will do
        experiment = open_run(from_preset("scaffold", [*SMALL, "rounds=2"]), tmp_path / "out")
    with use_disk(Counting()) as disk:
        experiment.run.advance(1, [experiment._close_round])
    calls: list[str] = disk.calls  # type: ignore[attr-defined]
    assert calls.count("commit") == 1
    assert "sync" not in calls[calls.index("commit") :]  # the metrics are derived: nobody waits for them
    experiment.run.store.close()
    experiment.folder.release()


# --- clients ----------------------------------------------------------------------------------------------------------


def method(**words: object) -> hansa.Algorithm:
    return presets.fedavg(local_lr=0.1, steps=3, batch_size=4, participation=0.5, **words)


def same_columns(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
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


def test_columns_keep_every_value_whatever_its_size() -> None:
    draw = np.random.default_rng(0)
    blocks, rounds = [], []
    for round in range(1, 30):
        clients = np.sort(draw.choice(100_000, int(draw.integers(1, 60)), replace=False))
        table = {
            "client": clients,
            "loss": draw.standard_normal(len(clients)).astype(np.float32),
            "norm": np.full(len(clients), np.inf, np.float32),
            "up_bytes": draw.integers(0, 1 << int(draw.integers(1, 62)), len(clients)),
        }
        tested = {"client": clients[:1], "test_auc": np.array([np.nan], np.float32)}
        blocks.append((round, encode_clients(table, tested)))
        rounds.append(table)
    found = join_rounds(blocks)
    for name in rounds[0]:
        assert np.array_equal(found[name], np.concatenate([table[name] for table in rounds])), name
    assert np.isnan(found["test_auc"]).all()
    assert list(join_rounds(blocks, ["client", "loss"])) == ["client", "loss"]
    with pytest.raises(hansa.HansaError, match=r"no column 'lss'.*loss"):
        join_rounds(blocks, ["lss"])


def test_ten_thousand_clients_and_a_thousand_rounds_fit_in_a_hundred_megabytes() -> None:
    """All of them in every round, the worst case, of which one round is encoded."""
    draw = np.random.default_rng(0)
    clients, ones = np.arange(10_000), np.ones(10_000, np.int64)
    numbers = draw.standard_normal((4, 10_000)).astype(np.float32)
    work = {"client": clients, "asked": ones, "admitted": ones, "loss": numbers[0], "norm": numbers[1],
            "up_bytes": 116_064 * ones, "down_bytes": 116_064 * ones, "peer_bytes": 0 * ones}  # fmt: skip
    tested = {"client": clients, "test_loss": numbers[2], "test_accuracy": numbers[3]}
    plain, evaluated = (len(encode_clients(work, test)) for test in ({}, tested))
    assert 900 * plain + 100 * evaluated < 100e6


def test_frames_and_files(tmp_path: Path) -> None:
    run = hansa.run(method(), task_of(7), rounds=3)
    found = run.clients()
    pandas = pytest.importorskip("pandas")
    assert found.frame().shape == (len(found["client"]), 9)
    assert found.write(tmp_path / "x.csv").read_text("utf-8").count("\n") == len(found["client"]) + 1
    again = pandas.read_csv(tmp_path / "x.csv")
    assert np.array_equal(again["loss"].to_numpy().astype(np.float32), found["loss"])
    with np.load(found.write(tmp_path / "x.npz"), allow_pickle=False) as arrays:
        assert same_columns({name: arrays[name] for name in arrays.files}, found)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_metrics_are_written_for_others_and_never_read(done: RunFolder) -> None:
    path = done / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
    expected = list(done.history)
    path.write_text("\n".join(lines[:-1]))
    assert list(done.history) == expected
    assert done.summary["rounds"] == 3
    open_run(None, done.path, rounds=4).execute()
    assert [json.loads(line)["round"] for line in path.read_text("utf-8").splitlines()] == [1, 2, 3, 4]


def test_the_summary_is_what_the_record_says_and_a_changed_one_is_told(
    done: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    told = json.loads((done / "summary.json").read_text("utf-8"))
    assert {name: told[name] for name in metrics.summarize(done.history)} == metrics.summarize(done.history)
    assert told["record_digest"] == done.metrics.digest
    assert not caplog.records
    (done / "summary.json").write_text(json.dumps({**told, "test_accuracy": 0.99}))
    assert done.summary["test_accuracy"] == told["test_accuracy"]
    assert "contradicts the record in test_accuracy" in caplog.text
    shutil.copy(done / DATABASE, done.path.parent / "kept")
    open_run(None, done.path, rounds=4).execute()
    shutil.copy(done.path.parent / "kept", done / DATABASE)  # an older record in the place of that of the run
    assert done.summary["rounds"] == 3
    assert "contradicts the record in record_digest" in caplog.text


def test_the_models_digest_is_in_the_summary_and_another_model_is_refused(done: RunFolder) -> None:
    (content,) = done.read_model()
    assert json.loads((done / "summary.json").read_text("utf-8"))["model_sha256"] == io.sha256(content)
    (done / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is damaged"):
        done.read_model()


def rewrite_marker(folder: RunFolder, format: int, version: str) -> None:
    marker = io.read_sealed(folder / ".hansa-run")
    marker["bound"]["version"] = version
    io.write_sealed(folder / ".hansa-run", {**marker, "format": format})


def test_a_run_of_an_older_version_is_refused_by_its_version(done: RunFolder) -> None:
    rewrite_marker(done, 2, "0.3.0.dev0")
    files = [path for path in done.path.iterdir() if path.is_file() and path.name != ".hansa-lock"]
    before = [path.read_bytes() for path in files]
    for act in (
        lambda: open_run(None, done.path, rounds=4),
        lambda: done.history,
        lambda: done.metrics,
        done.clients,
        done.load_checkpoint,
    ):
        with pytest.raises(HansaError, match=r"written by Hansa 0\.3\.0\.dev0 \(format 2\).*start a new run"):
            act()
    assert [path.read_bytes() for path in files] == before
    (done / "config.yaml").write_text("local: {clip: 1.0}\n")
    with pytest.raises(HansaError, match=r"written by Hansa 0\.3"):
        _ = RunFolder(done.path).config
    config = from_preset("fedavg", SMALL)
    parent = done.path.parent / "below"
    open_run(config, tmp := parent / digest_name("fresh", config)).execute()
    (planned,) = plan_jobs(config, find_folder(config, parent, "fresh"), "resume")
    assert (planned.folder, planned.open()) == (tmp, None)  # finished
    rewrite_marker(RunFolder(tmp), 1, "0.2.0")
    assert find_folder(config, parent, "fresh") != tmp  # not reused, not overwritten


def edited(statement: str) -> Any:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as other:
            other.executescript(statement)

    return change


def overwritten(content: bytes) -> Any:
    return lambda path: path.write_bytes(content)


HOSTILE = {
    "not a database": overwritten(b"no database" * 1000),
    "empty": overwritten(b""),
    "a header and nothing else": overwritten(b"SQLite format 3\0" + bytes(84)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "another format": edited("PRAGMA user_version=99"),
    "a view in the place of a table": edited(
        "ALTER TABLE rounds RENAME TO kept; CREATE VIEW rounds AS SELECT * FROM kept, kept AS b, kept AS c"
    ),
    "a trigger": edited("CREATE TRIGGER t AFTER DELETE ON rounds BEGIN DELETE FROM vectors; END"),
    "one column too many": edited("ALTER TABLE rounds ADD COLUMN more TEXT"),
    "one table less": edited("DROP TABLE checkpoints"),
    "no rounds": edited("DELETE FROM rounds"),
    "the last round is missing": edited("DELETE FROM rounds WHERE round = 3"),
    "a round is missing": edited("DELETE FROM rounds WHERE round = 2"),
    "no identity": edited("DELETE FROM about"),
    "another head": edited('UPDATE about SET head = \'[9, "00", 9, 0, "00"]\''),
    "a head of bytes": edited("UPDATE about SET head = x'ff'"),
    "a head that is none": edited("UPDATE about SET head = '[]'"),
    "a number for a record": edited("UPDATE rounds SET record = 7 WHERE round = 2"),
    "bytes for a record": edited("UPDATE rounds SET record = x'fffe' WHERE round = 2"),
    "no digest": edited("UPDATE rounds SET digest = NULL, sha = NULL, clients = NULL WHERE round = 2"),
    "a deep record": edited(f"UPDATE rounds SET record = '{'[' * 100_000}' WHERE round = 1"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_database_ends_every_reader_with_one_sentence(done: RunFolder, kind: str) -> None:
    HOSTILE[kind](done / DATABASE)
    before = (done / DATABASE).read_bytes()
    for act in (lambda: done.history, lambda: done.metrics, lambda: done.summary, done.clients, done.by_client):
        with pytest.raises(HansaError, match=r"run\.db") as caught:
            act()
        assert len(str(caught.value)) < 600
        assert (done / DATABASE).read_bytes() == before
    with pytest.raises(HansaError, match=r"run\.db|no checkpoint") as caught:
        open_run(None, done.path, rounds=4)
    assert len(str(caught.value)) < 600
    try:
        assert open_run(None, done.path, rounds=4, fallback=True).execute()["rounds"] == 4
    except HansaError as error:
        refused = str(error)
    else:
        refused = ""
        assert [record["round"] for record in done.history] == [1, 2, 3, 4]
    assert len(refused) < 600


FORGED = {
    "an enormous shape": "UPDATE vectors SET shape = '[1000000000000]'",
    "a negative shape": "UPDATE vectors SET shape = '[-4]'",
    "a shape that is none": "UPDATE vectors SET shape = '{\"a\": 1}'",
    "another dtype": "UPDATE vectors SET dtype = 'float64'",
    "an unknown dtype": "UPDATE vectors SET dtype = 'object'",
    "a place beyond the file": "UPDATE vectors SET place = 1000000000000, content = NULL",
    "a place of text": "UPDATE vectors SET place = 'here'",
    "another client": "UPDATE vectors SET client = client + 1",
    "a client of text": "UPDATE vectors SET client = 'x'",
    "a replaced row": "UPDATE vectors SET died = 2 WHERE kind = 'client' AND died IS NULL",
    "no rows": "DELETE FROM vectors",
    "content of text": "UPDATE vectors SET content = 'text'",
    "no checkpoint state": "UPDATE checkpoints SET state = NULL",
    "a checkpoint of a list": "UPDATE checkpoints SET state = '[]'",
    "a checkpoint without a head": "UPDATE checkpoints SET head = NULL",
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_rows_and_checkpoints_are_refused_before_memory_is_taken(tmp_path: Path, kind: str) -> None:
    open_run(from_preset("scaffold", SMALL), tmp_path / "out").execute()
    edited(FORGED[kind])(tmp_path / "out" / DATABASE)
    with pytest.raises(HansaError, match=r"run\.db") as caught:
        open_run(None, tmp_path / "out", rounds=4)
    assert len(str(caught.value)) < 600


def test_a_block_of_clients_that_claims_a_billion_rows_is_refused(tmp_path: Path) -> None:
    with RunRecord.create(tmp_path) as record:
        head = json.dumps([10**9, {"client": [False, 0, 0]}]).encode()
        record.add_round({"round": 1}, len(head).to_bytes(4, "little") + head)
        record.commit()
    with pytest.raises(DamagedFileError, match="table of 1000000000 rows"):
        RunFolder(tmp_path).clients()


# --- others read, move and delete while it runs -----------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs another user")
@pytest.mark.parametrize("index", [False, True])
def test_a_killed_run_is_read_in_a_folder_without_write_access(index: bool) -> None:
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    (place / "live").mkdir()
    with RunRecord.create(place / "live") as record:
        for round in (1, 2):
            record.add_round({"round": round}, encode_clients())
            record.commit()
        copied = place / "killed"
        shutil.copytree(place / "live", copied, ignore=None if index else shutil.ignore_patterns("*-shm"))
    assert (copied / f"{DATABASE}-wal").stat().st_size
    for path in copied.iterdir():
        path.chmod(0o444)
    copied.chmod(0o555)
    before = sorted(path.name for path in copied.iterdir())
    if (child := os.fork()) == 0:
        code = 1
        try:
            if os.getuid() == 0:  # another user, who may only read
                os.seteuid(65534)
            tempfile.tempdir = None
            with RunRecord(copied) as found:
                code = 0 if [each["round"] for each, _ in found.rounds()] == [1, 2] else 2
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = sorted(path.name for path in copied.iterdir())
    copied.chmod(0o755)
    shutil.rmtree(place)
    assert code == 0
    assert found == before


@pytest.mark.parametrize("network", [False, True])
def test_a_run_is_read_while_it_goes_on_and_is_one_plain_file_at_its_end(
    tmp_path: Path, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without shared memory, as on a network file system, there is a rollback journal."""
    monkeypatch.setattr(database, "_is_network_file", lambda path: network)
    modes = []

    def look(run: Run, record: Any) -> None:
        modes.append(run.store.database.execute("PRAGMA journal_mode").fetchone()[0])  # type: ignore[attr-defined]
        folder, round = RunFolder(tmp_path / "out"), record["round"]
        assert (len(folder.history), folder.summary["rounds"], folder.clients()["round"].max()) == (round,) * 3

    write, files = io.write_json, []

    def written(path: Path, content: Any) -> None:  # a process may die after any of them
        write(path, content)
        if content.get("status") == "finished":
            files.extend(path.name for path in (tmp_path / "out").glob("run.db*"))

    monkeypatch.setattr(io, "write_json", written)
    open_run(from_preset("scaffold", SMALL), tmp_path / "out").execute([look])
    assert modes == ["delete" if network else "wal"] * 3
    assert files == ["run.db"]
    with closing(sqlite3.connect(tmp_path / "out" / DATABASE)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_copy_of_a_live_folder_is_resumed_equal_or_refused(tmp_path: Path) -> None:
    config = from_preset("scaffold", [*SMALL, "rounds=6", "checkpoint.every=2"])
    copies = []

    def copy(run: Run, record: Any) -> None:
        copies.append(tmp_path / f"copy {record['round']}")
        shutil.copytree(tmp_path / "out", copies[-1])

    open_run(config, tmp_path / "out").execute([copy])
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    for number, path in enumerate(copies):
        if number % 2:  # a copy whose files are not of one moment: the log is older, or gone
            io.remove(path / f"{DATABASE}-wal")
            io.remove(path / f"{DATABASE}-shm")
        refused = None
        try:
            open_run(None, path).execute()
        except HansaError as error:
            refused = error
        if refused is not None:
            assert number % 2, refused
            continue
        assert RunFolder(path).read_model()[0][8:] == expected[8:]


@pytest.mark.parametrize("what", ["the folder", "the database", "the folder by its name"])
def test_a_folder_that_is_deleted_while_the_run_is_active_ends_it_with_a_true_sentence(
    tmp_path: Path, what: str
) -> None:
    out = tmp_path / "out"

    def delete(run: Run, record: Any) -> None:
        if record["round"] == 2:
            if what == "the folder by its name":
                out.rename(tmp_path / "elsewhere")
            elif what == "the folder":
                shutil.rmtree(out)
            else:
                (out / DATABASE).unlink()

    with pytest.raises(HansaError, match=r"(deleted|removed|replaced|moved).* while the run was active") as caught:
        open_run(from_preset("fedavg", SMALL), out).execute([delete])
    assert str(out) in str(caught.value)
    assert out.exists() == (what == "the database")
    if what == "the folder by its name":
        assert open_run(None, tmp_path / "elsewhere").execute()["rounds"] == 3


def test_checkpoints_do_not_grow_with_the_lost(tmp_path: Path) -> None:
    config = from_preset("fedavg", [*SMALL, "rounds=120", "faults={before: 1.0}", "checkpoint.every=0"])
    sizes = []

    def measure(run: Run, record: Any) -> None:
        if record["round"] in (60, 120):
            sizes.append(len(json.dumps(run.checkpoint_state()["lost"])))

    experiment = open_run(config, tmp_path / "out")
    assert experiment.execute([measure])["lost"] == 480
    assert len(experiment.run.checkpoint_state()["lost"]) == MAX_DROPPED_IN_CHECKPOINT
    assert sizes[1] < sizes[0] * 1.05
