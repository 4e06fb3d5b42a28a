"""The examples run as they stand, at a tiny size: each short, without a warning, with numbers that make sense."""

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

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(folder, script, *arguments, rounds=2):
    environment = {**os.environ, "ROUNDS": str(rounds), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", str(script), *arguments]
    return warm.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


def test_sites_of_csv_files_with_their_aucs_an_export_and_predictions(tmp_path):
    script = EXAMPLES / "sites.py"
    assert len(script.read_text().splitlines()) < 40
    done = run(tmp_path, script, rounds=3)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    aucs = [float(word) for word in re.search(r"AUC by site: \[(.*?)\]", done.stdout)[1].split()]
    assert len(aucs) == 5
    assert all(0.7 < value <= 1 for value in aucs)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    again = run(tmp_path, script, "sites", rounds=1)  # with the files that are there now
    assert again.returncode == 0, again.stderr


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
    done = run(tmp_path, "kernel.py", str(EXAMPLES / "notebook.ipynb"), "run", "method", "clients")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 workers: processes") == 3
    assert "serially" not in done.stdout
    assert "shown <table <table <div><" in done.stdout
    saved = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in saved["cells"])


def test_the_notebook_of_a_study_runs_cell_by_cell(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "kernel.py").write_text(NOTEBOOK)
    done = run(tmp_path, "kernel.py", str(EXAMPLES / "study.ipynb"), "found", "run", "clients")
    assert done.returncode == 0, done.stderr
    assert "ring() 0.805" in done.stdout
    assert "exponential() 0.5" in done.stdout
    assert "shown <table <table <div><" in done.stdout
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
