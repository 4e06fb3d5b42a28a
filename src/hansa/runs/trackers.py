"""TensorBoard, MLflow and all that looks like Weights & Biases, as callbacks.

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
    from hansa.runs.driver import Callback, Run
    from hansa.runs.experiment import Experiment


def tensorboard(folder: Path | str) -> Callback:
    """A callback that writes every number of a round as a TensorBoard scalar."""
    writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def log(run: Run, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record).items():
            writer.add_scalar(name, value, int(record["round"]))
        writer.flush()

    return log


def mlflow(name: str, settings: Mapping[str, Any] | None = None, uri: str | None = None) -> Callback:
    """A callback that logs a run to MLflow: its settings once, its numbers every round.

    The run ends with the process or with the next `mlflow` callback; ``uri`` defaults to MLflow's own setting.
    """
    client = _module("mlflow", "mlflow")
    if uri is not None:
        client.set_tracking_uri(uri)
    if client.active_run() is not None:
        client.end_run()
    client.start_run(run_name=name)
    if settings:
        client.log_params({key: str(value) for key, value in flat(settings).items()})

    def log(run: Run, record: Mapping[str, Any]) -> None:
        client.log_metrics(numbers(record), step=int(record["round"]))

    return log


def wandb(
    project: str,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    module: str = "wandb",
    **options: Any,
) -> Callback:
    """A callback that logs to Weights & Biases, or to a ``module`` with the same ``init`` and ``log``, such as trackio.

    ``options`` go to its ``init``. The run begins with the first round, and ends with the process or with the next one;
    its step is the round.
    """
    client = _module(module, module)
    begun: list[Any] = []

    def log(run: Run, record: Mapping[str, Any]) -> None:
        if not begun:
            told = flat(settings) if settings else {"algorithm": repr(run.algorithm), "seed": run.key.seed}
            begun.append(client.init(project=project, name=name, config=told, **options))
        client.log(numbers(record), step=int(record["round"]))

    return log


def check(names: Sequence[str]) -> None:
    """Refuse a tracker that is unknown or not installed, before anything is begun."""
    known = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}
    for name in names:
        if name not in known:
            raise HansaError(f"--track {name}: no such tracker. {suggestion(name, known)}")
        _module(known[name], name)


def trackers(names: Sequence[str], experiment: Experiment) -> list[Callback]:
    """The callbacks that a command line asked for by name."""
    from hansa.config import to_data

    check(names)
    config = experiment.config
    known: dict[str, Callable[[], Callback]] = {
        "tensorboard": lambda: tensorboard(experiment.folder / "tensorboard"),
        "mlflow": lambda: mlflow(config.title, to_data(config)),
        "wandb": lambda: wandb("hansa", config.title, to_data(config)),
        "trackio": lambda: wandb("hansa", config.title, to_data(config), module="trackio"),
    }
    return [known[name]() for name in names]


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record.

    >>> numbers({"round": 3, "loss": float("nan"), "test_accuracy": 0.5, "moved": True, "clients": [1]})
    {'test_accuracy': 0.5}
    """
    return {
        name: float(value)
        for name, value in record.items()
        if name != "round" and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings under dotted names.

    >>> flat({"seed": 0, "local": {"lr": 0.1}})
    {'seed': 0, 'local.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value})
    return found


def _module(name: str, product: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        extra = product if product in ("wandb", "trackio") else "'hansa[track]'"
        raise HansaError(f"tracking with {product} needs it installed: pip install {extra}.") from error
