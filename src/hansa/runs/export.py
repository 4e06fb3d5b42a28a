"""The trained model of a run folder: as a module, its predictions, and exports to other formats."""

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
from hansa.config import allow_code, build
from hansa.config.sections import AUGMENT
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL
from hansa.runs.driver import Run
from hansa.runs.experiment import build_run
from hansa.runs.folder import RunFolder
from hansa.runs.folder_lock import CLIENTS
from hansa.runs.folder_lock import MODEL as MODEL_FILE
from hansa.runs.per_client import check_client, client_vectors, has_client_models
from hansa.runs.seed_group import SeedGroupFolder
from hansa.runs.store import DiskStore, io
from hansa.training import Task
from hansa.training.augment import as_pipeline
from hansa.training.losses import strip_weights

FORMATS = (".safetensors", ".pt", ".onnx")


@allow_code()
def load_model(
    folder: Path | str,
    model: Callable[[], nn.Module] | None = None,
    *,
    client: int | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
    trust: bool = False,
) -> nn.Module:
    """Load the trained model of a run folder, in evaluation mode.

    A run of a configuration builds its own model, and code that it names is imported.

    Args:
        folder: The folder of a run, or of several seeds.
        model: For a run started in Python, the class or function that its task was made with.
        client: Load the model of this client: its own in decentralized runs, else the server's with its private blocks.
        algorithm: For a client's model of a run started in Python, its algorithm.
        task: For a client's model of a run started in Python, its task.
        trust: Import code that the folder names even if this user did not create the folder on this machine.

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
    run_folder = _find_run_folder(folder)
    if model is None or client is not None:
        run_folder.require_trust(trust=trust)
    if client is not None:
        return _load_client_model(run_folder, client, algorithm, task)
    if model is None:
        if run_folder.config.python is not None:
            raise HansaError(
                f"{run_folder}: started in Python, so its model is not in the folder: load_model(..., model=YOURS)."
            )
        model = build.build_task(run_folder.config, build.load_data(run_folder.config)).model
    return _load_weights(run_folder, model)


def _load_client_model(run_folder: RunFolder, client: int, algorithm: Algorithm | None, task: Task | None) -> nn.Module:
    config = run_folder.config
    if config.python is None:
        run = build_run(config, build.load_data(config))
    elif algorithm is None or task is None:
        raise HansaError(
            f"{run_folder}: started in Python: load_model(..., client={client}, algorithm=YOURS, task=YOURS)."
        )
    else:
        run = Run(algorithm, task, seed=config.seed)
    run_task = run.task
    assert isinstance(run_task, Task)
    check_client(client, run_task.population.count)
    state, buffers = run_task.layout.pack(_load_weights(run_folder, run_task.model), run.dtype)
    vectors = {MODEL: state, BUFFERS: buffers} if run_task.layout.buffer_dim else {MODEL: state}
    if not has_client_models(run.algorithm):  # raises before looking for client rows, which such a run does not have
        client_vectors(run.algorithm, vectors, run.store, client)
    if not (run_folder / CLIENTS).is_dir():
        raise HansaError(f"{run_folder}: has no client rows, because checkpoint.every is 0.")
    with DiskStore.open(run_folder / CLIENTS) as store:
        if store.generation != int(run_folder.summary["rounds"]):
            raise HansaError(f"{run_folder}: the client rows are at round {store.generation}: resume the run first.")
        return run_task.module(client_vectors(run.algorithm, vectors, store, client)).eval()


def predict(model: nn.Module, inputs: Tensor, batch_size: int = 500) -> Tensor:
    """Return the outputs of a model, one row per input.

    Args:
        model: A module; it is evaluated without gradients.
        inputs: The inputs, one per row.
        batch_size: How many rows to evaluate at a time.

    >>> import torch
    >>> predict(torch.nn.Linear(2, 1), torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    check_integer("predict", "batch_size", batch_size)
    if len(inputs) == 0:
        raise invalid_argument("predict", "inputs", tuple(inputs.shape), "at least one row")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([model(inputs[start : start + batch_size]) for start in range(0, len(inputs), batch_size)])
    finally:
        model.train(was_training)


class Predictions(NamedTuple):
    """Outputs of a run's model; for classifiers the class of each row; and the targets if they are known."""

    outputs: Tensor
    classes: Tensor | None
    targets: Tensor | None


@allow_code()
def predict_from_folder(
    folder: Path | str, inputs: Path | str | None = None, client: int | None = None, *, trust: bool = False
) -> Predictions:
    """Return the predictions of a run's model, or of a client's, for a file of inputs or for the run's test data.

    With a client and test rows that have owners, only its own test rows are used. ``trust`` is as in `load_model`.
    """
    run_folder = _find_run_folder(folder)
    run_folder.require_trust(trust=trust)
    if run_folder.config.python is not None:
        raise HansaError(f"{run_folder}: started in Python: hansa.load_model(..., model=YOURS) and hansa.predict.")
    federated = build.load_data(run_folder.config)
    if client is None:
        model = _load_weights(run_folder, build.build_task(run_folder.config, federated).model)
    else:
        model = _load_client_model(run_folder, client, None, None)
    if inputs is not None:
        rows, targets = _cast_inputs(read_inputs(inputs), federated, model), None
    elif federated.test_inputs is None or federated.test_targets is None:
        raise HansaError(f"{run_folder}: its data has no test rows: pass a file of inputs.")
    else:
        rows, targets = federated.test_inputs, strip_weights(federated.test_targets)
        if client is not None and federated.test_owners is not None:
            own_rows = federated.test_owners == client
            if not bool(own_rows.any()):
                raise HansaError(f"{run_folder}: client {client} owns no test rows: pass a file of inputs.")
            rows, targets = rows[own_rows], targets[own_rows]
        rows = _cast_inputs(rows, federated, model)
    preprocess = as_pipeline(AUGMENT.build(run_folder.config.data.augment) or ()).test_pipeline()
    outputs = predict(model, preprocess(rows, Key(0), torch.Generator()))  # normalized as in the run
    labelled = federated.classes is not None and outputs.ndim == 2 and outputs.shape[1] == federated.classes
    return Predictions(outputs, outputs.argmax(1) if labelled else None, targets)


def read_inputs(path: Path | str) -> Tensor:
    """Read inputs from .npy, .npz, .safetensors (the array ``inputs``, or the only one) or .csv of numbers."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return torch.from_numpy(_only(path, {name: arrays[name] for name in arrays.files}))
        if path.suffix == ".safetensors":
            tensor: Tensor = _only(path, safetensors.torch.load(path.read_bytes()))
            return tensor
        if path.suffix == ".csv":
            lines = path.read_text(encoding="utf-8").splitlines()
            skip = 0 if lines and _numeric(lines[0]) else 1
            return torch.from_numpy(np.loadtxt(lines, delimiter=",", skiprows=skip, ndmin=2, dtype=np.float32))
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise HansaError(f"{path}: {error}") from error
    raise HansaError(f"{path}: expected .npy, .npz, .safetensors or .csv.")


def export(
    folder: Path | str, path: Path | str, model: Callable[[], nn.Module] | None = None, *, trust: bool = False
) -> Path:
    """Write the model of a run folder to a file and return its path.

    Args:
        folder: The folder of a run.
        path: The file: .safetensors or .pt (the state dict), or .onnx (needs ``hansa[onnx]``).
        model: For ONNX of a run started in Python, the class or function that its task was made with.
        trust: For ONNX, import code that the folder names even if this user did not create the folder on this machine.

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
    run_folder, path = _find_run_folder(folder), Path(path)
    if path.suffix not in FORMATS:
        raise HansaError(f"{path}: expected a name that ends in {', '.join(FORMATS)}.")
    io.make_folder(path.parent.resolve())
    if path.suffix == ".onnx":
        _onnx(run_folder, path, model, trust)
        return path
    content = run_folder.read_model()
    if path.suffix == ".pt":
        buffer = memory.BytesIO()
        torch.save(safetensors.torch.load(content), buffer)
        content = buffer.getvalue()
    io.write_file(path, content)
    return path


@allow_code()
def _onnx(run_folder: RunFolder, path: Path, model: Callable[[], nn.Module] | None, trust: bool) -> None:
    run_folder.require_trust(trust=trust)
    if run_folder.config.python is not None:
        raise HansaError(
            f"{run_folder}: started in Python: torch.onnx.export(hansa.load_model(..., model=YOURS), an_input, ...)."
        )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HansaError("export to ONNX needs two packages: pip install 'hansa[onnx]'.") from error
    federated = build.load_data(run_folder.config)
    module = load_model(run_folder.path, model, trust=trust)
    example = _cast_inputs(federated.inputs[:2], federated, module)
    torch.onnx.export(
        module,
        (example,),
        str(path),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _find_run_folder(path: Path | str) -> RunFolder:
    group = SeedGroupFolder(path)
    if group.exists:
        raise HansaError(f"{group}: holds several seeds; pass one of them: {group.runs[0] if group.runs else group}.")
    run_folder = RunFolder.containing(path)
    if not (run_folder / MODEL_FILE).is_file():
        raise HansaError(f"{run_folder}: {MODEL_FILE} is missing: it is written when a run ends or stops.")
    return run_folder


def _load_weights(run_folder: RunFolder, model: Callable[[], nn.Module]) -> nn.Module:
    state = safetensors.torch.load(run_folder.read_model())
    module = model()
    own = module.state_dict()
    if set(own) != set(state) or any(own[name].shape != tensor.shape for name, tensor in state.items()):
        wrong = sorted(set(own) ^ set(state)) or [n for n, t in state.items() if own[n].shape != t.shape]
        raise HansaError(f"{run_folder}: the model does not match the trained one: {', '.join(wrong[:5])}.")
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        module.double()
    module.load_state_dict(state)
    return module.eval()


def _cast_inputs(rows: Tensor, federated: data.FederatedData, model: nn.Module) -> Tensor:
    """Return rows with the shape of the run's data and the dtype of the model."""
    shape = tuple(federated.inputs.shape[1:])
    if tuple(rows.shape[1:]) != shape:
        if rows[0].numel() != federated.inputs[0].numel():
            raise HansaError(f"inputs of shape {tuple(rows.shape[1:])}: the model takes {shape}.")
        rows = rows.reshape(len(rows), *shape)
    if not federated.inputs.is_floating_point():
        return rows.to(federated.inputs.dtype)
    dtype: torch.dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return rows.to(dtype)


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
