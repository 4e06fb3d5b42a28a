"""The clients on the page: in order, with the right numbers, small, and inert whatever they are called."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import hansa
from hansa import presets
from hansa.runs.client_columns import ClientColumns, summarize_clients
from hansa.study import report
from hansa.study.report.client_view import MethodClients, clients_section
from runs.people import owned_task


def columns(accuracy: list[float]) -> ClientColumns:
    count = len(accuracy)
    return ClientColumns(
        client=np.arange(count),
        asked=np.full(count, 4),
        participations=np.arange(count),
        up_bytes=np.full(count, 1250),
        test_accuracy=np.array(accuracy, np.float32),
        loss=np.ones(count, np.float32),
    )


class Cells(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_the_worst_come_first_with_their_own_numbers() -> None:
    accuracy = [0.9, 0.2, float("nan"), 0.5, 0.7]
    cells = Cells(clients_section([MethodClients("m", "#123456", columns(accuracy))])).rows
    assert [row[0] for row in cells[1:]] == ["client 1", "client 3", "client 4", "client 0"]
    assert cells[0][1:] == ["test accuracy", "loss", "participations", "up"]
    assert cells[1][1:] == ["20.0%", "1", "1", "10 kbit"]


def test_the_words_are_the_spread() -> None:
    accuracy = np.random.default_rng(0).random(37).astype(np.float32).tolist()
    mean, deviation, worst = summarize_clients(accuracy, lower_is_better=False)
    text = clients_section([MethodClients("m", "#123456", columns(accuracy))])
    assert f"mean {100 * mean:.1f}%, deviation {100 * deviation:.1f}%, worst tenth {100 * worst:.1f}%" in text
    assert text.count('class="worst" d="') == 1
    assert re.search(r'class="worst" d="([^"]*)"', text)[1].count("M") == 4  # 37 clients: four of them


def test_names_labels_and_colours_are_inert() -> None:
    bad = '"><script>alert(1)</script>'
    made = MethodClients(bad, bad, columns([0.5, 0.1]), [[3, 1], [0, 2]], [bad, "b"], bad)
    text = clients_section([made])
    assert "script" not in Cells(text).tags
    assert "3 of &quot;&gt;&lt;script&gt;" in text


def test_ten_thousand_clients_stay_small() -> None:
    many = np.random.default_rng(1).random(10_000).tolist()
    text = clients_section([MethodClients(f"m{n}", "#123456", columns(many), [[5] * 10] * 10_000) for n in range(20)])
    assert len(text) < 600_000


def test_a_run_a_folder_and_seeds_have_it_on_their_page(tmp_path) -> None:
    made = presets.fedavg(steps=2, batch_size=4, participation=0.5)
    run = hansa.run(made, owned_task(7), rounds=3, out=tmp_path / "x", name="one")
    living = run.report(tmp_path / "a.html").read_text()
    folder = report.render_page([report.ReportEntry.from_folder(tmp_path / "x")])
    worst = run.clients().at_round(3)
    lowest = int(worst["client"][np.nanargmin(worst["test_accuracy"])])
    for page in (living, folder):
        assert 'section class="card" id="clients"' in page
        assert f"client {lowest}</td>" in page
        assert "labels held" in page
    several = hansa.run(made, owned_task(7), rounds=2, seeds=2).report(tmp_path / "b.html").read_text()
    assert "seed 0, the first of 2" in several


def test_nothing_is_said_where_nothing_is_known(tmp_path, caplog) -> None:
    assert clients_section([]) == ""
    hansa.run(presets.fedavg(steps=1), owned_task(5), rounds=1, out=tmp_path / "x")
    path = tmp_path / "x" / "clients.columns"
    path.write_bytes(b"HCC1" + b"\0" * 40)
    page = report.render_page([report.ReportEntry.from_folder(tmp_path / "x")])
    assert 'id="clients"' not in page
    assert "clients.columns" in caplog.text
    path.unlink()
    assert 'id="clients"' not in report.render_page([report.ReportEntry.from_folder(tmp_path / "x")])
    with pytest.raises(hansa.HansaError, match="at least one run"):
        report.render_page([])
