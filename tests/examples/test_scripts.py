"""The examples run as they stand at a tiny size: each short, without a warning, with numbers that make sense."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import warm
from hansa.config import from_yaml, load

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder, script, *arguments, lines=40, **more):
    """What an example of few lines prints, by its name or path; no warning, no error."""
    script = EXAMPLES / f"{script}.py" if isinstance(script, str) else script
    assert len(script.read_text(encoding="utf-8").splitlines()) <= lines
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
    command = [sys.executable, "-W", "error", str(script), *arguments]
    done = warm.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def columns(text):
    """The numbers of a printed table, by the name of their column."""
    lines = [line.split() for line in text.splitlines() if line.split()]
    head = next(place for place, line in enumerate(lines) if line[0] == "round")
    rows = [line for line in lines[head + 1 :] if line[0].isdigit()]
    return {name: [float(row[place]) for row in rows] for place, name in enumerate(lines[head])}


PACKAGES = {
    "datasets": "'hansa[datasets]'",
    "flwr_datasets": "'hansa[flwr-datasets]'",
    "hydra": "hydra-core",
    "lightning": "lightning",
    "sklearn": "scikit-learn",
    "wandb": "wandb",
}


def need(package: str) -> None:
    pytest.importorskip(package, reason=f"not exercised: pip install {PACKAGES[package]}")


LEARN = {
    "regression": ("", "4", lambda found: found["test_r2"][-1] > found["test_r2"][0]),
    "language": ("", "3", lambda found: found["test_accuracy"][-1] > 0.1),
    "flower_datasets": ("flwr_datasets", "3", lambda found: True),
    "lightning_module": ("lightning", "2", lambda found: found["test_top3_accuracy"][-1] > found["test_accuracy"][-1]),
}
"""Examples that print a table: the package that they need, the rounds, and what else holds."""


@pytest.mark.parametrize("script", LEARN)
def test_an_example_learns(tmp_path, script):
    package, rounds, holds = LEARN[script]
    if package:
        need(package)
    found = columns(run(tmp_path, script, ROUNDS=rounds))
    assert found["test_loss"][-1] < found["test_loss"][0]
    assert holds(found)


WRITE = {
    "quickstart": ({"ROUNDS": "2"}, ("FedAvg", "FedAMS"), "quickstart.html"),
    "resnet": ({"DATA": "fashion-mini", "ROUNDS": "1", "SEEDS": "2"}, ("FedAvg", "FedAMS"), "resnet.pdf"),
    "paper_figure": ({"SCALE": "smoke"}, ("Figure 4: ", "FedCAMS, top-k 1/256"), "figure-4.pdf"),
}
"""Examples that write a page or a figure: their variables, words that they print, and the file."""


@pytest.mark.parametrize("script", WRITE)
def test_an_example_writes_a_page_or_a_figure(tmp_path, script):
    pytest.importorskip("matplotlib")
    variables, words, file = WRITE[script]
    output = run(tmp_path, script, **variables)
    assert all(word in output for word in words)
    assert (tmp_path / file).stat().st_size > 1000


def test_adapters_of_peft_on_a_model_of_transformers(tmp_path):
    pytest.importorskip("peft", reason="adapters by peft are not exercised: pip install 'hansa[peft]'")
    output = run(tmp_path, "peft_lora", ROUNDS="3")
    assert output.startswith("1024 of 27392 parameters")
    found = columns(output.split("\n", 1)[1])
    assert found["test_loss"][-1] < found["test_loss"][0]
    assert found["up_bytes"][0] < 6 * (4 * 1024 + 200)


def test_lora_trains_and_sends_the_corrections_alone(tmp_path):
    output = run(tmp_path, "lora", ROUNDS="3")
    trained = int(output.split()[0])
    assert trained == 4 * (784 + 256) + 4 * (256 + 256) + 2570
    found = columns(output.split("\n", 1)[1])
    assert max(found["test_accuracy"]) > 0.3
    assert found["up_bytes"][0] < 6 * (4 * trained + 200)


def numbers(text, name):
    """The numbers of the line that begins with a name."""
    line = next(line for line in text.splitlines() if line.startswith(name + " "))
    return [float(word) for word in re.findall(r"[\d.]+", line[len(name) :])]


def test_a_new_method(tmp_path):
    output = run(tmp_path, "new_method", ROUNDS="2")
    assert "2 seeds each" in output
    assert numbers(output, "FedAvg") != numbers(output, "restarted")


def test_topologies(tmp_path):
    pytest.importorskip("matplotlib")
    output = run(tmp_path, "topology_study", ROUNDS="1")
    assert numbers(output, "silence")[:2] == [1, 0]
    assert numbers(output, "ring")[:2] == [0.805, 64]  # two neighbours, 32 clients; rho = (1 + sqrt 2) / 3
    assert numbers(output, "complete")[:2] == [0, 224]
    assert (tmp_path / "topologies.pdf").stat().st_size > 1000


def test_compressors(tmp_path):
    pytest.importorskip("matplotlib")
    output = run(tmp_path, "compression_study", ROUNDS="1")
    sent = {name: numbers(output, name)[0] for name in ("none", "16 bits", "quantized", "sign", "top 1/64")}
    assert sorted(sent, key=sent.get, reverse=True) == list(sent)
    assert sent["none"] / sent["sign"] == pytest.approx(32, rel=0.03)
    assert (tmp_path / "compression.pdf").stat().st_size > 1000


def test_methods_ranked_for_links(tmp_path):
    output = run(tmp_path, "link_speeds", lines=60, ROUNDS="4", TARGET="0.2")
    phones, campus = output.split("seconds to 20% on the links of ")[1:]
    gossip = []
    for ranking in phones, campus:
        seconds = [float(line.split()[-1]) for line in ranking.splitlines()[1:]]
        assert len(seconds) == 4
        assert seconds == sorted(seconds)
        assert max(seconds) < float("inf")
        gossip.append(float(ranking.split("HA-Fed, ring")[1].split()[0]))
    assert gossip[0] > 8 * gossip[1]  # after each of ten steps 0.2 s, and 116 kB at 100 kB/s to each neighbour


def test_a_federation_on_loopback_is_the_simulation(tmp_path):
    output = run(tmp_path, "loopback", lines=41, ROUNDS="2")
    assert "equal to the simulation: True" in output
    assert len(columns(output)["up_bytes"]) == 2


def test_the_page_names_every_example():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+)`", "\n".join(line.split("|")[1] for line in page.splitlines() if "|" in line)))
    places = [one for one in EXAMPLES.iterdir() if one.suffix in (".py", ".ipynb") or one.is_dir()]
    assert {name.split("/")[0] for name in named} == {one.name for one in places if one.name != "__pycache__"}


def test_sites_of_csv_files_with_their_aucs_an_export_and_predictions(tmp_path):
    output = run(tmp_path, "sites", ROUNDS="3")
    aucs = [float(word) for word in re.search(r"AUC by site: \[(.*?)\]", output)[1].split()]
    assert len(aucs) == 5
    assert all(0.7 < value <= 1 for value in aucs)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    run(tmp_path, "sites", "sites", ROUNDS="1")  # with the files that are there now


NOTEBOOK = """
import json, logging, sys
from pathlib import Path

