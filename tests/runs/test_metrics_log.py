"""The numbers of a run are sealed line upon line; `torture.metrics_log` has the long form of the damage."""

from __future__ import annotations

import json
import math
import sys

import pytest

import hansa
import warm
from hansa import HansaError
from hansa.config import from_preset
from hansa.runs import metrics, metrics_log
from hansa.runs.driver import MAX_DROPPED_IN_CHECKPOINT, Run
from hansa.runs.experiment import Experiment
from hansa.runs.folder import RunFolder
from hansa.runs.launch import digest_name, plan_reusable_runs
from hansa.runs.store import DamagedFileError, io
from torture import metrics_log as torture
from torture.disks import Hasty

SMALL = ("data.name=synthetic", "data.clients=4", "rounds=3", "local.steps=1", "workers=1", "checkpoint.every=1")


@pytest.fixture
def done(tmp_path):
    with io.use_disk(Hasty()):
        Experiment.new(from_preset("fedavg", SMALL), tmp_path / "out").execute()
        yield RunFolder(tmp_path / "out")


def written(path, records):
    seal, text = metrics_log.INITIAL_SEAL, ""
    for record in records:
        line, seal = metrics_log.seal_record(record, seal)
        text += line + "\n"
    path.write_text(text)
    return text


def test_damaged_histories_are_refused_or_do_not_matter(tmp_path):
    """One of every kind of damage for each method; the long form has 1,000."""
    found = torture.run(24, tmp_path)
    assert found["refused, then fell back exactly"] >= 10
    assert sum(found.values()) == 24


def test_records_come_back_as_they_were_written(tmp_path):
    records = [{"round": 1, "loss": math.inf, "clients": [2], "seal": "mine"}, {"round": 2, "loss": 0.5}]
    written(tmp_path / "m", records)
    assert metrics_log.read_history(tmp_path / "m", require_seals=True) == records


@pytest.mark.parametrize("rounds", [[2], [1, 3], [1, 1], [2, 1], [0, 1], [1, 2, 2]])
def test_rounds_out_of_order_are_refused_even_if_sealed(tmp_path, rounds):
    written(tmp_path / "m", [{"round": round} for round in rounds])
    with pytest.raises(DamagedFileError, match=r"m:\d: .*instead of round \d"):
        metrics_log.read_history(tmp_path / "m")


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"[" * 100_000, b'{"round": ' + b"1" * 5000 + b"}", b"[1]", b'{"round": true}', b"\x00"]
)
def test_lines_that_are_no_records_are_named_in_one_sentence(tmp_path, line):
    (tmp_path / "m").write_bytes(line + b"\n" + b'{"round": 2}\n')
    with pytest.raises(DamagedFileError, match=r"m:1: not a valid record of a round") as caught:
        metrics_log.read_history(tmp_path / "m")
    assert len(str(caught.value)) < 500


def test_a_file_without_seals_is_read_with_a_warning_unless_seals_must_be(tmp_path, caplog):
    (tmp_path / "m").write_text('{"round": 1}\n{"round": 2}\n')
    assert len(metrics_log.read_history(tmp_path / "m")) == 2
    assert "has no seals" in caplog.text
    with pytest.raises(DamagedFileError, match="it has no seal"):
        metrics_log.read_history(tmp_path / "m", require_seals=True)
    sealed = written(tmp_path / "n", [{"round": 1}])
    (tmp_path / "m").write_text('{"round": 1}\n' + sealed)
    with pytest.raises(DamagedFileError, match="the lines before it do not"):
        metrics_log.read_history(tmp_path / "m")


def rewrite_marker(folder, format, version):
    marker = io.read_sealed(folder / ".hansa-run")
    marker["bound"]["version"] = version
    io.write_sealed(folder / ".hansa-run", {**marker, "format": format})


