"""Runs the golden cases and makes their digests, which depend on the machine's arithmetic as `arithmetic` states it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import hansa
from golden import problems
from golden.cases import CASES, CATALOGUE
from hansa.core import native

GOLDEN = Path(__file__).with_name("golden.json")

KERNELS = ("avx512", "avx2", "off")
"""Each is a value of the environment variable; ``off`` runs PyTorch and NumPy alone."""

VARIABLE = "HANSA_NATIVE"

ROUND = (
    "train_loss", "test_loss", "test_accuracy", "loss", "up_bytes", "down_bytes", "peer_bytes", "clients", "lost",
    "moved",
)  # fmt: skip
"""What of a round's record is pinned as ``rounds``. A key that was renamed is renamed here, in its place."""

DIAGNOSTICS = (
    "update_norm", "aggregate_norm", "diversity", "surrogate_diversity", "momentum_diversity", "chi_square", "density",
    "weights", "seen", "zero_rows", "min_norm_gap", "min_norm_steps", "exploring", "consensus", "tau_effective",
    "chosen", "clipped", "q", "gamma", "local_mean_loss", "sigma_l", "sigma_g", "zeta", "sigma_within", "sigma_between",
    "gradient_norm", "gradient_diversity", "test_margin",
    *(f"{whose}_{what}{kind}" for whose in ("client", "personal") for what in ("loss", "accuracy", "margin")
      for kind in ("", "_std", "_worst")),
)  # fmt: skip
"""What of it is pinned as ``diagnostics``, in the same way. ``round``, ``participants``, ``reasons`` and ``seconds``
are not: they follow from the others, are worded for people, or are times."""


def sha(chunks: Iterable[bytes]) -> str:
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def of_tensors(state: Mapping[str, Any]) -> str:
    """Names, kinds, shapes and bytes of a module's tensors, in the order of their names."""

    def chunks() -> Iterable[bytes]:
        for name, tensor in sorted(state.items()):
            plain = tensor.detach().cpu().contiguous()
            yield f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode()
            yield plain.reshape(-1).numpy().tobytes()

    return sha(chunks())


def exact(value: Any) -> Any:
    """A value as text that keeps every bit: floats in base 16, mappings in the order of their keys."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, Mapping):
        return [[exact(key), exact(value[key])] for key in sorted(value)]
    return [exact(each) for each in value]


def of_records(history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The named entries of every record; the name of an entry is its place in ``names``."""
    found = [[[place, exact(record[name])] for place, name in enumerate(names) if name in record] for record in history]
    return sha([json.dumps(found).encode()])


def digests(run: Any, own: bool) -> dict[str, Any]:
    """What is pinned of a finished run, lesser digests cut short; losses are there to be read."""
    module = hasattr(run.task, "module")
    found = {
        "model": of_tensors(run.model.state_dict() if module else {"x": run.params}),
        "rounds": of_records(run.history, ROUND),
        "diagnostics": of_records(run.history, DIAGNOSTICS)[:16],
        "losses": [f"{record['train_loss']:.6g}" for record in run.history],
    }
    if own:
        clients = range(len(run.task.population.samples))
        found["clients"] = sha(of_tensors(run.client_model(client).state_dict()).encode() for client in clients)[:16]
    return found


def carry_out(case: Any) -> Any:
    """The digests of a case."""
    task = problems.task(case.task)
    options = dict(case.options(task) if callable(case.options) else case.options)
    with tempfile.TemporaryDirectory(prefix="golden-", ignore_cleanup_errors=True) as folder:
        if case.stop is not None:
            out = f"{folder}/run"
            hansa.run(case.method(), task, rounds=case.stop, out=out, checkpoint_every=1, workers=1, **options)
            run = hansa.resume(out, case.method(), task, rounds=case.rounds, workers=1, **options)
        else:
            if case.rows:
                options["store"] = hansa.store.DiskStore(f"{folder}/rows")
            run = hansa.run(case.method(), task, rounds=case.rounds, workers=1, **options)
        found = digests(run, case.own)
        run.store.close()
        return found


def arithmetic() -> dict[str, str]:
    """What the last bits depend on beside the code: the machine with its libraries, and the kernels in use."""
    machine = (
        f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), numpy {numpy.__version__}, "
        f"scipy {scipy.__version__}, {platform.machine()} {_processor()}"
    )
    return {"machine": machine, "kernels": _kernels()}


def _processor() -> str:
    """Vendor, family and model: PyTorch's matrix libraries choose their code by them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    facts = dict(re.findall(r"^(vendor_id|cpu family|model)\s*:\s*(\S+)$", text, re.MULTILINE))
    return " ".join(f"{name} {facts.get(name, '?')}" for name in ("vendor_id", "cpu family", "model"))


def _kernels() -> str:
    """The instruction set of the native kernels and the compiler that built them; the one place that looks inside."""
    chosen = native.instruction_set()
    if chosen is None:
        return "off" if os.environ.get(VARIABLE) == "off" else "none"
    compiler = "unknown compiler"
    for path in Path(hansa.__file__).parent.rglob("_kernels*.so"):
        if named := re.search(rb"(GCC: [^\0]+|clang version [^\0]+)", path.read_bytes()):
            compiler = named.group(1).decode()
    return f"{chosen}, {compiler}"


@contextmanager
def using(kernels: str) -> Iterator[None]:
    """One kind of kernels in this process, tasks that were not made for another, and one thread."""
    before, threads = os.environ.get(VARIABLE), torch.get_num_threads()
    os.environ[VARIABLE] = kernels
    torch.set_num_threads(1)
    problems.task.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        problems.task.cache_clear()
        torch.set_num_threads(threads)
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def recorded() -> dict[str, Any]:
    """golden.json: by machine, then by kernels."""
    return json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line for each case that is not as recorded; ``losses`` are not compared, they tell how far it is off."""
    lines = []
    for name in expected:
        if name not in found:
            lines.append(f"{name}: not run")
            continue
        wrong = [part for part in expected[name] if part != "losses" and expected[name][part] != found[name].get(part)]
        if wrong:
            losses = (
                f"losses {' '.join(expected[name]['losses'])} recorded, {' '.join(found[name].get('losses', ()))} found"
            )
            lines.append(f"{name}: {found[name].get('error') or ', '.join(wrong) + ' differ; ' + losses}")
    return [*lines, *(f"{name}: not recorded" for name in found if name not in expected)]


def sampled(kernels: str, every: int) -> list[str]:
    """The names of the cases for a run with one kind of kernels; ``every`` = 1 names all.

    With an instruction set, presets have ``mlp`` (native), ``norm`` (eager) and the other tasks of native stages.
    Without kernels all are eager, and a preset has one of ``mlp`` and ``norm``. For the rest of the presets' cases the
    kinds take turns. Of the cases beside the presets, one in ``every`` is run, a different one with each kind.
    """
    turn, kinds = KERNELS.index(kernels), len(KERNELS)

    def belongs(at: int, name: str, task: str) -> bool:
        if name.split(" / ")[0] not in CATALOGUE:
            return at % every == turn * every // kinds
        if kernels == "off" and task in ("mlp", "norm"):
            return CATALOGUE.index(name.split(" / ")[0]) % 2 == (task == "norm")
        if kernels != "off" and (task in problems.NATIVE or task == "norm"):
            return True
        return at % kinds == turn

    return [name for at, (name, case) in enumerate(CASES.items()) if every == 1 or belongs(at, name, case.task)]


def run_cases(names: Sequence[str]) -> dict[str, Any]:
    """The digests of these cases, or the error that a case ended with."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = carry_out(CASES[name])
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found
