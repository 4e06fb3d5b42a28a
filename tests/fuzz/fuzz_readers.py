"""Fuzzes all that reads what others wrote: data files, partitions, configurations, commands, run folders.

    PYTHONPATH=tests python tests/fuzz/fuzz_readers.py [--inputs 200000] [--seed 0] [--only cifar leaf ...]

Every input is a function of the seed and its number: real files with one to six kinds of damage, half of them text from
a dictionary of what parsers stumble over. Whatever comes of it, it is read, or refused with one message that can be
printed and is short, within a second of the machine's time and a bound on memory. Nothing else may be raised.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data.official_files import cifar_bytes, idx_bytes
from hansa.config import from_yaml
from hansa.core.errors import HansaError
from hansa.data import Split, load_split, save_split
from hansa.data.readers import read_cifar, read_femnist, read_idx, read_shakespeare
from hansa.runs.record import RunRecord

SECONDS = 5.0
"""Of processor time that one input may take: far more than any does, far less than for ever."""

MEMORY = 64 << 20
"""Bytes that one short input may make Python take."""

MESSAGE = 4000
WORDS = [
    b"\0", b"\xff", b"\xed\xa0\x80", b"\x1b[31m", b"9" * 5000, b"-1", b"1e999", b"nan", b"null", b"true", b"[]",
    b"{}", b"''", b"[" * 200, b"{a: " * 100, b"&a [*a]", b"*a", b"<<: *a", b"!!set {a}", b"!!int x", b"? ", b": ",
    b"- ", b"\n", b"\t", b"#", b"\xc2\xb2", b"/", b"1/0", b"0x", b"10**9", b"%s", b"{}", b"[/bold]", b"\\ud800",
    b'"', b"'", b",", b"\x85\x86\x87", b"h\x00h\x00\x86q\x00" * 30, b"(" * 50, b"t" * 20, b"\x80\x02",
    b"PK\x03\x04", b"\x93NUMPY", b"a" * 3000, b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One reader: inputs that it takes, and how it is given one."""

    corpus: tuple[bytes, ...]
    read: Callable[[Path, bytes], object]
    share: int = 1


def mutate(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One to six kinds of damage."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(damaged) + 1)
        end = place + draw.choice([1, 1, 2, 4, 8, 30, 200])
        match draw.randrange(9):
            case 0 if place < len(damaged):
                damaged[place] ^= 1 << draw.randrange(8)
            case 1 if place < len(damaged):
                damaged[place] = draw.choice([0, 9, 10, 34, 0x2E, 0x7F, 0x80, 0xFF, draw.randrange(256)])
            case 2:
                del damaged[place:end]
            case 3 if draw.random() < 0.3:
                del damaged[place:]
            case 4:
                damaged[place:place] = damaged[place:end]  # twice
            case 5:
                at = draw.randrange(len(other) + 1)
                damaged[place:end] = other[at : at + end - place]
            case 6:
                damaged[place : draw.choice([place, end])] = draw.choice(WORDS)
            case 7:
                found = list(re.finditer(rb"-?[0-9]+", bytes(damaged[:4000])))
                if found:
                    number = draw.choice(found)
                    damaged[number.start() : number.end()] = draw.choice(
                        [b"-1", b"0", b"1e9", b"65536", b"9" * 30, b"."]
                    )
            case _:
                damaged[place:place] = draw.randbytes(draw.randint(1, 6))
    return bytes(damaged)


def check(target: Target, home: Path, data: bytes, *, watched: bool = False) -> str:
    """Read one input, and see that it is read or refused as promised; what became of it, in a word."""
    if watched:
        tracemalloc.start()
    began, outcome = time.process_time(), "read"
    try:
        target.read(home, data)
    except HansaError as error:
        outcome, message = "refused", str(error)
    finally:
        taken = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1] if watched else 0
        if watched:
            tracemalloc.stop()
    assert taken < SECONDS, f"{taken:.1f} seconds"
    assert peak < MEMORY + 20 * len(data), f"{peak} bytes"
    if outcome == "refused":
        assert message, "an empty message"
        assert len(message) < MESSAGE, f"a message of {len(message)} characters"
        message.encode()  # can be printed
    return outcome


