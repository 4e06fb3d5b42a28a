"""Callbacks for TensorBoard, MLflow, and trackers with the interface of Weights & Biases.

``hansa.run(..., callbacks=[tensorboard("logs")])``. Needs ``hansa[track]``, or the tracker's own package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError, suggestion

if TYPE_CHECKING:
    from hansa.runs.driver import Run
    from hansa.runs.experiment import Experiment
    from hansa.runs.options import Callback


def tensorboard(folder: Path | str) -> Callback:
    """Return a callback that writes every number of a round as a TensorBoard scalar to ``folder``."""
    writer = _import_tracker("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def log(run: Run, record: Mapping[str, Any]) -> None:
        for name, value in finite_numbers(record).items():
            writer.add_scalar(name, value, int(record["round"]))
        writer.flush()

    return log


def mlflow(name: str, settings: Mapping[str, Any] | None = None, uri: str | None = None) -> Callback:
    """Return a callback that logs a run to MLflow; the MLflow run ends with the process or the next `mlflow` callback.

    Args:
        name: The name of the run.
        settings: Logged once as parameters.
        uri: The tracking server; by default MLflow's own setting.
    """
    client = _import_tracker("mlflow", "mlflow")
    if uri is not None:
        client.set_tracking_uri(uri)
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
    client = _import_tracker(module, module)
    started: list[Any] = []

    def log(run: Run, record: Mapping[str, Any]) -> None:
        if not started:
            logged = flatten(settings) if settings else {"algorithm": repr(run.algorithm), "seed": run.key.seed}
            started.append(client.init(project=project, name=name, config=logged, **options))
        client.log(finite_numbers(record), step=int(record["round"]))

    return log


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is unknown or not installed, before anything is started."""
    known = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}
    for name in names:
        if name not in known:
            raise HansaError(f"--track {name}: no such tracker. {suggestion(name, known)}")
        _import_tracker(known[name], name)


def build_trackers(names: Sequence[str], experiment: Experiment) -> list[Callback]:
    """Return the callbacks of the trackers named on the command line."""
    from hansa.config import to_dict

    check_trackers(names)
    config = experiment.config
    known: dict[str, Callable[[], Callback]] = {
        "tensorboard": lambda: tensorboard(experiment.folder / "tensorboard"),
        "mlflow": lambda: mlflow(config.title, to_dict(config)),
        "wandb": lambda: wandb("hansa", config.title, to_dict(config)),
        "trackio": lambda: wandb("hansa", config.title, to_dict(config), module="trackio"),
    }
    return [known[name]() for name in names]


def finite_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record.

    >>> finite_numbers({"round": 3, "loss": float("nan"), "test_accuracy": 0.5, "moved": True, "clients": [1]})
    {'test_accuracy': 0.5}
    """
    return {
        name: float(value)
        for name, value in record.items()
        if name != "round" and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names.

    >>> flatten({"seed": 0, "local": {"lr": 0.1}})
    {'seed': 0, 'local.lr': 0.1}
    """
    flattened: dict[str, Any] = {}
    for key, value in tree.items():
        flattened.update(flatten(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value})
    return flattened


def _import_tracker(name: str, product: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        extra = product if product in ("wandb", "trackio") else "'hansa[track]'"
        raise HansaError(f"tracking with {product} needs it installed: pip install {extra}.") from error
