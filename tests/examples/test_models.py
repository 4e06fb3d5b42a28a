"""Examples of models and data of one's own, each run as it stands at a tiny size."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder, name, *arguments, lines=40, **more):
    script = EXAMPLES / f"{name}.py"
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


def test_a_resnet_of_ones_own_with_crops_seeds_and_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    output = run(tmp_path, "resnet", DATA="fashion-mini", ROUNDS="1", SEEDS="2")
    assert "FedAvg" in output
    assert "FedAMS" in output
    assert (tmp_path / "resnet.pdf").stat().st_size > 1000


def test_regression(tmp_path):
    found = columns(run(tmp_path, "regression", ROUNDS="4"))
    assert found["test_loss"][-1] < found["test_loss"][0]
    assert found["test_r2"][-1] > found["test_r2"][0]


def test_a_language_model_with_dict_inputs(tmp_path):
    found = columns(run(tmp_path, "language", ROUNDS="3"))
    assert found["test_loss"][-1] < found["test_loss"][0]
    assert found["test_accuracy"][-1] > 0.1


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
