"""``hansa show``: the summary of a run and its clients."""

from __future__ import annotations

import csv
import json
import re

import numpy as np

from hansa.runs.folder import RunFolder
from hansa.runs.record import RunRecord
from recorded import begin_record

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
    cli.ok("run", "owned.yaml", "-o", "out", "--quiet")
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
    cli.ok("export", "out", "-o", "clients.csv")
    with (folder / "clients.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == rows.rows
    assert [float(row["personal_loss"]) for row in table if row["personal_loss"]] == [
        value for value in rows["personal_loss"].astype(str).astype(float) if value == value
    ]
    cli.ok("export", "out", "-o", "clients.npz")
    summary = json.loads((folder / "out" / "summary.json").read_text("utf-8"))
    assert summary["client_accuracy_worst"] == RunFolder("out").history[-1]["client_accuracy_worst"]


def test_a_run_whose_tests_nobody_owns_is_shown_by_training_loss(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "--quiet")
    text = cli("show", "out", "--clients").stdout
    assert "sorted by loss, highest first" in text
    (folder / "out" / "run.db").unlink()
    found = cli("show", "out", "--clients")
    assert found.exit_code != 0
    assert "run.db is missing" in " ".join(found.output.split())


def test_show_tells_the_numbers_and_the_last_rounds(cli):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    text = cli("show", "out").stdout
    assert "out (finished)" in text
    assert re.search(r"^ +3 +[\d.]+% ", text, re.MULTILINE)  # the last round
    output = json.loads(cli("show", "out", "--json").stdout)
    assert output["summary"]["rounds"] == 3
    assert output["config"]["data"]["clients"] == 6


def test_show_of_a_run_under_way_or_killed_is_made_from_its_rounds(cli, folder):
    cli.ok("run", "small.yaml", "-o", "out", "-q")
    (folder / "out" / "summary.json").unlink()
    assert "out (unfinished)" in cli("show", "out").stdout


def test_a_damaged_run_is_named_and_the_rest_is_drawn(cli, folder):
    cli.ok("run", "small.yaml", "-o", "good", "-q")
    cli.ok("run", "small.yaml", "-o", "bad", "-q", "--seed", "1")
    record = folder / "bad" / "run.db"
    record.write_bytes(record.read_bytes().replace(b'"round": 2', b'"round": 7'))
    begin_record(folder / "begun")
    (folder / "begun" / "config.yaml").write_text((folder / "good" / "config.yaml").read_text("utf-8"))
    cli.ok("report", "good", "bad", "begun", "gone")
    page = (folder / "report.html").read_text("utf-8")
    for output in (
        "run.db is damaged: round 2",
        "begun: no completed round yet",
        "gone: not a run folder",
    ):
        assert output in page
    assert '<tr data-run="0">' in page
    cli.ok("report", "good", "--figure", "curves.pdf")
    assert (folder / "curves.pdf").read_bytes().startswith(b"%PDF")
    cli.refused("report", "bad")


def test_who_held_what_is_drawn_of_a_run_that_lies_on_disk(cli, folder):
    cli.ok("run", "small.yaml", "-o", "one", "-q")
    cli.ok("report", "one")
    page = (folder / "report.html").read_text("utf-8")
    assert "Label distribution" in page
    assert "clients 0 to 5" in page
    (folder / "one" / "partition.safetensors").write_bytes(b"\xff" * 40)
    cli.ok("report", "one")
    assert "Label distribution" not in (folder / "report.html").read_text("utf-8")


def test_files_of_a_finished_run_that_were_cut_are_named_on_the_page_and_by_every_command(cli, folder):
    cli.ok("run", "small.yaml", "-o", "run", "-q")
    cli.ok("run", "small.yaml", "-o", "good", "-q", "--seed", "1")
    config = (folder / "run" / "config.yaml").read_bytes()

    def all_say(words):
        for command in (["show", "run"], ["export", "run", "-o", "a.csv"], ["export", "run", "-o", "a.safetensors"]):
            assert words in " ".join(cli(*command).output.split()), command
        compared = cli("compare", "run", "good", "--json", "--report", "page.html")
        assert words in " ".join(json.loads(compared.stdout)["notes"])
        assert words in json.loads(cli("show", "run", "--json").stdout)["notes"][0]
        assert words in (folder / "page.html").read_text("utf-8")

    assert "notes" not in json.loads(cli("show", "run", "--json").stdout)
    (folder / "run" / "config.yaml").write_bytes(b"")
    all_say("not the configuration that the run ended with")
    (folder / "run" / "config.yaml").write_bytes(config)
    with RunRecord(folder / "run") as record:
        rounds = list(zip([each for each, _ in record.rounds()], record.client_blocks(), strict=True))
    (folder / "run" / "run.db").unlink()
    with RunRecord.create(folder / "run") as record:
        for values, (_, block) in rounds[:-1]:
            record.add_round(values, block)
        record.commit()
    all_say("contradicts the record")
