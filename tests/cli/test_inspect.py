"""Commands that look: presets, parts, cite, topology, config, data, doctor, models; options are named as in Python."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields

import pytest
import torch
import yaml
from torch import nn

import hansa
from hansa import presets
from hansa.cli import compare, doctor, run, show
from hansa.core import native
from hansa.runs.driver import RunOptions
from hansa.runs.export import export
from hansa.training.execution_mode import describe_kernels
from hansa.training.models import MODELS, build, parameter_count


def test_the_version_is_the_installed_one(cli):
    from importlib.metadata import version

    assert cli("--version").stdout.strip() == f"hansa {version('hansa')}"


def test_presets_are_listed_with_their_equations(cli):
    text = cli("presets").stdout
    for name in presets.catalogue():
        assert re.search(rf"^{name} ", text, flags=re.MULTILINE), name
    assert json.loads(cli("presets", "--json").stdout).keys() == presets.catalogue().keys()


def test_one_preset_tells_its_words_and_its_composition(cli):
    text = " ".join(cli("presets", "fedprox").stdout.split())
    assert "mu=0.01" in text
    assert "solver=prox(mu=0.01)" in text
    assert "li2020" in text
    assert json.loads(cli("presets", "fedams", "--json").stdout)["sections"]["server"][:2] == ["lr", "weights"]
    unknown = cli.refused("presets", "fedproxx")
    assert "Did you mean fedprox" in unknown.stderr


def test_cite_prints_bibtex_of_the_parts_in_use_each_once(cli):
    text = cli("cite", "fedams", "fedprox", "small.yaml").stdout
    assert text.count("@") == len(set(re.findall(r"@\w+\{(\w+),", text)))
    assert {"wang2022", "li2020", "mcmahan2017"} <= set(re.findall(r"@\w+\{(\w+),", text))


def test_topology_of_the_papers_ring(cli):
    arguments = ("topology", "ring", "-n", "32", "--clusters", "4", "--participation", "0.25", "-d", "1000")
    text = " ".join(cli(*arguments).stdout.split())
    assert "rho max 0.805" in text  # of a ring of eight
    assert "[HAFED] Corollary 5.11 condition rho_max = 0.8047 <= 1/(2 sqrt(n - m)) = 0.2041: does not hold" in text
    output = json.loads(cli(*arguments, "--json").stdout)
    assert output["messages_per_step"] == 64
    assert output["bytes_per_step"] == 64 * 1000 * 4
    assert output["reporters"] == [2] * 4
    assert not all(output["theorems"][0]["conditions"].values())


def test_topology_finds_a_graph_for_a_rho_and_says_what_the_theorems_ask(cli):
    arguments = ["topology", "-n", "32", "-k", "4", "-m", "2", "--target-rho", "0.6"]
    arguments += ["--steps", "48", "--rounds", "500"]
    found = json.loads(cli(*arguments, "--json").stdout)
    assert abs(found["rho_max"] - 0.6) < 0.01
    corollary, afga = found["theorems"]
    assert corollary["conditions"]["T = 500 > tau M = 384"] is True
    assert afga["name"] == "[AFGA] Theorem D.3"
    assert afga["orders"]["rate"][1] == pytest.approx((500 * 48 * 2) ** -0.5)
    assert found["topology"] in cli(*arguments).stdout
    again = json.loads(cli("topology", "unbalanced-complete", "-n", "8", "--target-rho", "0.125", "--json").stdout)
    assert again["topology"].startswith("unbalanced_complete(")


def test_topology_takes_options_and_draws_a_picture(cli, folder):
    pytest.importorskip("matplotlib")
    cli.ok("topology", "{kind: erdos-renyi, p: 0.9, seed: 3}", "-n", "9", "--figure", "g.svg")
    assert "<svg" in (folder / "g.svg").read_text("utf-8")


def test_the_schema_is_json_and_the_example_is_a_configuration_that_resolves(cli, folder):
    assert json.loads(cli("config", "schema").stdout)["title"] == "A Hansa run"
    (folder / "run.yaml").write_text(cli("config", "example").stdout)
    shown = cli.ok("config", "show", "run.yaml", "--set", "local.lr=0.2")
    assert shown.stdout.startswith("# composition: Algorithm(name='fedams'")
    assert yaml.safe_load(shown.stdout)["local"]["lr"] == 0.2


def test_data_list_says_what_is_here(cli, monkeypatch, folder):
    monkeypatch.setenv("HANSA_DATA", str(folder / "data"))
    text = cli("data", "list").stdout
    assert re.search(r"^fashion-mini +yes", text, flags=re.MULTILINE)
    assert re.search(r"^cifar10 +no", text, flags=re.MULTILINE)
    assert re.search(r"^synthetic +generated", text, flags=re.MULTILINE)
    assert "MIT, Zalando" in cli("data", "list", "--long", width=400).stdout


def test_data_check_ends_with_1_when_something_is_missing_or_damaged(cli, folder):
    cli.ok("data", "check", "fashion-mini")
    missing = cli("data", "check", "mnist", "--folder", "nowhere", width=400)
    assert missing.exit_code == 1
    assert missing.stdout.count("missing") == 4
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01\x00\x00\x00\x05abc")
    damaged = cli("data", "check", "mnist", "--folder", "data", width=400)
    assert damaged.exit_code == 1
    assert "damaged" in damaged.stdout
    assert "train-labels-idx1-ubyte" in damaged.stdout


def test_data_show_counts_who_holds_which_labels(cli, folder):
    arguments = ["data", "show", "fashion-mini", "-n", "12", "-p", "{kind: shards, shards: 20, per_client: 1}"]
    text = cli(*arguments).stdout
    rows = re.findall(r"^[A-Z][a-z/ -]+?((?: +\d+){12})$", text, flags=re.MULTILINE)
    assert (len(rows), sum(int(count) for row in rows for count in row.split())) == (10, 6000)
    assert "500 / 500 / 500 per client" in text
    (folder / "sites.csv").write_text("age,y\n30,1\n40,0\n")
    assert "2 samples" in cli.ok("data", "show", "csv-folder", "--folder", ".", "--option", "target=y").stdout


ONLY_COMMANDS = {"as_json",
    "config", "sets", "base",  # a configuration file and changes to it
    "preset",  # an algorithm by name
    "quiet",  # progress=False
    "trust", "track", "engine", "address", "resume", "fallback",  # run --resume is hansa.resume; trackers are callbacks
    "report", "latex", "metric", "window", "target",  # of the result: Comparison.report, .latex, .ranking
    "search", "grid", "runs",  # axes and methods
    "folder",
}  # fmt: skip
"""Arguments of commands that have no counterpart in the function of the same name."""
PAIRS = {
    "run": (run.run, hansa.run),
    "resume": (run.resume, hansa.resume),
    "compare": (compare.compare, hansa.compare),
    "sweep": (compare.sweep, hansa.search),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_option_and_an_argument_have_one_name(name):
    command, function = PAIRS[name]
    known = {*inspect.signature(function).parameters, *(field.name for field in fields(RunOptions))}
    shared = set(inspect.signature(command).parameters) - ONLY_COMMANDS
    single_seed = {"seed"} if name in ("compare", "sweep") else set()  # in Python seeds=[3]
    assert shared - single_seed <= known, shared - known


def test_results_take_the_same_words_as_the_commands():
    words = {"metric", "window", "target"}
    for command in (compare.compare, show.report, compare.sweep):
        assert words | {"latex"} <= set(inspect.signature(command).parameters)
    for method in (hansa.Comparison.ranking, hansa.Comparison.table, hansa.Comparison.report, hansa.Comparison.latex):
        assert words <= set(inspect.signature(method).parameters)
    assert {"metric", "window"} <= set(inspect.signature(hansa.search).parameters)
    assert "trust" in inspect.signature(export).parameters


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
