"""``hansa serve``, ``join`` and ``keys`` as they are typed, with sites inside the process in Flower's place."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
from typer.testing import CliRunner

from federation.local_sites import TEXT, LocalSites
from hansa.federation import superlink
from hansa.runs.folder import RunFolder


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = LocalSites(tmp_path / "sites")
    made.address, made.close = "nowhere:1", lambda: None
    monkeypatch.setattr(superlink, "SuperLink", lambda sites, keys, **options: made)
    Path("a.yaml").write_text(TEXT)
    Path("b.yaml").write_text(TEXT.replace("trial", "other").replace("fedavg", "scaffold"))
    return made


def hansa(*arguments):
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


def test_one_configuration_is_served_and_taken_up_again(sites):
    code, output = hansa("serve", "a.yaml", "--insecure", "--rounds", "2", "-o", "run", "--quiet")
    assert code == 0, output
    assert "anyone who can reach the port" in output
    assert len(RunFolder("run").history) == 2
    sites.kill("north")
    code, output = hansa("serve", "a.yaml", "--insecure", "--rounds", "4", "-o", "run", "--resume", "--quiet")
    assert code == 0, output
    assert len(RunFolder("run").history) == 4


def test_several_configurations_end_in_a_table_and_a_page(sites):
    arguments = ["--rounds", "1", "-o", "runs", "--report", "page.html", "--quiet"]
    code, output = hansa("serve", "a.yaml", "b.yaml", "--insecure", *arguments)
    assert code == 0, output
    assert "report:" in output
    assert "other" in Path("page.html").read_text(encoding="utf-8")


def test_a_lost_memory_is_told_and_only_forgotten_on_request(sites):
    arguments = ["b.yaml", "--insecure", "-o", "run", "--quiet", "--set", "sample=null"]
    assert hansa("serve", *arguments, "--rounds", "2")[0] == 0
    sites.kill("north")
    shutil.rmtree("sites/north")
    assert hansa("serve", *arguments, "--rounds", "3", "--resume")[0] == 0
    assert RunFolder("run").history[-1]["reasons"] == {"memory": 3}
    forget = [word for client in range(3) for word in ("--forget", str(client))]
    assert hansa("serve", *arguments, "--rounds", "4", "--resume", *forget)[0] == 0
    assert RunFolder("run").history[-1]["participants"] == 6


def test_keys_or_the_wish_to_do_without_are_asked_for(sites):
    code, output = hansa("serve", "a.yaml")
    assert (code, "--keys FOLDER" in output) == (2, True)
    code, output = hansa("join", "--site", "north", "--data", "config", "--insecure", "--keys", "keys")
    assert (code, "not both" in output) == (2, True)


def test_other_places_are_refused(sites):
    Path("b.yaml").write_text(TEXT.replace("south: 3", "east: 3"))
    code, output = hansa("serve", "a.yaml", "b.yaml", "--insecure")
    assert (code, "different engine.sites" in output) == (2, True)
