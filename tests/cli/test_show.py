"""``hansa show``: the summary of a run and its clients."""

from __future__ import annotations

import csv
import json
import re

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
    assert "worst tenth" in plain
    assert "personal accuracy" in plain
    assert cli("export", "out", "-o", "clients.csv").exit_code == 0
    with (folder / "clients.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == rows.rows
    assert [float(row["personal_loss"]) for row in table if row["personal_loss"]] == [
        value for value in rows["personal_loss"].astype(str).astype(float) if value == value
    ]
    assert cli("export", "out", "-o", "clients.npz").exit_code == 0
    summary = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    assert summary["client_accuracy_worst"] == RunFolder("out").history[-1]["client_accuracy_worst"]


def test_a_run_whose_tests_nobody_owns_is_shown_by_training_loss(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "--quiet").exit_code == 0
    text = cli("show", "out", "--clients").stdout
    assert "sorted by loss, highest first" in text
    (folder / "out" / "run.db").unlink()
    found = cli("show", "out", "--clients")
    assert found.exit_code != 0
    assert "run.db is missing" in " ".join(found.output.split())


def test_show_tells_the_numbers_and_the_last_rounds(cli):
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    text = cli("show", "out").stdout
    assert "out (finished)" in text
    assert re.search(r"^ +3 +[\d.]+% ", text, re.MULTILINE)  # the last round
    output = json.loads(cli("show", "out", "--json").stdout)
    assert output["summary"]["rounds"] == 3
    assert output["config"]["data"]["clients"] == 6


def test_show_of_a_run_under_way_or_killed_is_made_from_its_rounds(cli, folder):
    assert cli("run", "small.yaml", "-o", "out", "-q").exit_code == 0
    (folder / "out" / "summary.json").unlink()
    assert "out (unfinished)" in cli("show", "out").stdout
