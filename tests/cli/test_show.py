"""What each client did, on the command line."""

from __future__ import annotations

import csv
import json

import numpy as np

from hansa.runs.folder import RunFolder

OWNED = """\
rounds: 4
workers: 1
data: {name: fashion-mini, clients: 15, test_clients: labels}
model: logistic
local: {lr: 0.05, steps: 2, batch_size: 10}
sample: {count: 4}
evaluate: {per_client: 2, personalise: {steps: 1}}
"""


def test_show_and_export_have_every_client(cli, folder):
    (folder / "owned.yaml").write_text(OWNED)
    assert cli("run", "owned.yaml", "-o", "out", "--quiet").exit_code == 0
    rows = RunFolder("out").clients()
    text = cli("show", "out", "--clients").stdout
    assert "15 clients" in text
    assert "worst tenth" in text
    by = json.loads(cli("show", "out", "--clients", "--json").stdout)
    assert by["client"] == list(range(15))
    assert sum(by["participations"]) == 16
    assert np.allclose(by["test_loss"], rows.at_round(4)["test_loss"])
    plain = cli("show", "out").stdout
    assert "worst tenth of clients" in plain
    assert "after steps of their own" in plain
    assert cli("export", "out", "-o", "clients.csv").exit_code == 0
    with (folder / "clients.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == rows.rows
    assert [float(row["personal_loss"]) for row in table if row["personal_loss"]] == [
        value for value in rows["personal_loss"].astype(str).astype(float) if value == value
    ]
    assert cli("export", "out", "-o", "clients.npz").exit_code == 0
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["client_accuracy_worst"] == RunFolder("out").history[-1]["client_accuracy_worst"]


def test_a_run_whose_tests_nobody_owns_is_shown_by_training_loss(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "--quiet").exit_code == 0
    text = cli("show", "out", "--clients").stdout
    assert "the highest loss first" in text
    (folder / "out" / "clients.columns").unlink()
    found = cli("show", "out", "--clients")
    assert found.exit_code != 0
    assert "has no record of clients" in found.output
