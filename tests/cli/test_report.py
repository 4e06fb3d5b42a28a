"""Folders that cannot be read are named on the page, and the rest is drawn."""

from __future__ import annotations

import json

from hansa.runs.record import RunRecord
from recorded import begin_record


def test_a_damaged_run_is_named_and_the_rest_is_drawn(cli, folder):
    assert cli("run", "small.yaml", "-o", "good", "-q").exit_code == 0
    assert cli("run", "small.yaml", "-o", "bad", "-q", "--seed", "1").exit_code == 0
    record = folder / "bad" / "run.db"
    record.write_bytes(record.read_bytes().replace(b'"round": 2', b'"round": 7'))
    begin_record(folder / "begun")
    (folder / "begun" / "config.yaml").write_text((folder / "good" / "config.yaml").read_text("utf-8"))
    made = cli("report", "good", "bad", "begun", "gone")
    assert made.exit_code == 0, made.output
    page = (folder / "report.html").read_text("utf-8")
    for output in (
        "run.db is damaged: round 2",
        "begun: no completed round yet",
        "gone: not a run folder",
    ):
        assert output in page
    assert '<tr data-run="0">' in page
    assert cli("report", "good", "--figure", "curves.pdf").exit_code == 0
    assert (folder / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert cli("report", "bad").exit_code == 2


def test_who_held_what_is_drawn_of_a_run_that_lies_on_disk(cli, folder):
    assert cli("run", "small.yaml", "-o", "one", "-q").exit_code == 0
    assert cli("report", "one").exit_code == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "Label distribution" in page
    assert "clients 0 to 5" in page
    (folder / "one" / "partition.safetensors").write_bytes(b"\xff" * 40)
    assert cli("report", "one").exit_code == 0
    assert "Label distribution" not in (folder / "report.html").read_text("utf-8")


def test_files_of_a_finished_run_that_were_cut_are_named_on_the_page_and_by_every_command(cli, folder):
    assert cli("run", "small.yaml", "-o", "run", "-q").exit_code == 0
    assert cli("run", "small.yaml", "-o", "good", "-q", "--seed", "1").exit_code == 0
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
        rounds = list(zip([each.record for each in record.rounds()], record.client_blocks(), strict=True))
    (folder / "run" / "run.db").unlink()
    with RunRecord.create(folder / "run") as record:
        for values, (_, block) in rounds[:-1]:
            record.add_round(values, block)
        record.commit()
    all_say("does not agree with the record")