def run(inputs: int, seed: int, only: Sequence[str] = ()) -> dict[str, Counter[str]]:
    """The seeded fuzzer, over all readers in turn."""
    chosen = {name: target for name, target in targets().items() if not only or name in only}
    turns = [name for name, target in chosen.items() for _ in range(target.share)]
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in chosen}
    with tempfile.TemporaryDirectory(prefix="hansa-fuzz-") as folder:
        for number in range(inputs):
            name, draw = turns[number % len(turns)], random.Random(f"{seed} {number}")
            target = chosen[name]
            data = mutate(draw.choice(target.corpus), draw.choice(target.corpus), draw)
            try:
                outcome = check(target, Path(folder), data, watched=number % 97 == 1)
            except BaseException:
                print(f"{name}, input {number} of seed {seed}: {data[:2000]!r}", file=sys.stderr)
                raise
            outcomes[name][outcome] += 1
    return outcomes


def targets() -> dict[str, Target]:
    """All readers."""
    return {
        "cifar": Target(_cifar_files(), _read_cifar, 4),
        "idx": Target((idx_bytes(np.arange(8, dtype=np.uint8).reshape(2, 2, 2)),), _read_idx, 2),
        "idx.gz": Target((gzip.compress(idx_bytes(np.zeros((3, 2, 2), np.uint8)), mtime=0),), _read_idx_gz, 2),
        "leaf": Target(_leaf_files(), _read_leaf, 3),
        "npz": Target((_npz_file(),), _read_npz, 3),
        "shakespeare": Target(_role_files(), _read_roles, 2),
        "partition": Target(_split_files(), _read_split, 2),
        "yaml": Target(_configurations(), _read_yaml, 2),
        "change": Target(_changes(), _read_change, 2),
        "command": Target(_commands(), _run_command, 1),
        "folder": Target(_FOLDER, _read_folder, 1),
    }


def _written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _cifar_files() -> tuple[bytes, ...]:
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    return cifar_bytes(pixels, [1, 2]), cifar_bytes(pixels, [0, 9], "fine_labels")


def _read_cifar(home: Path, data: bytes) -> None:
    digest = read_cifar(_written(home / "batch", data))[2]
    if digest not in _CIFAR_DIGESTS:  # as `load` compares it
        raise HansaError(f"another batch: {digest}")


_CIFAR_DIGESTS = [
    hashlib.sha256(np.arange(2 * 3072, dtype=np.uint8).tobytes() + bytes(labels)).hexdigest()
    for labels in ((1, 2), (0, 9))
]


def _read_idx(home: Path, data: bytes) -> None:
    read_idx(_written(home / "images", data), 3)


def _read_idx_gz(home: Path, data: bytes) -> None:
    _written(home / "packed.gz", data)
    read_idx(home / "packed", 3)


def _leaf_files() -> tuple[bytes, ...]:
    image = [0.5] * 784
    users = {"f1": {"x": [image], "y": [3]}, "f2": {"x": [image, image], "y": [61, 0]}}
    whole = json.dumps({"users": list(users), "user_data": users})
    small = json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0]], "y": [0]}}})
    return whole.replace("0.5, " * 700, "0.5, " * 7).encode(), whole.encode(), small.encode()


def _read_leaf(home: Path, data: bytes) -> None:
    for part in ("train", "test"):
        _written(home / "leaf" / part / "a.json", data)
    read_femnist(home / "leaf")


def _npz_file() -> bytes:
    file = io.BytesIO()
    arrays = {"x": np.zeros((2, 784), np.uint8), "y": np.array([1, 2]), "w": np.array([0, 1])}
    named = {f"{name}_{part}": array for name, array in arrays.items() for part in ("train", "test")}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in {**named, "writers": np.array(["a", "b"])}.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def _read_npz(home: Path, data: bytes) -> None:
    _written(home / "npz" / "some.npz", data)
    read_femnist(home / "npz")


def _role_files() -> tuple[bytes, ...]:
    return json.dumps({"HAMLET": "To be, or not to be. " * 9, "GHOST": "Mark me. " * 12}).encode(), b'{"A": ""}'


def _read_roles(home: Path, data: bytes) -> None:
    _written(home / "roles" / "shakespeare.json", data)
    read_shakespeare(home / "roles")


_TARGETS = torch.arange(6)


def _split_files() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split"
        save_split(path, Split.of_rows([[0, 3], [1], [5, 2]]), _TARGETS)
        return (path.read_bytes(),)


def _read_split(home: Path, data: bytes) -> None:
    load_split(_written(home / "split", data), _TARGETS)


