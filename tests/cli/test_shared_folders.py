"""Run folders that several processes use, or whose start was killed: nothing is trained twice."""

from __future__ import annotations

import json

import pytest

from hansa.config import from_yaml
from hansa.runs.experiment import digest_name, find_folder
from hansa.runs.folder import RunFolder, SeedGroupFolder
from hansa.runs.store.io import InUseError
from hansa.study.session import plan_jobs


def plan(config, folder):
    return plan_jobs(config, find_folder(config, folder, "x"), "resume")


def test_a_point_under_way_in_another_process_is_not_started_again(folder):
    config = from_yaml((folder / "small.yaml").read_text())
    (planned,) = plan(config, folder / "out")
    first = planned.open()
    (other,) = plan(config, folder / "out")
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
            patch.setattr("hansa.runs.folder.RunFolder._roll_back", lambda self, created: self.release())
            with pytest.raises(Killed):
                plan(asked, folder / str(seeds))[0].open()
        if seeds is not None:
            SeedGroupFolder(folder / str(seeds) / digest_name("x", config)).path.mkdir(parents=True)
        for planned in plan(asked, folder / str(seeds)):
            planned.open().execute()
        assert [path.name for path in (folder / str(seeds)).iterdir() if path.is_dir()] == [digest_name("x", config)]


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