logging.getLogger("hansa").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("hansa").setLevel(logging.INFO)
cells = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]
for number, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), globals())
print("shown", *(globals()[name]._repr_html_()[:6] for name in sys.argv[2:]))
"""


def test_the_notebook_runs_cell_by_cell_with_two_workers(tmp_path):
    """Its cells are executed in __main__, as a kernel does it."""
    (tmp_path / "kernel.py").write_text(NOTEBOOK)
    notebook = str(EXAMPLES / "notebook.ipynb")
    output = run(tmp_path, tmp_path / "kernel.py", notebook, "run", "method", "clients", ROUNDS="2")
    assert output.count("2 workers: processes") == 3
    assert "serially" not in output
    assert "shown <table <table <div><" in output
    saved = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in saved["cells"])


def test_the_notebook_of_a_study_runs_cell_by_cell(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "kernel.py").write_text(NOTEBOOK)
    study = str(EXAMPLES / "study.ipynb")
    output = run(tmp_path, tmp_path / "kernel.py", study, "comparison", "run", "clients", ROUNDS="2")
    assert "ring() 0.805" in output
    assert "exponential() 0.5" in output
    assert "shown <table <table <div><" in output
    assert (tmp_path / "gossip.pdf").stat().st_size > 1000
    assert (tmp_path / "gossip.html").exists()
    saved = json.loads((EXAMPLES / "study.ipynb").read_text())
    outputs = [output for cell in saved["cells"] for output in cell.get("outputs", ())]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/png" in kinds  # the figure
    assert kinds.count("text/html") >= 2  # the clients, the comparison
    text = json.dumps([output.get("data", {}).get("text/plain", "") for output in outputs])
    assert re.search(r"'sigma_within': [\d.]+, 'sigma_between': [\d.]+", text)  # the variances that it names
    assert "None" not in text


@pytest.mark.parametrize("name", ["notebook", "study"])
def test_a_notebook_installs_hansa_only_where_it_is_missing(name, monkeypatch):
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    first = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
    called = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: called.append(command))
    exec(first, {})
    assert called == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(first, {})
    assert called == [[sys.executable, "-m", "pip", "install", "--quiet", "hansa[plot]"]]


def test_an_estimator_of_scikit_learn(tmp_path: Path) -> None:
    need("sklearn")
    output = run(tmp_path, "sklearn_sites", ROUNDS="8")
    assert float(output.split()[1]) > 0.8
    assert "best: {'federatedclassifier__rounds': 8}" in output


def test_a_schema_of_a_fitted_transformer(tmp_path: Path) -> None:
    need("sklearn")
    output = run(tmp_path, "sklearn_schema")
    assert all(text in output for text in ('"mean":60.9', '"std":8.67', '["cardio","icu","surgery"]'))
    assert float(output.rsplit(maxsplit=1)[1]) < 1e-6


SMALL = ["rounds=2", "data.clients=6", "+model.name=logistic", "local.steps=2", "local.batch_size=10"]


def test_runs_of_hydra_and_a_multirun(tmp_path: Path) -> None:
    need("hydra")
    run(tmp_path, "hydra_config", *SMALL, "algorithm.preset=fedams", "+server.lr=0.3", "hydra.run.dir=one")
    text = "{rounds: 2, algorithm: fedams, server: {lr: 0.3}, data: {clients: 6}, model: logistic, "
    same = from_yaml(text + "local: {lr: 0.05, steps: 2, batch_size: 10}}")
    assert load(tmp_path / "one" / "run" / "config.yaml") == same
    output = run(
        tmp_path, "hydra_config", "--multirun", *SMALL, "algorithm.preset=fedavg,fedprox", "+seeds=2",
        "hydra.sweep.dir=many",
    )  # fmt: skip
    assert [line.split()[0] for line in output.splitlines() if "seeds [0, 1]" in line] == ["fedavg", "fedprox"]
    assert sorted(path.name for path in (tmp_path / "many").iterdir() if path.is_dir()) == ["0", "1"]


def test_a_trial_of_wandb(tmp_path: Path) -> None:
    need("wandb")
    output = run(tmp_path, "wandb_sweep", ROUNDS="3", WANDB_MODE="offline", WANDB_SILENT="true")
    value = float(re.search(r"validation/test_accuracy ([\d.]+)", output)[1])  # type: ignore[index]
    assert value > 0.3
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1
