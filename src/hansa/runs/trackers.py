"""Callbacks for TensorBoard, MLflow, and trackers with the interface of Weights & Biases.

``hansa.run(..., callbacks=[tensorboard("logs")])``. Needs ``hansa[track]``, or the tracker's own package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError, suggestion
from hansa.runs.metrics import is_finite

if TYPE_CHECKING:
    from hansa.runs.driver import Callback, Run
    from hansa.runs.experiment import Experiment

MODULES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}
"""The trackers of ``--track``, and the modules that they need."""


def tensorboard(folder: Path | str) -> Callback:
    """Return a callback that writes every number of a round as a TensorBoard scalar to ``folder``."""
    writer = _import_tracker("tensorboard").SummaryWriter(str(folder))

    def log(run: Run, record: Mapping[str, Any]) -> None:
        for name, value in finite_numbers(record).items():
            writer.add_scalar(name, value, int(record["round"]))
        writer.flush()

    return log


def mlflow(name: str, settings: Mapping[str, Any] | None = None) -> Callback:
    """Return a callback that logs a run to MLflow; the MLflow run ends with the process or the next `mlflow` callback.

    Args:
        name: The name of the run.
        settings: Logged once as parameters.
    """
    client = _import_tracker("mlflow")
    if client.active_run() is not None:
        client.end_run()
    client.start_run(run_name=name)
    if settings:
        client.log_params({key: str(value) for key, value in flatten(settings).items()})

    def log(run: Run, record: Mapping[str, Any]) -> None:
        client.log_metrics(finite_numbers(record), step=int(record["round"]))

    return log


def wandb(
    project: str,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    module: str = "wandb",
    **options: Any,
) -> Callback:
    """Return a callback that logs to Weights & Biases; the tracked run starts with the first round.

    Args:
        project: The project.
        name: The name of the run.
        settings: The logged configuration; by default the algorithm and the seed.
        module: A module with the same ``init`` and ``log``, such as trackio.
        options: Further arguments of its ``init``.
    """
    client = _import_tracker(module)
    started: list[Any] = []

    def log(run: Run, record: Mapping[str, Any]) -> None:
        if not started:
            logged = flatten(settings) if settings else {"algorithm": repr(run.algorithm), "seed": run.key.seed}
            started.append(client.init(project=project, name=name, config=logged, **options))
        client.log(finite_numbers(record), step=int(record["round"]))

    return log


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is unknown or not installed, before anything is started."""
    for name in names:
        if name not in MODULES:
            raise HansaError(f"--track {name}: no such tracker. {suggestion(name, MODULES)}")
        _import_tracker(name)


def build_trackers(names: Sequence[str], experiment: Experiment) -> list[Callback]:
    """Return the callbacks of the trackers named on the command line."""
    from hansa.config import to_dict

    title, settings = experiment.config.title, to_dict(experiment.config)
    callbacks: list[Callback] = []
    for name in names:
        if name == "tensorboard":
            callbacks.append(tensorboard(experiment.folder / "tensorboard"))
        elif name == "mlflow":
            callbacks.append(mlflow(title, settings))
        else:
            callbacks.append(wandb("hansa", title, settings, module=name))
    return callbacks


def finite_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record.

    >>> finite_numbers({"round": 3, "loss": float("nan"), "test_accuracy": 0.5, "moved": True, "clients": [1]})
    {'test_accuracy': 0.5}
    """
    return {name: float(value) for name, value in record.items() if name != "round" and is_finite(value)}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names.

    >>> flatten({"seed": 0, "local": {"lr": 0.1}})
    {'seed': 0, 'local.lr': 0.1}
    """
    flattened: dict[str, Any] = {}
    for key, value in tree.items():
        flattened.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flattened


def _import_tracker(name: str) -> Any:
    try:
        return import_module(MODULES.get(name, name))
    except ImportError as error:
        extra = "'hansa[track]'" if name in ("tensorboard", "mlflow") else name
        raise HansaError(f"tracking with {name} needs it installed: pip install {extra}.") from error
