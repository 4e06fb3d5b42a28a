"""Examples with other packages run where the package is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.test_models import columns, run
from hansa.config import from_yaml, load

ROOT = Path(__file__).parents[2]
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


def test_a_partitioner_of_flower(tmp_path: Path) -> None:
    need("flwr_datasets")
    found = columns(run(tmp_path, "flower_datasets", ROUNDS="3"))
    assert found["test_loss"][-1] < found["test_loss"][0]


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


def test_a_lightning_module(tmp_path: Path) -> None:
    need("lightning")
    found = columns(run(tmp_path, "lightning_module", ROUNDS="2"))
    assert found["test_loss"][-1] < found["test_loss"][0]
    assert found["test_top3_accuracy"][-1] > found["test_accuracy"][-1]
