"""A run goes on with what it was begun with; `torture.folders` has the long form for every preset."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

import hansa
from hansa.config import from_preset
from hansa.runs import provenance
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder, environment
from torture.folders import changed

SMALL = ("data.name=synthetic", "data.clients=4", "rounds=2", "local.steps=1", "workers=1", "checkpoint.every=1")


@pytest.mark.parametrize("preset", ["scaffold", "dsgd"])
def test_changed_data_partition_model_and_version_are_refused_by_name_or_noted(preset, tmp_path):
    assert changed(preset, tmp_path) == {"data": 3, "partition": 1, "model": 2, "version": 1}


def test_a_model_that_no_longer_fits_cannot_be_accepted(tmp_path, monkeypatch):
    (tmp_path / "sized.py").write_text(
        "import hansa\nfrom torch import nn\n@hansa.component\ndef make():\n    return nn.Linear(60, 10)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    open_run(from_preset("fedavg", [*SMALL, "model={factory: 'sized:make'}"]), tmp_path / "out").execute()
    (tmp_path / "sized.py").write_text((tmp_path / "sized.py").read_text("utf-8").replace("10)", "10, bias=False)"))
    del sys.modules["sized"]
    with pytest.raises(hansa.HansaError, match="changed since the run was started: model"):
        open_run(None, tmp_path / "out", rounds=3)
    with pytest.raises(hansa.HansaError, match="not resumable"):
        open_run(None, tmp_path / "out", rounds=3, accept=["model"])
    del sys.modules["sized"]


def test_a_word_that_is_no_kind_is_refused(tmp_path):
    with pytest.raises(hansa.HansaError, match=r"--accept modle: Did you mean model\?"):
        open_run(None, tmp_path, accept=["data,modle"])


def test_every_byte_of_a_tensor_counts_however_it_lies_in_memory():
    held = torch.randn(7, 3, 5, 5).to(memory_format=torch.channels_last)
    first = provenance.digest([held])
    for flip in range(0, held.numel(), 97):
        other = held.clone(memory_format=torch.preserve_format)
        other.permute(0, 2, 3, 1).reshape(-1)[flip] += 1
        assert provenance.digest([other]) != first
    assert provenance.digest([held.clone(memory_format=torch.preserve_format)]) == first
    held[0, 0, 0, 0] += 1  # a digest that is remembered is not believed after a change in place
    assert provenance.digest([held]) != first


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __repr__(self):
        return f"Scaled({self.factor})"

    def __call__(self, x):
        return x * self.factor


def test_source_tells_functions_objects_and_what_they_were_told_apart():
    def first(x):
        return x + 1

    def second(x):
        return x + 2

    assert provenance.source_text(first).replace("first", "second") != provenance.source_text(second)
    assert provenance.source_text(Scaled(2)) != provenance.source_text(Scaled(3))
    assert provenance.source_text(functools.partial(first, x=1)) != provenance.source_text(
        functools.partial(first, x=2)
    )
    assert provenance.source_text(nn.functional.cross_entropy) == "torch.nn.functional.cross_entropy"
    made = {}
    exec("def f(x): return x + 1\ndef g(x): return x * 1", made)  # no source to be had
    assert provenance.source_text(made["f"]) != provenance.source_text(made["g"])
    assert " at 0x" not in provenance.source_text(functools.partial(first, x=object()))


def test_other_code_of_a_part_of_yours_is_a_change_of_method(tmp_path, monkeypatch):
    open_run(from_preset("fedavg", SMALL), tmp_path / "out").execute()
    monkeypatch.setattr(provenance, "_source_digest", lambda parts: "other code")
    with pytest.raises(hansa.HansaError, match="changed since the run was started: method"):
        open_run(None, tmp_path / "out", rounds=3)
    open_run(None, tmp_path / "out", rounds=3, accept=["method"]).execute()
    assert RunFolder(tmp_path / "out").marker.accepted[0].round == 2


def test_the_environment_names_the_commit_of_the_current_folder_and_the_packages_in_use(tmp_path, monkeypatch):
    def git(*words, cwd=tmp_path):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True, text=True).stdout

    inner = tmp_path / "code" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert "git commit" not in environment()
    git("init", "-q")
    assert "git commit" not in environment()
    git("commit", "-q", "--allow-empty", "-m", "first")
    first = git("rev-parse", "HEAD").strip()
    assert environment()["git commit"] == first
    git("pack-refs", "--all")
    git("worktree", "add", "-q", "-b", "other", "beside")
    git("commit", "-q", "--allow-empty", "-m", "second")
    assert environment()["git commit"] == git("rev-parse", "HEAD").strip() != first
    monkeypatch.chdir(tmp_path / "beside")
    assert environment()["git commit"] == first
    git("checkout", "-q", "--detach")
    assert environment()["git commit"] == first
    assert {"hansa", "torch", "pandas", "pydantic", "networkx"} <= environment()["packages"].keys()
    assert "pytest" not in environment()["packages"]
