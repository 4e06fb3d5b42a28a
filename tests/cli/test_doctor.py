"""``hansa doctor`` and ``hansa models``, and the line with which a run says which kernels it uses."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hansa
from hansa.cli import doctor
from hansa.core import native
from hansa.training.execution_mode import describe_kernels
from hansa.training.models import MODELS, build, parameter_count


def findings(cli):
    result = cli.ok("doctor", "--json")
    return {
        (section, each["name"]): (each["value"], each["remedy"])
        for section, lines in json.loads(result.stdout).items()
        for each in lines
    }


def test_the_doctor_describes_machine_versions_kernels_devices_and_extras(cli):
    found = findings(cli)
    sections = {section for section, _ in found}
    assert sections == {"machine", "versions", "kernels", "devices", "extras"}
    assert found["versions", "hansa"][0].startswith(hansa.__version__)
    assert found["versions", "torch"][0] == torch.__version__
    assert found["kernels", "in use"][0] == native.describe()
    assert found["devices", "cpu"] == ("CPU", None)
    text = cli("doctor").output
    assert "kernels" in text
    assert "Traceback" not in text


def gone(name):
    if name == "pandas":
        raise doctor.PackageNotFoundError(name)
    return "1.0"


def test_what_is_missing_has_a_remedy(cli, monkeypatch):
    monkeypatch.setenv("HANSA_NATIVE", "off")
    monkeypatch.setattr(doctor, "requires", lambda name: ["pandas>=2.2; extra == 'report'", "torch>=2.6"])
    monkeypatch.setattr(doctor, "version", gone)
    found = findings(cli)
    assert found["kernels", "in use"] == ("none: HANSA_NATIVE=off hides the native kernels", "Unset HANSA_NATIVE.")
    assert found["extras", "report"] == ("pandas missing", "pip install 'hansa[report]'")


def test_the_models_are_listed_with_the_sizes_that_they_have(cli):
    listed = json.loads(cli("models", "--json").stdout)
    assert {row["name"] for row in listed} == set(MODELS)
    for row in listed:
        made = build(row["name"], classes=row["classes"], shape=row["shape"])
        assert row["parameters"] == parameter_count(made)
        assert row["megabytes"] == pytest.approx(sum(p.nbytes for p in made.parameters()) / 1e6)
    assert "28,938" in cli("models").output


def test_a_command_says_once_which_kernels_its_runs_use(cli, folder):
    said = cli("compare", "fedavg", "fedprox", "-c", "small.yaml", "-o", "out", "--report", "page.html").output
    assert said.count("kernels: ") == 1, said
    assert f"kernels: {native.describe()}" in said
    assert "kernels:" not in cli("run", "small.yaml", "-o", "quiet", "-q").output


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) * torch.sigmoid(x.sum(1, keepdim=True))


def test_the_line_says_who_trains_the_model_and_why(monkeypatch):
    rows = hansa.data.from_arrays(torch.rand(40, 3), torch.arange(40) % 2, clients=4)
    own, plain = (hansa.Task(make, nn.functional.cross_entropy, rows) for make in (Own, lambda: nn.Linear(3, 2)))
    if native.available() and native.instruction_set() != "base":
        assert describe_kernels(plain) == f"kernels: {native.describe()}, for training, the server and compression"
        assert "PyTorch trains the model: " in describe_kernels(own)
    monkeypatch.setenv("HANSA_NATIVE", "off")
    assert describe_kernels(own).startswith(
        "kernels: none: HANSA_NATIVE=off hides the native kernels. PyTorch does all"
    )


def test_an_installation_without_kernels_says_so_with_the_remedy(cli, folder, monkeypatch, caplog):
    """As a wheel that was built without a compiler: in the line at start, in the log of a script, and in the doctor."""
    (folder / "package").mkdir()
    monkeypatch.delenv("HANSA_NATIVE", raising=False)
    monkeypatch.setattr(native, "__file__", str(folder / "package" / "__init__.py"))
    native.warn_if_missing.cache_clear()
    said = cli("run", "small.yaml", "-o", "out").output
    assert "kernels: none: they were not built. PyTorch does all the work, several times slower" in said
    assert "Install a wheel (pip install --only-binary hansa hansa), or gcc or clang and install again." in said
    for _ in range(2):
        hansa.Task(
            Own, nn.functional.cross_entropy, hansa.data.from_arrays(torch.rand(8, 3), torch.arange(8) % 2, clients=2)
        )
    (warning,) = [one for one in caplog.records if "native kernels" in one.message and one.levelname == "WARNING"]
    assert "none: they were not built" in warning.message
    assert findings(cli)["kernels", "in use"] == ("none: they were not built", native.remedy())
    assert "Install a wheel" in native.remedy()
    monkeypatch.setenv("HANSA_NATIVE", "off")
    native.warn_if_missing.cache_clear()
    caplog.clear()
    native.warn_if_missing()
    assert not caplog.records
