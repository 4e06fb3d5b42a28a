"""An environment of its own for every peer, made once under ``.bench/`` and kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The pip calls that make an environment, after torch: one tuple of arguments each."""

    version: str
    steps: tuple[tuple[str, ...], ...]


# torch stands first in every environment and is pinned in all that follows, so that no peer brings another build of it;
# FedLab and fluke come without what they ask for, since they ask for torchvision (see peers/no_torchvision.py).
RECIPES = {
    "fedlab": Recipe(
        "FedLab 1.3.0",
        (("numpy", "pandas", "scikit-learn", "pynvml", "tqdm", "munch", "pillow"), ("--no-deps", "fedlab==1.3.0")),
    ),
    "flower": Recipe(
        "Flower 1.42.0, Ray 2.55.1",
        # 1.42 differs from 1.41 in what it asks for (the newest certifi and uv), not in what it needs for a simulation
        (("flwr==1.41.0", "ray==2.55.1"), ("--no-deps", "flwr==1.42.0")),
    ),
    "pfl": Recipe("pfl 0.6.0", (("pfl==0.6.0",),)),
    "fluke": Recipe(
        "fluke 0.8.1",
        (
            (
                *("numpy", "pandas", "scikit-learn", "torchmetrics", "rich", "typer", "wandb", "datasets", "psutil"),
                *("tensorboard", "clearml", "matplotlib", "seaborn", "diskcache", "cerberus", "hydra-core", "requests"),
                *("pyyaml", "omegaconf", "pillow"),
            ),
            ("--no-deps", "fluke-fl==0.8.1"),
        ),
    ),
    "fedjax": Recipe("FedJAX 0.0.17, JAX 0.10.2", (("jax==0.10.2", "jaxlib==0.10.2", "fedjax==0.0.17"),)),
}


class Unavailable(Exception):
    """A peer that could not be installed; the message is the reason."""


def environment(name: str, root: Path, say: Callable[[str], None] = print, timeout: float = 1200.0) -> Path:
    """The interpreter of a peer's environment, made if it is not there or was made by another recipe."""
    recipe, home = RECIPES[name], root / name / "venv"
    python, mark = home / "bin" / "python", home / "made.json"
    made = {"python": sys.version, "torch": TORCH, "steps": [list(step) for step in recipe.steps]}
    if mark.is_file() and json.loads(mark.read_text()) == json.loads(json.dumps(made)) and python.exists():
        return python
    say(f"{name}: making its environment ({recipe.version})")
    shutil.rmtree(home, ignore_errors=True)
    log = root / "logs" / f"{name}-install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    constraints = root / name / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    with open(log, "wb") as output:
        try:
            venv.create(home, with_pip=True, symlinks=True)
            for step in ((TORCH,), *recipe.steps):
                command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
                _call([*command, "-c", str(constraints), *step], output, timeout)
        except (OSError, subprocess.SubprocessError) as problem:
            raise Unavailable(f"{_reason(problem)} ({_last_error(log)}; see {log.name})") from problem
    mark.write_text(json.dumps(made))
    return python


def _call(command: list[str], output: object, timeout: float) -> None:
    subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout, check=True)  # type: ignore[call-overload]


def _reason(problem: BaseException) -> str:
    if isinstance(problem, subprocess.TimeoutExpired):
        return "pip took too long"
    return "pip failed" if isinstance(problem, subprocess.CalledProcessError) else str(problem)


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1][:160]
