"""First steps, a new method, studies, a figure, a loopback: each run as it stands at a tiny size, and checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.test_models import columns, run

ROOT = Path(__file__).parents[2]


def numbers(text, name):
    """The numbers of the line that begins with a name."""
    line = next(line for line in text.splitlines() if line.startswith(name + " "))
    return [float(word) for word in re.findall(r"[\d.]+", line[len(name) :])]


def test_first_steps(tmp_path):
    output = run(tmp_path, "quickstart", ROUNDS="2")
    assert "FedAvg" in output
    assert "FedAMS" in (tmp_path / "quickstart.html").read_text(encoding="utf-8")


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


def test_a_figure_of_a_paper(tmp_path):
    pytest.importorskip("matplotlib")
    output = run(tmp_path, "paper_figure", SCALE="smoke")
    assert output.startswith("Figure 4: ")
    assert "FedCAMS, top-k 1/256" in output
    assert (tmp_path / "figure-4.pdf").stat().st_size > 1000


def test_a_federation_on_loopback_is_the_simulation(tmp_path):
    output = run(tmp_path, "loopback", ROUNDS="2")
    assert "equal to the simulation: True" in output
    assert len(columns(output)["up_bytes"]) == 2


def test_the_page_names_every_example():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+)`", "\n".join(line.split("|")[1] for line in page.splitlines() if "|" in line)))
    places = [one for one in (ROOT / "examples").iterdir() if one.suffix in (".py", ".ipynb") or one.is_dir()]
    assert {name.split("/")[0] for name in named} == {one.name for one in places if one.name != "__pycache__"}
