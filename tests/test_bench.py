"""The benchmark against other frameworks: its workloads, and the check that all contenders compute the same thing.

The peers are not installed here; `make bench` checks them in the same way before it times them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hansa import data, presets
from hansa.core import native

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("W1", "W2")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which are found from its folders alone."""
    path, before, threads = list(sys.path), set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    try:
        parts = ("agreement", "contenders", "page", "points", "tables", "workloads")
        found = {name: importlib.import_module(f"harness.{name}") for name in parts}
        scripts = ("hansa_run", "modules", "plain", "ratios", "vectors")
        found |= {name: importlib.import_module(name) for name in scripts}
        yield SimpleNamespace(**found)
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def distance(
    bench: SimpleNamespace, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, **job: Any
) -> float:
    """How far the model of a script, run in this process on noise, is from the reference's."""
    if native.instruction_set() is None and job.get("variant") in ("workers=1 own", "workers=1 catalogue"):
        pytest.skip("no native kernels here")
    workload = replace(bench.workloads.WORKLOADS[name], clients=4, batch=10, rows=60, partition=data.iid())
    draw = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(60, 1, 28, 28, generator=draw), torch.randint(0, 10, (60,), generator=draw)
    bench.workloads.write(workload, data.Dataset("noise", inputs, targets), folder / "data")
    bench.agreement.write_small(workload, folder / "small", folder / "data" / f"{name}.npz")
    small, start = bench.agreement.small(workload), folder / "data" / f"{name}-start.npz"
    settings = {
        **{key: getattr(small, key) for key in ("model", "clients", "cohort", "steps", "batch", "lr", "rounds")},
        "data": str(folder / "small" / f"{name}.npz"),
        "start": str(start),
        "save": str(folder / "saved.npz"),
        "answer": str(folder / "answer.json"),
        "seed": 0,
        **job,
    }
    (folder / "job.json").write_text(json.dumps(settings))
    monkeypatch.setattr(sys, "argv", ["", str(folder / "job.json")])
    getattr(bench, script).main()
    assert len(json.loads((folder / "answer.json").read_text())["seconds"]) == settings["rounds"]
    wanted = bench.agreement.reference(small, folder / "small" / f"{name}.npz", start)
    with pytest.raises(ValueError, match="in place of"):
        bench.agreement.distance(folder / "saved.npz", {**wanted, "more": torch.zeros(1)}, start)
    return float(bench.agreement.distance(folder / "saved.npz", wanted, start))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("script", "variant"),
    [
        ("plain", ""),
        ("hansa_run", "workers=1 own"),
        ("hansa_run", "workers=1 own eager"),
        ("hansa_run", "workers=1 catalogue"),
    ],
)
def test_a_contender_comes_to_the_model_of_the_reference(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, variant: str
) -> None:
    found = distance(bench, name, tmp_path, monkeypatch, script, variant=variant)
    assert bench.agreement.agrees(found), found


@pytest.mark.parametrize("wrong", [{"steps": 2}, {"lr": 0.009}, {"rounds": 1}, {"batch": 5}])
def test_other_work_is_not_taken_for_the_same(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    assert not bench.agreement.agrees(distance(bench, "W2", tmp_path, monkeypatch, "plain", **wrong))
    assert [bench.agreement.agrees(told) for told in (0.3, float("nan"), "took longer than 300 s")] == [False] * 3


def test_a_set_that_is_not_there_is_replaced_by_its_embedded_part(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSA_DATA", str(tmp_path))
    found, note = bench.workloads.fashion()
    assert found.inputs.shape[1:] == found.test_inputs.shape[1:] == (1, 28, 28)
    assert "fashion-mini" in note
    assert "hansa data get fashion-mnist" in note


def test_the_page_compares_with_the_fastest_peer_and_names_who_computes_something_else(bench: SimpleNamespace) -> None:
    run = {"reason": "", "wall": 2.5, "peak": 3 << 20, "seconds": [0.1] * 100, "rate": 50.0}
    names = ["hansa-own-2", "pfl", "fedjax"]
    results: dict[str, Any] = {
        "machine": {"machine": "two cores"},
        "note": "noise",
        "runs": {w: {name: [dict(run, rate=100.0 if "own" in name else 50.0)] for name in names} for w in NAMES},
        "accuracy": {w: dict.fromkeys(names, 0.8) for w in NAMES},
        "loss": {w: dict.fromkeys(names, 0.6) for w in NAMES},
        "agreement": {w: dict.fromkeys(names, 2e-6) for w in NAMES},
        "missing": {},
    }
    text = bench.page.page(results, "make bench")
    assert "W1: Hansa, own class with forward(), 2 workers: 2.00 times the client-steps of the fastest peer" in text
    assert "yes, all within 2e-06 (at most 0.05)" in text
    assert "they agree" in text
    results["agreement"]["W2"] |= {"pfl": 0.3, "fedjax": "took longer than 300 s"}
    assert "W2: models of the job without randomness are the reference's: **not those of pfl, fedjax**" in (
        bench.page.page(results, "")
    )


def test_every_table_that_is_measured_is_on_the_page(bench: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as told:
        bench.points.Points(tmp_path, print).all(["no such table"])
    names = str(told.value).partition("there are ")[2].split(", ")
    assert set(names) == set(bench.tables.TABLES)
    assert {"", ", complete", ", star", ", random"} == set(bench.ratios.GRAPHS)
    timed = bench.vectors.operations(torch.linspace(-1, 1, 128))
    for name in ("sign", "top_k(1/64)", "random_k(1/64)", "quantize(16)", "cast(bfloat16)", "grid(0.5)", "identity"):
        assert {f"{name} {way}" for way in ("encode", "decode", "accumulate")} <= set(timed)


SPEC = importlib.util.spec_from_file_location("defaults", BENCHMARKS / "studies" / "defaults.py")
assert SPEC is not None
assert SPEC.loader is not None
defaults: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(defaults)
RECORDED = json.loads(defaults.RESULTS.read_text())


def test_every_preset_was_measured() -> None:
    assert RECORDED.keys() == defaults.GRIDS.keys() == presets.catalogue().keys()


@pytest.mark.parametrize("name", presets.catalogue())
def test_a_default_is_the_measured_one_and_close_to_the_best(name: str) -> None:
    table = RECORDED[name]
    default = defaults.label(defaults.defaults_of(name))
    assert list(table[default]) == defaults.settings_of(name)
    assert len(table) >= 3
    points = defaults.shortfall(table, default)
    assert points <= defaults.EXCEPTIONS.get(name, defaults.POINTS)
    assert points > defaults.POINTS or name not in defaults.EXCEPTIONS


def test_the_shortfall_is_that_of_the_worst_setting() -> None:
    table = {"rate=0.1": {"a": 70.0, "b": 50.0}, "rate=0.3": {"a": 60.0, "b": 58.0}}
    assert defaults.shortfall(table, "rate=0.1") == 8.0
    assert defaults.shortfall(table, "rate=0.3") == 10.0
