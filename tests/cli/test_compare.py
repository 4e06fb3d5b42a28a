"""``hansa compare``, ``hansa report`` and ``hansa demo``."""

from __future__ import annotations

import json
import re

from hansa.cli.compare import METHODS
from hansa.runs.folder import RunFolder


def ranked(text):
    """Rank and name of each row of a printed table."""
    return re.findall(r"^ *(\d+) +(.+?)  +\d", text, flags=re.MULTILINE)


def compared(folder, name):
    """The configuration with which a method was compared."""
    (path,) = (folder / "runs" / "compare").glob(f"{name}-*")
    return RunFolder(path).config


def test_presets_take_the_setting_of_a_file_and_say_what_they_do_not_take(cli, folder):
    ams = "algorithm: fedams\nserver: {lr: 0.7, eps: 1e-4, weights: samples}\ncompress: {compressor: sign}\n"
    (folder / "ams.yaml").write_text((folder / "small.yaml").read_text("utf-8") + ams + "sample: {count: 3}\n")
    result = cli.ok("compare", "fedavg", "fedams", "cafga", "-c", "ams.yaml", "-q", "-r", "1", "-s", "local.steps=1")
    assert sorted(name for _, name in ranked(result.stdout)) == ["cafga", "fedams", "fedavg"]
    assert (folder / "report.html").read_text("utf-8").count('data-run="') == 3
    for name in ("fedavg", "fedams", "cafga"):
        config, own = compared(folder, name), name == "fedams"  # the file's own method is the file's
        assert config.algorithm.preset == name
        assert (config.sample is None) == (name == "cafga")  # whose reporters are those of its clusters
        assert (config.local.lr, config.local.steps, config.server.weights) == (0.05, 1, "samples")
        assert (config.server.lr, config.server.eps) == ((0.7, 1e-4) if own else (None, None)), name
        assert (config.compress.compressor is not None) == own
        left_out = "server, compress, sample" if name == "cafga" else "server, compress"
        assert (f"{name}: not taken from ams.yaml: {left_out}" in result.stderr) == (not own)


def test_files_and_finished_runs_compare_without_running_them_again(cli, folder):
    cli.ok("run", "small.yaml", "-o", "done", "-q")
    before = (folder / "done" / "summary.json").stat().st_mtime_ns
    (folder / "other.yaml").write_text((folder / "small.yaml").read_text("utf-8").replace("name: small", "name: other"))
    result = cli.ok("compare", "done", "other.yaml", "-q", "--report", "both.html")
    assert {name for _, name in ranked(result.stdout)} == {"small", "other"}
    assert (folder / "done" / "summary.json").stat().st_mtime_ns == before
    assert (folder / "both.html").exists()


def test_a_report_is_made_of_folders(cli, folder):
    for seed in (0, 1):
        cli.ok("run", "small.yaml", "-o", f"s{seed}", "-q", "--seed", seed)
    cli.ok("run", "small.yaml", "-o", "other", "-q", "-s", "local.lr=0.2")
    cli.ok("report", "s0", "other", "s1", "-o", "page.html", "--title", "Two seeds")
    page = (folder / "page.html").read_text("utf-8")
    assert "<title>Two seeds</title>" in page
    assert "mcmahan2017" in page
    first, second = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))["runs"]
    assert (first["name"], first["seeds"]) == ("small", [0, 1])  # seeds are no methods
    assert (second["name"], second["seeds"]) == ("other", [None])


def test_the_demo_prints_a_ranked_table_of_all_its_methods_and_writes_the_report(cli, folder):
    result = cli.ok("demo", "--tiny", "--workers", "1")
    rows = ranked(result.stdout)
    assert [int(place) for place, _ in rows] == list(range(1, len(METHODS) + 1))
    assert {name for _, name in rows} == set(METHODS)
    page = (folder / "report.html").read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    for run in data["runs"]:
        for axis in ("round", "bits", "simulated_total_seconds"):
            assert len(run["series"][0][axis]) == 2, (run["name"], axis)
    assert "Label distribution" in page
    (place,) = (folder / "runs" / "demo").glob("fedavg-*")
    assert RunFolder(place).config.data.name == "fashion-mini"
    assert f"report: {(folder / 'report.html').as_uri()}" in result.stdout
