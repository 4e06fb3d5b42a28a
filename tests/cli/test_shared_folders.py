"""Run folders that several processes use, or that go away: nothing is trained twice, and what is said is true."""

from __future__ import annotations

import json
import signal
import threading

import pytest

from cli.conftest import SLOW
from hansa.config import from_yaml
from hansa.runs.experiment import digest_name, open_run
from hansa.runs.folder import RunFolder, SeedGroupFolder
from hansa.runs.store.io import InUseError
from hansa.study.session import plan_reusable


def slow_config(folder, rounds=8):
    (folder / "slow_net.py").write_text(SLOW)
    text = (folder / "small.yaml").read_text().replace("rounds: 3", f"rounds: {rounds}").replace("model: logistic", "")
    (folder / "slow.yaml").write_text(text + 'model: {factory: "slow_net:Net"}\n')


@pytest.mark.parametrize(("seeds", "parallel"), [((), 1), ((), 2), (("--seeds", "0,1"), 1)])
def test_two_sweeps_into_one_folder_train_every_point_once(folder, process, monkeypatch, seeds, parallel):
    """The second one takes points that the first one does not execute, and waits for the others."""
    slow_config(folder)
    monkeypatch.setenv("SLOW", "0.01")
    words = ["sweep", "slow.yaml", "local.lr=0.05,0.1,0.2", *seeds, "-q", "-o", "out", "--parallel", parallel]
    first, second = process(*words), process(*words)
    for child in (first, second):
        output, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
        assert "best: " in output
    runs = [RunFolder(path.parent) for path in folder.glob("out/**/metrics.jsonl")]
    assert len(runs) == 3 * (2 if seeds else 1)
    assert not list(folder.glob("out/*-2"))
    assert {run.summary["status"] for run in runs} == {"finished"}


def test_a_point_under_way_in_another_process_is_not_started_again(folder):
    config = from_yaml((folder / "small.yaml").read_text())
    (planned,) = plan_reusable(config, folder / "out", "x")
    first = planned.open()
    (other,) = plan_reusable(config, folder / "out", "x")
    with pytest.raises(InUseError, match="in use by process"):
        other.open()
    first.execute()
    assert other.open() is None  # finished
    assert [path.name for path in (folder / "out").iterdir() if path.is_dir()] == [first.folder.path.name]


def test_a_start_that_was_killed_leaves_no_half_folder_beside_the_run(folder, monkeypatch):
    """Before, a search that was killed while it created a folder went on in another one with a number."""
    config = from_yaml((folder / "small.yaml").read_text())

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    for seeds in (None, [0, 1]):
        asked = config.model_copy(update={"seeds": seeds})
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder if seeds is None else SeedGroupFolder, "write_config", die)
            patch.setattr("hansa.runs.folder.RunFolder.roll_back", lambda self: self.release())
            with pytest.raises(Killed):
                plan_reusable(asked, folder / str(seeds), "x")[0].open()
        if seeds is not None:
            SeedGroupFolder(folder / str(seeds) / digest_name("x", config)).path.mkdir(parents=True)
        for planned in plan_reusable(asked, folder / str(seeds), "x"):
            planned.open().execute()
        assert [path.name for path in (folder / str(seeds)).iterdir() if path.is_dir()] == [digest_name("x", config)]


def test_what_a_search_waits_for_can_be_interrupted(folder, process):
    pytest.importorskip("optuna")
    config = from_yaml((folder / "small.yaml").read_text(), ["local.lr=0.1"])
    held = open_run(config, folder / "out" / digest_name("local.lr=0.1", config))
    child = process("sweep", "small.yaml", "local.lr=0.1", "--search", "optuna", "--trials", 1, "-o", "out", "-q")
    timer = threading.Timer(8, child.send_signal, [signal.SIGTERM])
    timer.start()
    _, errors = child.communicate(timeout=120)
    timer.cancel()
    assert child.returncode == 143, errors
    held.execute()


def test_results_as_json(cli, folder):
    one = cli("run", "small.yaml", "-o", "one", "-q", "--json")
    assert json.loads(one.stdout)["summary"]["rounds"] == 3
    assert json.loads(cli("resume", "one", "-q", "--json", "-r", 4).stdout)["summary"]["rounds"] == 4
    seeds = cli("run", "small.yaml", "-o", "two", "-q", "--json", "--seeds", 2)
    assert set(json.loads(seeds.stdout)["seeds"]) == {"0", "1"}
    swept = json.loads(cli("sweep", "small.yaml", "local.lr=0.001,0.2", "-q", "--json").stdout)
    assert [point["name"] for point in swept["ranking"]] == ["local.lr=0.2", "local.lr=0.001"]
    compared = json.loads(cli("compare", "fedavg", "fedams", "-c", "small.yaml", "-q", "--json").stdout)
    assert {method["name"] for method in compared["ranking"]} == {"fedavg", "fedams"}
