"""After the run: its model as a module, what it predicts, and the same model in other formats."""

from __future__ import annotations

import io as memory
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from hansa import data
from hansa.algorithm import Algorithm
from hansa.config import build, parts
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL
from hansa.runs.client_models import check_client, keeps_own, own_vectors
from hansa.runs.driver import Run
from hansa.runs.experiment import living_run
from hansa.runs.folder import CLIENTS, RunFolder
from hansa.runs.folder import MODEL as MODEL_FILE
from hansa.runs.seed_group import GroupFolder
from hansa.runs.store import DiskStore, io
from hansa.training import Task
from hansa.training.augment.base import pipeline
from hansa.training.losses import unweighted

FORMATS = (".safetensors", ".pt", ".onnx")


def load_model(
    folder: Path | str,
    model: Callable[[], nn.Module] | None = None,
    *,
    client: int | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
) -> nn.Module:
    """The trained model of a run's folder, in evaluation mode; with ``client`` the one that this client has: its own in
    decentralized runs, otherwise the server's with the client's private blocks in it.

    A run of a configuration says itself what its model is, and code that it names is imported; one that was begun in
    Python needs ``model``, the class or function that its task was made with, and for a client's the ``algorithm`` and
    the ``task``.

    >>> import tempfile
    >>> import torch
    >>> import hansa
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = hansa.data.from_arrays(torch.rand(12, 2), torch.rand(12, 1), clients=3)
    ...     task = hansa.Task(lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, rows)
    ...     done = hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, out=f"{folder}/run")
    ...     load_model(f"{folder}/run", lambda: torch.nn.Linear(2, 1))
    Linear(in_features=2, out_features=1, bias=True)
    """
    found = _run_folder(folder)
    if client is not None:
        return _of_client(found, client, algorithm, task)
    if model is None:
        if found.config.python is not None:
            raise HansaError(
                f"{found}: begun in Python, so its model is not in the folder: load_model(..., model=YOURS)."
            )
        model = build.task(found.config, build.federated(found.config)).model
    return _filled(found, model)


def _of_client(found: RunFolder, client: int, method: Algorithm | None, task: Task | None) -> nn.Module:
    config = found.config
    if config.python is None:
        run = living_run(config, build.federated(config))
    elif method is None or task is None:
        raise HansaError(
            f"{found}: begun in Python: load_model(..., client={client}, algorithm=YOURS, task=YOURS), as it was begun."
        )
    else:
        run = Run(method, task, seed=config.seed)
    made = run.task
    assert isinstance(made, Task)
    check_client(client, made.population.count)
    state, buffers = made.layout.pack(_filled(found, made.model), run.dtype)
    vectors = {MODEL: state, BUFFERS: buffers} if made.layout.buffer_dim else {MODEL: state}
    if not keeps_own(run.algorithm):  # told before a folder is looked for that such a run does not need
        own_vectors(run.algorithm, vectors, run.store, client)
    if not (found / CLIENTS).is_dir():
        raise HansaError(f"{found}: kept no rows of clients, for checkpoint.every is 0.")
    with DiskStore.open(found / CLIENTS) as store:
        if store.generation != int(found.summary["rounds"]):
            raise HansaError(f"{found}: the clients' rows are of round {store.generation}: resume the run first.")
        return made.module(own_vectors(run.algorithm, vectors, store, client)).eval()


def predict(model: nn.Module, inputs: Tensor, batch_size: int = 500) -> Tensor:
    """What a model says of some inputs, a row each.

    >>> import torch
    >>> predict(torch.nn.Linear(2, 1), torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    check_integer("predict", "batch_size", batch_size)
    if len(inputs) == 0:
        raise invalid_argument("predict", "inputs", tuple(inputs.shape), "at least one row")
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([model(inputs[at : at + batch_size]) for at in range(0, len(inputs), batch_size)])
    finally:
        model.train(was)


class Predicted(NamedTuple):
    """Outputs of a run's model; of classifiers the class of each row, and what was right where that is known."""

    outputs: Tensor
    classes: Tensor | None
    targets: Tensor | None


def predicted(folder: Path | str, inputs: Path | str | None = None, client: int | None = None) -> Predicted:
    """What a run's model, or that of a client, says of the rows of a file, or of the run's own test data: with a client
    of the test rows that are its own, where these have owners."""
    found = _run_folder(folder)
    if found.config.python is not None:
        raise HansaError(f"{found}: begun in Python: hansa.load_model(..., model=YOURS) and hansa.predict.")
    held = build.federated(found.config)
    if client is None:
        model = _filled(found, build.task(found.config, held).model)
    else:
        model = _of_client(found, client, None, None)
    if inputs is not None:
        rows, targets = _fitting(read_inputs(inputs), held, model), None
    elif held.test_inputs is None or held.test_targets is None:
        raise HansaError(f"{found}: its data has no test rows: name a file of inputs.")
    else:
        rows, targets = held.test_inputs, unweighted(held.test_targets)
        if client is not None and held.test_owners is not None:
            mine = held.test_owners == client
            if not bool(mine.any()):
                raise HansaError(f"{found}: client {client} owns no test rows: name a file of inputs.")
            rows, targets = rows[mine], targets[mine]
        rows = _fitting(rows, held, model)
    after = pipeline(parts.AUGMENT.build(found.config.data.augment) or ()).on_test()
    outputs = predict(model, after(rows, Key(0), torch.Generator()))  # normalised as in the run
    labelled = held.classes is not None and outputs.ndim == 2 and outputs.shape[1] == held.classes
    return Predicted(outputs, outputs.argmax(1) if labelled else None, targets)


