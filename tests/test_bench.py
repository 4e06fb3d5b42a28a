"""The benchmark against other frameworks: its workloads, and the check that all contenders compute the same thing.

The peers are not installed here; `make bench` checks them in the same way before it times them.
"""

from __future__ import annotations

import doctest
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import hansa
from hansa import data
from hansa.core import native

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("W1", "W2", "W3", "W4")
WRONG: tuple[dict[str, Any], ...] = ({"steps": 2}, {"lr": 0.002}, {"rounds": 1}, {"batch": 5})
MODELS = ("cnn_29k", "mlp", "pfl_cnn", "logistic", "logistic_sigmoid")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which are found from its folders alone."""
    path, known, threads = list(sys.path), set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    try:
        parts = ("agreement", "contenders", "page", "points", "tables", "workloads")
        found = {name: importlib.import_module(f"harness.{name}") for name in parts}
        scripts = ("batched_clients", "hansa_run", "limit", "modules", "plain", "ratios", "vectors")
        found |= {name: importlib.import_module(name) for name in scripts}
        yield SimpleNamespace(**found)
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = path
        for name in set(sys.modules) - known:
            if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def some(bench: SimpleNamespace, name: str, folder: Path) -> Any:
    """A workload with four clients and batches of ten on noise, and its files."""
    workload = replace(bench.workloads.WORKLOADS[name], clients=4, batch=10, rows=60, partition=data.iid())
    shape = (3, 32, 32) if name == "W3" else (1, 28, 28)
    draw = torch.Generator().manual_seed(1)
    noise = data.Dataset("noise", torch.randn(60, *shape, generator=draw), torch.randint(0, 10, (60,), generator=draw))
    bench.workloads.write(workload, noise, folder / "data")
    bench.agreement.write_small(workload, folder / "small", folder / "data" / f"{name}.npz")
    return workload


def off(
    bench: SimpleNamespace, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, **job: Any
) -> float:
    """How far a script's model is from the reference's, in this process."""
    if native.instruction_set() is None and job.get("variant") in ("workers=1 own", "workers=1 catalogue"):
        pytest.skip("no native kernels here")
    workload = some(bench, name, folder)
    small, start = bench.agreement.small(workload), folder / "data" / f"{name}-start.npz"
    given = {
        **{key: getattr(small, key) for key in ("model", "clients", "cohort", "steps", "batch", "lr", "rounds")},
        "data": str(folder / "small" / f"{name}.npz"),
        "start": str(start),
        "save": str(folder / "saved.npz"),
        "answer": str(folder / "answer.json"),
        "seed": 0,
        "dropout": False,
        **job,
    }
    (folder / "job.json").write_text(json.dumps(given))
    monkeypatch.setattr(sys, "argv", ["", str(folder / "job.json")])
    getattr(bench, script).main()
    assert len(json.loads((folder / "answer.json").read_text())["seconds"]) == given["rounds"]
    wanted = bench.agreement.reference(given["model"], small, folder / "small" / f"{name}.npz", start)
    return float(bench.agreement.distance(folder / "saved.npz", wanted, start))


def agrees(bench: SimpleNamespace, name: str, found: float) -> bool:
    return bool(bench.agreement.agrees(found, bench.workloads.WORKLOADS[name].model))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("script", "variant"),
    [("plain", ""), ("hansa_run", "workers=1 own"), ("hansa_run", "workers=1 own eager")],
)
def test_a_contender_comes_to_the_model_of_the_reference(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, variant: str
) -> None:
    found = off(bench, name, tmp_path, monkeypatch, script, variant=variant)
    assert agrees(bench, name, found), found


@pytest.mark.parametrize("name", ["W1", "W2", "W4"])
def test_models_of_the_catalogue_are_those_of_the_peers(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert agrees(bench, name, off(bench, name, tmp_path, monkeypatch, "hansa_run", variant="workers=1 catalogue"))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("W3", {"steps": 2}), ("W3", {"lr": 0.009}), *(("W4", wrong) for wrong in WRONG)],
)
def test_other_work_is_not_taken_for_the_same(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: dict[str, Any]
) -> None:
    assert not agrees(bench, name, off(bench, name, tmp_path, monkeypatch, "plain", **wrong))


def test_another_model_is_not_taken_for_the_same(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sigmoid = {"model": "logistic_sigmoid", "variant": "workers=1 own sigmoid"}
    assert agrees(bench, "W4", off(bench, "W4", tmp_path, monkeypatch, "hansa_run", **sigmoid))
    wanted = bench.agreement.reference(
        "logistic",
        bench.agreement.small(bench.workloads.W4),
        tmp_path / "small" / "W4.npz",
        start := tmp_path / "data" / "W4-start.npz",
    )
    assert not agrees(bench, "W4", bench.agreement.distance(tmp_path / "saved.npz", wanted, start))
    with pytest.raises(ValueError, match="in place of"):
        bench.agreement.distance(tmp_path / "saved.npz", {**wanted, "more": torch.zeros(1)}, start)


@pytest.mark.parametrize("model", MODELS)
def test_a_class_of_ones_own_is_the_model_of_the_peers(bench: SimpleNamespace, tmp_path: Path, model: str) -> None:
    theirs = bench.modules.module(model)
    bench.workloads.save_weights(tmp_path / "start.npz", theirs)
    ours = bench.hansa_run.first_model(model, str(tmp_path / "start.npz"), own=True)
    inputs = torch.randn(2, *((3, 32, 32) if model == "pfl_cnn" else (1, 28, 28)))
    torch.testing.assert_close(ours.eval()(inputs), theirs.eval()(inputs), rtol=1e-6, atol=1e-6)
    torch.manual_seed(3)
    first = ours.train()(inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(first, theirs.train()(inputs), rtol=1e-6, atol=1e-6)  # the same dropout


def test_pfls_network_has_its_size_and_both_models_of_others_have_native_code(bench: SimpleNamespace) -> None:
    assert sum(value.numel() for value in bench.modules.module("pfl_cnn").parameters()) == 1_626_442
    if native.instruction_set() is None:
        pytest.skip("no native kernels here")
    for model, shape in (("pfl_cnn", (3, 32, 32)), ("logistic_sigmoid", (1, 28, 28))):
        held = data.FederatedData(
            torch.randn(20, *shape), torch.arange(20) % 10, torch.arange(20), torch.tensor([0, 10, 20]), classes=10
        )
        task = hansa.Task(bench.hansa_run.OWN[model], cross_entropy, held)
        assert task.eager_reason in (None, "without vector instructions PyTorch is faster")


def test_the_workloads_of_others_have_their_settings(bench: SimpleNamespace) -> None:
    mini = data.load("fashion-mini")
    for name, samples in (("W3", 50), ("W4", 60)):
        workload = bench.workloads.WORKLOADS[name]
        dealt = bench.workloads.deal(mini, workload)
        sizes = dealt.offsets[1:] - dealt.offsets[:-1]
        assert len(sizes) == workload.clients == 1000
        assert set(sizes.tolist()) == {samples} == {workload.steps * workload.batch}  # one epoch of full batches
    two = [len(mini.targets[dealt.index[begin : begin + 60]].unique()) for begin in dealt.offsets[:-1].tolist()]
    assert max(two) <= 4  # a shard may lie across two labels
    assert sum(count <= 2 for count in two) > 950


def test_a_set_that_is_not_there_is_replaced_by_one_of_its_shape(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSA_DATA", str(tmp_path))
    for name, shape in (("cifar10", (3, 32, 32)), ("mnist", (1, 28, 28))):
        found, note = bench.workloads.load(name)
        assert found.inputs.shape[1:] == found.test_inputs.shape[1:] == shape
        assert "fashion-mini" in note
        assert f"hansa data get {name}" in note


def results(bench: SimpleNamespace) -> dict[str, Any]:
    run = {"reason": "", "wall": 2.5, "peak": 3 << 20, "seconds": [0.1] * 100, "rate": 50.0}
    named = {name: ["hansa-own-2", "pfl", "fedjax"] for name in NAMES}
    named["W4"].append("hansa-own-sigmoid-2")
    return {
        "machine": {"machine": "two cores"},
        "note": "noise",
        "runs": {w: {name: [dict(run, rate=100.0 if "own" in name else 50.0)] for name in named[w]} for w in NAMES},
        "accuracy": {w: {name: 0.8 - 0.2 * ("sigmoid" in name) for name in named[w]} for w in NAMES},
        "loss": {w: dict.fromkeys(named[w], 0.6) for w in NAMES},
        "agreement": {w: dict.fromkeys(named[w], 2e-6) for w in NAMES},
        "limits": [
            {
                workers: {**{w: {"steps": 300.0, "flops": 1e6} for w in NAMES}, "peak": {"flops": 4e8}}
                for workers in "12"
            }
        ],
        "missing": {},
    }


def test_the_page_shows_the_workloads_of_others_and_the_published_times(bench: SimpleNamespace) -> None:
    text = bench.page.page(results(bench), "make bench")
    ours, others = text.split("## On other projects' terms")
    assert "| W1 steps/s |" in ours
    assert "W3 steps/s" not in ours
    assert "| W3 steps/s |" in others
    assert "W3: Hansa, own class with forward(), 2 workers: 2.00 times the client-steps of the fastest peer" in others
    assert "yes, all within 2e-06 (at most 0.05)" in others
    assert "yes, all within 2e-06 (at most 0.0001)" in others
    job = others.split("### FLUTE's whole job")[1].split("## ")[0]
    assert "Their machine was another one" in job
    for cell in ("| pfl 0.6, 2 workers | 2.5 |", "30:14", "3:20"):
        assert cell in job
    assert "they agree" in others  # a model of its own, the sigmoid's, is not compared with the others'


def test_the_page_names_who_computes_something_else(bench: SimpleNamespace) -> None:
    found = results(bench)
    found["agreement"]["W3"] |= {"pfl": 0.3, "fedjax": "took longer than 300 s"}
    assert (
        "W3: models of the job without randomness are the reference's: **not those of pfl, fedjax**"
        in bench.page.page(found, "")
    )


def test_every_contender_has_a_script_and_takes_part_somewhere(bench: SimpleNamespace) -> None:
    for contender in bench.contenders.CONTENDERS:
        assert contender.script.is_file()
        assert contender.only
        assert set(contender.only) <= set(NAMES)
        assert not contender.model or contender.model in bench.hansa_run.OWN


def test_examples_in_the_benchmark_are_true(bench: SimpleNamespace) -> None:
    for module in (bench.limit, bench.agreement):
        ran = doctest.testmod(module)
        assert ran.attempted
        assert not ran.failed


@pytest.mark.parametrize("model", ["cnn_29k", "mlp", "pfl_cnn", "logistic"])
def test_the_limit_counts_the_products_of_a_step(bench: SimpleNamespace, model: str) -> None:
    module, inputs = bench.modules.module(model), torch.randn(7, *((3, 32, 32) if model == "pfl_cnn" else (1, 28, 28)))
    with FlopCounterMode(display=False) as counter:
        cross_entropy(module(inputs), torch.zeros(7, dtype=torch.long)).backward()
    assert sum(2 * m * k * n for m, k, n in bench.limit.shapes(model, 7)) == counter.get_total_flops()


def test_every_table_that_is_measured_is_on_the_page(bench: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as told:
        bench.points.Points(tmp_path, print).all(["no such table"])
    names = str(told.value).partition("there are ")[2].split(", ")
    assert set(names) == set(bench.tables.TABLES)
    assert {"batched", "studies", "scale", "ratios", "vectors"} <= set(names)


def test_the_tables_have_the_choices_for_ten_models_all_graphs_and_all_decoders(bench: SimpleNamespace) -> None:
    assert len(bench.batched_clients.CASES) == 10
    assert {"", ", complete", ", star", ", random"} == set(bench.ratios.GRAPHS)
    timed = bench.vectors.operations(torch.linspace(-1, 1, 128))
    for name in ("sign", "top_k(1/64)", "random_k(1/64)", "quantize(16)", "cast(bfloat16)", "grid(0.5)", "identity"):
        assert {f"{name} {way}" for way in ("encode", "decode", "accumulate")} <= set(timed)


def test_the_table_of_studies_has_the_limit_of_the_machine_and_idle_time(bench: SimpleNamespace) -> None:
    rows = [
        {"what": "one after the other", "reason": "", "wall": 16.0, "processor": 15.9, "runs": 1.5},
        {"what": "two side by side", "reason": "", "wall": 9.0, "processor": 17.5, "runs": 2.7, "idle": 0.5,
         "ratio": 1.8, "target": 1.8},
    ]  # fmt: skip
    text = bench.tables.TABLES["studies"](rows)[-1]
    assert "| one after the other | 16.0 | 15.9 |  | 1.50 |  |  |" in text
    assert "| two side by side | 9.0 | 17.5 | 0.50 | 2.70 | 1.80 | at least 1.8 |" in text
