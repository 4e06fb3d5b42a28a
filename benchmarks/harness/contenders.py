"""Who takes part: Hansa with a model of the catalogue and with the user's own class, plain PyTorch, and five peers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hansa.core import native
from harness import processes
from harness.environments import RECIPES, Unavailable, environment
from harness.workloads import Workload

HERE = Path(__file__).parents[1]
PEERS = HERE / "peers"

# torch's own choice of threads for everyone who does not choose; nothing of this environment in the peers'
CLEAN = {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None, "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True, slots=True)
class Contender:
    """A script that does a job; ``peer`` names the environment it runs in, none for Hansa's own."""

    name: str
    label: str
    script: Path
    variant: str = ""
    peer: str | None = None
    launch: tuple[str, ...] = ()
    settings: Mapping[str, str | None] = field(default_factory=dict)
    only: tuple[str, ...] = ("W1", "W2")

    @property
    def hansa(self) -> bool:
        return self.name.startswith("hansa")


FORMS = {
    "own": "own class with forward()",
    "catalogue": "model of the catalogue",
    "own eager": "own class, no native code",
}


def _hansa(form: str, workers: int, isa: str = "") -> Contender:
    threads = "1 worker" if workers == 1 else f"{workers} workers"
    return Contender(
        "-".join(["hansa", *form.split(), *([isa] if isa else []), str(workers)]),
        f"**Hansa**, {FORMS[form]}, {threads}" + (f", {isa} forced" if isa else ""),
        HERE / "hansa_run.py",
        f"workers={workers} {form}",
        settings={"HANSA_NATIVE": isa} if isa else {},
    )


NARROWER = native.instruction_set() == "avx512" and "avx2" in native.instruction_sets()

CONTENDERS = (
    _hansa("own", 2),
    _hansa("catalogue", 2),
    *((_hansa("own", 2, "avx2"), _hansa("catalogue", 2, "avx2")) if NARROWER else ()),
    _hansa("own", 1),
    _hansa("own eager", 2),
    Contender("fedlab", "FedLab 1.3", PEERS / "with_fedlab.py", peer="fedlab"),
    Contender("flower", "Flower 1.42 (Ray)", PEERS / "with_flower.py", peer="flower"),
    Contender(
        "pfl",
        "pfl 0.6, 2 workers",
        PEERS / "with_pfl.py",
        "2",
        peer="pfl",
        launch=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        settings={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    ),
    Contender("fluke", "fluke 0.8.1", PEERS / "with_fluke.py", peer="fluke"),
    Contender("fedjax", "FedJAX 0.0.17", PEERS / "with_fedjax.py", peer="fedjax", settings={"JAX_PLATFORMS": "cpu"}),
    Contender("plain", "plain PyTorch loop", PEERS / "plain.py"),
    Contender("plain-2", "plain loop, 2 processes", PEERS / "plain.py", "2"),
    Contender(
        "plain-2-last",
        "plain loop, 2 processes, channels-last",
        PEERS / "plain.py",
        "2 channels_last",
        only=("W1",),
    ),
)


def interpreters(
    root: Path, wanted: list[Contender], say: Callable[[str], None]
) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreter of every peer that can be had, and why the others cannot."""
    found, missing = {}, {}
    for peer in RECIPES:
        if not any(contender.peer == peer for contender in wanted):
            continue
        try:
            found[peer] = environment(peer, root, say)
        except Unavailable as problem:
            missing[peer] = str(problem)
            say(f"{peer}: cannot be installed: {problem}")
    return found, missing


def launch(
    contender: Contender,
    workload: Workload,
    root: Path,
    stem: str,
    job: Mapping[str, Any],
    *,
    python: Path | None,
    timeout: float,
) -> dict[str, Any]:
    """Have a contender do a job of the workload; what it answers, or the reason why there is no answer."""
    given = {
        **{name: getattr(workload, name) for name in ("clients", "cohort", "steps", "batch", "lr", "rounds")},
        "model": workload.model,
        "variant": contender.variant,
        "data": root / "data" / f"{workload.name}.npz",
        "answer": root / "answers" / f"{stem}.json",
        **job,
    }
    home = root / "jobs" / f"{stem}.json"
    for path in (home, given["answer"]):
        path.parent.mkdir(parents=True, exist_ok=True)
    home.write_text(json.dumps(given, default=str))
    for stale in (given["save"], given["answer"]):
        stale.unlink(missing_ok=True)
    own = {"PYTHONPATH": None} if contender.peer else {}
    ended = processes.run(
        [python or sys.executable, *contender.launch, contender.script, home],
        root / "logs" / f"{stem}.log",
        timeout=timeout,
        environment={**CLEAN, **own, **contender.settings},
    )
    result: dict[str, Any] = {"wall": ended.seconds, "peak": ended.peak, "reason": ended.reason}
    if not ended.reason and not given["answer"].is_file():
        result["reason"] = "ended without an answer"
    if not result["reason"]:
        result |= json.loads(given["answer"].read_text())
    return result


def compete(
    contender: Contender,
    workload: Workload,
    root: Path,
    *,
    python: Path | None,
    rounds: int,
    repeat: int,
    timeout: float,
    variant: str | None = None,
) -> dict[str, Any]:
    """One run. It goes on from the model of the contender's run before this one: FedAvg has no other state."""
    stem = f"{workload.name}-{contender.name}" + ("" if variant is None else "-bare")
    before = root / "data" / f"{stem}-{repeat - 1}.npz"
    job = {
        "start": before if before.is_file() else root / "data" / f"{workload.name}-start.npz",
        "save": root / "data" / f"{stem}-{repeat}.npz",
        "rounds": rounds,
        "seed": repeat,
        "variant": contender.variant if variant is None else variant,
    }
    result = launch(contender, workload, root, f"{stem}-{repeat}", job, python=python, timeout=timeout)
    if not result["reason"]:
        steady = result["seconds"][1:] or result["seconds"]
        result["rate"] = workload.steps_a_round * len(steady) / sum(steady)
    return result