def _configurations() -> tuple[bytes, ...]:
    return (
        b"rounds: 3\nlocal: {lr: 0.1, steps: 2, batch_size: 10}\nalgorithm: fedams\nserver: {lr: 0.1, b1: 0.9}\n",
        b"algorithm: {preset: cafga}\ngossip: {topology: ring, clusters: 2, reporters: 1}\nlocal: {steps: 3}\n",
        b"data: {name: synthetic, clients: 6, options: {alpha: 0.5}}\nmodel: logistic\nsample: {participation: 0.1}\n",
        b"algorithm: fedcams\ncompress: {compressor: {kind: top_k, ratio: 1/64}, two_way: true}\nfaults: {nan: 0.1}\n",
        b"a: &a {lr: 0.1}\nlocal:\n  <<: *a\n  epochs: 1\nevaluate: {every: 1, target: 0.8}\ncheckpoint: {every: 0}\n",
        b"local: {lr: {kind: cosine, lr: 0.1, rounds: 50}, steps: [1, 2, 3]}\naggregate: {kind: krum, f: 1}\n",
    )


def _read_yaml(home: Path, data: bytes) -> None:
    from_yaml(_without_code(data.decode("utf-8", "surrogateescape")), source="run.yaml")


def _changes() -> tuple[bytes, ...]:
    return (
        b"local.lr=0.1", b"sample={participation: 0.1}", b"compress.compressor={kind: quantize, levels: 16}",
        b"local.steps=[1, 2]", b"data.options.alpha=0.5", b"uplink.kind=memoryless", b"algorithm.mu=1/64",
        b"name=a=b",
    )  # fmt: skip


def _read_change(home: Path, data: bytes) -> None:
    from_yaml("local: {steps: [1, 2]}", [_without_code(data.decode("utf-8", "surrogateescape"))])


def _commands() -> tuple[bytes, ...]:
    lines = (
        "topology ring --clients 8",
        "topology erdos-renyi -n 9 --option p=0.5 --clusters 2",
        "cite fedams",
        "presets scaffold",
        "topology torus --participation 0.5 --steps 3 --rounds 9 --json",
        "parts sampler",
        "show runs/none --json",
        "config show small.yaml --set local.lr=0.1 --set rounds=3",
        "config show fedavg",
        "data show synthetic --clients 4",
        "report runs/a runs/b --out page.html",
        "resume runs/none --rounds 4 --workers 2",
        "--version",
        "cite small.yaml",
    )
    return tuple(line.encode() for line in lines)


def _run_command(home: Path, data: bytes) -> None:
    """A command line, in a folder of its own. What it says in place of a traceback is handed on as a refusal."""
    home = home / "place"
    home.mkdir(exist_ok=True)
    (home / "small.yaml").write_bytes(b"local: {lr: 0.1}\nmodel: logistic\n")
    words = [_without_code(word) for word in data.decode("utf-8", "surrogateescape").replace("\0", " ").split()]
    if any(re.fullmatch(r"\D*[0-9]{4,}\D*", word) and len(word) < 100 for word in words):
        return  # a graph of a million clients is no attack, it takes what was asked for
    _invoke(home, words)


def _invoke(folder: Path, words: Sequence[str]) -> None:
    """Run a command in a folder; raise what it says if it fails."""
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    with contextlib.chdir(folder):
        result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), f"exit code {result.exit_code}"
    assert not any(word in result.output for word in ("Traceback", "\x1b"))
    if result.exit_code:
        raise HansaError(result.output[:1000].encode("utf-8", "replace").decode() or "no word")


FOLDER_FILES = (
    "config.yaml", "summary.json", "metrics.jsonl", "environment.json", "preprocessing.json", ".hansa-run", "run.db",
    "partition.safetensors", "model.safetensors",
)  # fmt: skip
HOSTILE = (
    None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), "", "x", "\x1b[31m", "a" * 3000,
    [], [[]], {}, {"a": {}},
)  # fmt: skip
_FOLDER = (b"a folder", b"its marker", b"its rounds")
READING = (
    "show run", "show run --json", "show run --clients", "report run --out page.html", "export run -o clients.csv",
    "predict run", "export run -o model.safetensors", "compare run good --report page.html", "cite run", "watch",
    "theory run", "config show run",
)  # fmt: skip


@cache
def _small_run() -> tuple[tuple[str, bytes], ...]:
    """The files of a finished run."""
    from command_line import CliRunner, app

    with tempfile.TemporaryDirectory() as home:
        config = _written(
            Path(home) / "small.yaml",
            b"rounds: 2\ndata: {name: synthetic, clients: 3}\nlocal: {steps: 1, batch_size: 5}\nmodel: logistic\n"
            b"sample: {participation: 0.5}\nworkers: 1\nevaluate: {every: 1}\n",
        )
        result = CliRunner().invoke(app, ["run", str(config), "--out", f"{home}/run", "--quiet"])
        assert result.exit_code == 0, result.output
        return tuple((path.name, path.read_bytes()) for path in sorted((Path(home) / "run").iterdir()))