def test_a_run_of_an_older_version_is_refused_by_its_version(done):
    rewrite_marker(done, 1, "0.2.0")
    files = [path for path in done.path.iterdir() if path.is_file() and path.name != ".hansa-lock"]
    before = [path.read_bytes() for path in files]
    with pytest.raises(
        HansaError, match=rf"written by Hansa 0.2.0; this is Hansa {hansa.__version__}.*Use Hansa 0.2.0"
    ):
        Experiment.resume(done.path, rounds=4)
    assert [path.read_bytes() for path in files] == before
    assert done.summary["rounds"] == 3  # it can still be shown
    (done / "config.yaml").write_text("local: {clip: 1.0}\n")
    with pytest.raises(HansaError, match=r"written by Hansa 0.2.0.*config.yaml:1: local.clip: no such key"):
        _ = RunFolder(done.path).config
    (done / ".hansa-run").unlink()
    with pytest.raises(HansaError, match=r"written by Hansa .*start a new run"):
        Experiment.resume(done.path)
    config = from_preset("fedavg", SMALL)
    parent = done.path.parent / "below"
    Experiment.new(config, tmp := parent / digest_name("fresh", config)).execute()
    (planned,) = plan_reusable_runs(config, parent, "fresh")
    assert planned.open().path == tmp
    rewrite_marker(RunFolder(tmp), 1, "0.2.0")
    assert planned.open().folder.path != tmp  # not reused, not overwritten


def test_a_run_of_a_newer_version_is_refused(done):
    rewrite_marker(done, 99, "9.0")
    with pytest.raises(HansaError, match="written by a newer Hansa"):
        Experiment.resume(done.path)


def test_the_summary_is_what_the_metrics_say_and_a_changed_one_is_told(done, caplog):
    told = json.loads((done / "summary.json").read_text("utf-8"))
    assert {name: told[name] for name in metrics.summarize(done.history)} == metrics.summarize(done.history)
    assert told["metrics_seal"] == done.metrics.seal
    assert done.summary["test_accuracy"] == told["test_accuracy"]
    assert not caplog.records
    (done / "summary.json").write_text(json.dumps({**told, "test_accuracy": 0.99}))
    assert done.summary["test_accuracy"] == told["test_accuracy"]
    assert "does not agree with metrics.jsonl in test_accuracy" in caplog.text


def test_an_end_that_is_missing_is_told(done, caplog):
    lines = (done / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (done / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert done.summary["rounds"] == 2
    assert "metrics_seal" in caplog.text


def test_the_models_digest_is_in_the_summary_and_another_model_is_refused(done):
    content = done.read_model()
    assert json.loads((done / "summary.json").read_text("utf-8"))["model_sha256"] == io.sha256(content)
    (done / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is damaged"):
        done.read_model()


def test_a_hundred_thousand_rounds_are_shown_in_little_memory(done):
    """What reading and summing up take beside the interpreter: less than two kilobytes a round."""
    (record, *_) = done.history
    written(
        done / "metrics.jsonl", ({**record, "round": round, "clients": list(range(20))} for round in range(1, 20_001))
    )
    script = (
        "import sys, tracemalloc; from hansa.runs.folder import RunFolder\n"
        "import hansa.study.report; tracemalloc.start()\n"
        "found = RunFolder(sys.argv[1]); numbers = found.metrics; told = found.summary_of(numbers)\n"
        "entry = hansa.study.report.ReportEntry.from_folder(sys.argv[1])\n"
        "hansa.study.report.rank([entry]); entry.series()\n"
        "print(told['rounds'], tracemalloc.get_traced_memory()[1])"
    )
    answer = warm.run([sys.executable, "-c", script, str(done)], capture_output=True, text=True, check=True)
    rounds, most = map(int, answer.stdout.split())
    assert rounds == 20_000
    assert most < 80e6  # for two readings at a time, without the lists of clients


def test_checkpoints_do_not_grow_with_the_lost(tmp_path):
    config = from_preset("fedavg", [*SMALL, "rounds=120", "faults={before: 1.0}", "checkpoint.every=0"])
    sizes = []

    def measure(run: Run, record) -> None:
        if record["round"] in (60, 120):
            sizes.append(len(json.dumps(run.checkpoint_state()["lost"])))

    with io.use_disk(Hasty()):
        experiment = Experiment.new(config, tmp_path / "out")
        assert experiment.execute([measure])["lost"] == 480
    assert len(experiment.run.checkpoint_state()["lost"]) == MAX_DROPPED_IN_CHECKPOINT
    assert sizes[1] < sizes[0] * 1.05