def read_inputs(path: Path | str) -> Tensor:
    """Rows from .npy, .npz, .safetensors (the array ``inputs``, or the only one) or .csv of numbers."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return torch.from_numpy(_only(path, {name: arrays[name] for name in arrays.files}))
        if path.suffix == ".safetensors":
            found: Tensor = _only(path, safetensors.torch.load(path.read_bytes()))
            return found
        if path.suffix == ".csv":
            lines = path.read_text(encoding="utf-8").splitlines()
            skip = 0 if lines and _numeric(lines[0]) else 1
            return torch.from_numpy(np.loadtxt(lines, delimiter=",", skiprows=skip, ndmin=2, dtype=np.float32))
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise HansaError(f"{path}: {error}") from error
    raise HansaError(f"{path}: expected .npy, .npz, .safetensors or .csv.")


def export(folder: Path | str, path: Path | str, model: Callable[[], nn.Module] | None = None) -> Path:
    """Write a run's model as .safetensors (its state), .pt (the same for ``torch.load``) or .onnx (``hansa[onnx]``).

    >>> import tempfile
    >>> import torch
    >>> import hansa
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = hansa.data.from_arrays(torch.rand(12, 2), torch.rand(12, 1), clients=3)
    ...     task = hansa.Task(lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, rows)
    ...     done = hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, out=f"{folder}/run")
    ...     export(f"{folder}/run", f"{folder}/model.pt").name
    'model.pt'
    """
    found, path = _run_folder(folder), Path(path)
    if path.suffix not in FORMATS:
        raise HansaError(f"{path}: expected a name that ends in {', '.join(FORMATS)}.")
    io.make_folder(path.parent.resolve())
    if path.suffix == ".onnx":
        _onnx(found, path, model)
        return path
    content = found.read_model()
    if path.suffix == ".pt":
        written = memory.BytesIO()
        torch.save(safetensors.torch.load(content), written)
        content = written.getvalue()
    io.write_file(path, content)
    return path


def _onnx(found: RunFolder, path: Path, model: Callable[[], nn.Module] | None) -> None:
    if found.config.python is not None:
        raise HansaError(
            f"{found}: begun in Python: torch.onnx.export(hansa.load_model(..., model=YOURS), an_input, ...)."
        )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HansaError("export to ONNX needs two packages: pip install 'hansa[onnx]'.") from error
    held = build.federated(found.config)
    made = load_model(found.path, model)
    example = _fitting(held.inputs[:2], held, made)
    torch.onnx.export(
        made,
        (example,),
        str(path),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _run_folder(path: Path | str) -> RunFolder:
    group = GroupFolder(path)
    if group.exists:
        raise HansaError(f"{group}: holds several seeds; name one of them: {group.runs[0] if group.runs else group}.")
    found = RunFolder.holding(path)
    if not (found / MODEL_FILE).is_file():
        raise HansaError(
            f"{found}: no model here, for there is no {MODEL_FILE}: it is written when a run ends or stops."
        )
    return found


def _filled(found: RunFolder, make: Callable[[], nn.Module]) -> nn.Module:
    state = safetensors.torch.load(found.read_model())
    module = make()
    own = module.state_dict()
    if set(own) != set(state) or any(own[name].shape != tensor.shape for name, tensor in state.items()):
        wrong = sorted(set(own) ^ set(state)) or [n for n, t in state.items() if own[n].shape != t.shape]
        raise HansaError(
            f"{found}: the model that was made does not fit the one that was trained: {', '.join(wrong[:5])}."
        )
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        module.double()
    module.load_state_dict(state)
    return module.eval()


def _fitting(rows: Tensor, held: data.FederatedData, model: nn.Module) -> Tensor:
    """Rows in the shape and kind that the run's data have, and as wide as the model's numbers."""
    shape = tuple(held.inputs.shape[1:])
    if tuple(rows.shape[1:]) != shape:
        if rows[0].numel() != held.inputs[0].numel():
            raise HansaError(f"inputs of shape {tuple(rows.shape[1:])}: the model takes {shape}.")
        rows = rows.reshape(len(rows), *shape)
    if not held.inputs.is_floating_point():
        return rows.to(held.inputs.dtype)
    wide: torch.dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return rows.to(wide)


def _only(path: Path, arrays: dict[str, Any]) -> Any:
    if "inputs" in arrays:
        return arrays["inputs"]
    if len(arrays) != 1:
        raise HansaError(f"{path}: expected an array called inputs, found {', '.join(sorted(arrays)) or 'none'}.")
    return next(iter(arrays.values()))


def _numeric(line: str) -> bool:
    try:
        [float(word) for word in line.split(",")]
    except ValueError:
        return False
    return True