def _read_folder(home: Path, data: bytes) -> None:
    """Read a run folder by one of the commands that only read. The input names the file that somebody has damaged, or
    marker or rounds that are sealed again as their owner would; what is done to it is drawn from the input."""
    from hansa.study.report.live import RunWatcher

    draw, files = random.Random(data), dict(_small_run())
    for name in ("run", "good"):
        shutil.rmtree(home / "runs" / name, ignore_errors=True)
        for file, content in files.items():
            _written(home / "runs" / name / file, content)
    if data not in _FOLDER:
        file = draw.choice([*FOLDER_FILES, *["sealed"] * 6])
        path = home / "runs" / "run" / file
        if file == "sealed":
            _forge(home / "runs" / "run", draw)
        elif draw.random() < 0.2:
            path.unlink()
            draw.choice([path.touch, path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), list])()
        else:
            damaged = mutate(files[file], files[draw.choice(FOLDER_FILES)], draw)
            _written(home / "runs" / "run" / file, _without_code(damaged.decode("latin-1")).encode("latin-1"))
    command = draw.choice(READING)
    if command == "predict run" and _asks_for_much(home / "runs" / "run" / "config.yaml"):
        return
    if command == "watch":
        watcher = RunWatcher([home / "runs"])
        watcher.refresh()
        watcher.page()
        assert {run["name"] for run in watcher.content["data"]["runs"]}, "the other run is not shown"
        return
    _invoke(home / "runs", command.split())


def _asks_for_much(path: Path) -> bool:
    """Whether a configuration names a number of four digits: it may be of clients, which are then made."""
    return path.is_file() and not path.is_symlink() and re.search(rb"[0-9]{4}|e[0-9]", path.read_bytes()) is not None


def _forge(folder: Path, draw: random.Random) -> None:
    """Change values of the marker or of the rounds, and seal them again; or of a file that has no seal."""
    if draw.random() < 0.3:
        path = folder / draw.choice(["summary.json", "environment.json", "config.yaml"])
        tree = yaml.safe_load(path.read_text("utf-8"))  # JSON is YAML
        _written(path, _without_code(json.dumps(_with_hostile_values(tree, draw))).encode())
        return
    if draw.random() < 0.4:
        _, _, content = (folder / ".hansa-run").read_bytes().partition(b"\n")
        body = json.dumps(_with_hostile_values(json.loads(content), draw)).encode()
        _written(folder / ".hansa-run", hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        return
    with RunRecord(folder) as record:
        rounds = [(each, block) for (each, _), (_, block) in zip(record.rounds(), record.client_blocks(), strict=True)]
    (folder / "run.db").unlink()
    (folder / "run.rows").unlink(missing_ok=True)
    with RunRecord.create(folder) as record:
        for number, (values, block) in enumerate(rounds, 1):
            forged = _with_hostile_values(values, draw)
            record.add_round({**forged, "round": number} if isinstance(forged, dict) else {"round": number}, block)
            record.commit()


def _with_hostile_values(tree: object, draw: random.Random) -> Any:
    """A tree of JSON in which one to three values, keys and all below them, are others."""
    for _ in range(draw.randint(1, 3)):
        node = holder = tree
        place: Any = None
        while isinstance(node, (dict, list)) and node and (place is None or draw.random() < 0.6):
            holder, place = node, draw.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
            node = holder[place]
        if isinstance(holder, (dict, list)) and place is not None:
            holder[place] = draw.choice(HOSTILE)
            if draw.random() < 0.2:
                del holder[place]
    return tree


def _without_code(text: str) -> str:
    """MODULE:FUNCTION runs code by design, so no input of ours may say one."""
    return re.sub(r"(?<=[\w.]):(?=[A-Za-z_])", ": ", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(targets()))
    given = parser.parse_args()
    began = time.perf_counter()
    outcomes = run(given.inputs, given.seed, given.only)
    print(f"{given.inputs} inputs in {time.perf_counter() - began:.0f} s without a failure")
    for name, counts in outcomes.items():
        print(f"{name:12} " + "  ".join(f"{count:8d} {outcome}" for outcome, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
