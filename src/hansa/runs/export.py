"""The trained model of a run folder: loading, predictions, and exports to other formats.

An ONNX graph is written by torch's exporter. It takes the inputs of the model: for tables the encoded inputs, in the
order of `Schema.inputs`; for images floats, which it normalises as ``data.augment`` did.
"""

from __future__ import annotations

import io as memory
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from hansa.algorithm import Algorithm
from hansa.config import Config, allow_code, build, only_look
from hansa.config.import_path import named_code
from hansa.config.sections import AUGMENT, ModelSection
from hansa.core import trees
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL
from hansa.data.arrays import as_tensors
from hansa.runs.driver import Run
from hansa.runs.experiment import build_run
from hansa.runs.folder import MODEL as MODEL_FILE
from hansa.runs.folder import RunFolder, SeedGroupFolder
from hansa.runs.per_client import check_client, client_vectors
from hansa.runs.preprocessing import PREPROCESSING, Preprocessing, read_preprocessing, write_preprocessing
from hansa.runs.record import RunRecord
from hansa.runs.store import DamagedFileError, DiskStore, io
from hansa.training import Task
from hansa.training.augment import Pipeline, as_pipeline, normalize
from hansa.training.batch_sources import count_rows, describe_shapes, has_rows, take_rows
from hansa.training.evaluation import concatenate_outputs
from hansa.training.losses import strip_weights
from hansa.training.modules import model_caller, naming, saved_tensors

log = logging.getLogger("hansa")

FORMATS = (".safetensors", ".pt", ".onnx")


class Predictions(NamedTuple):
    """Outputs of a model; for classifiers the class of each row; known targets; the names of classes.

    >>> Predictions(torch.zeros(1, 2), torch.tensor([0]), None).classes.tolist()
    [0]
    """

    outputs: Any
    classes: Tensor | None
    targets: Tensor | None
    class_names: tuple[str, ...] = ()


def trained_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a model's inputs: that of its trained parameters (frozen ones may be narrower).

    >>> trained_dtype(nn.Sequential(nn.Linear(2, 2).requires_grad_(False).bfloat16(), nn.Linear(2, 1)))
    torch.float32
    """
    dtypes = [p.dtype for p in sorted(module.parameters(), key=lambda p: not p.requires_grad)]
    return dtypes[0] if dtypes else torch.float32


class TrainedModel(nn.Module):
    """A module in evaluation mode that normalises its inputs as the run did.

    Calling it with inputs in the form of the run's data applies the normalisations of ``data.augment`` and then
    ``module``. `predict` also takes raw inputs: it encodes a data frame or CSV file by the run's schema, and scales
    images of bytes like the data set.

    Args:
        module: The trained module.
        preprocessing: The preprocessing of its inputs.
        pipeline: The normalisations, if they are not those of ``preprocessing``.

    >>> TrainedModel(nn.Linear(2, 1)).predict(torch.zeros(3, 2)).outputs.shape
    torch.Size([3, 1])
    """

    def __init__(
        self, module: nn.Module, preprocessing: Preprocessing | None = None, pipeline: Pipeline | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.preprocessing = Preprocessing() if preprocessing is None else preprocessing
        self.pipeline = Pipeline(self.preprocessing.normalize) if pipeline is None else pipeline
        self.train(module.training)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if len(inputs) != 1:
            return self.module(*inputs, **keywords)
        (rows,) = inputs
        if not all(isinstance(transform, normalize) for transform in self.pipeline.parts):
            rows = self.pipeline(rows, Key(0), torch.Generator())
        else:
            for transform in self.pipeline.parts:  # deterministic, and exporters can trace them
                rows = transform(rows, torch.default_generator)
        call = self.module if keywords or isinstance(rows, Tensor) else model_caller(self.module, rows)
        return call(rows, **keywords)

    def predict(self, frame: Any, *, client: str | None = None, batch_size: int = 500) -> Predictions:
        """Return predictions for raw inputs.

        Args:
            frame: For tables a data frame, a dict of columns, a list of dicts or the path of a CSV file; otherwise an
                array or tensor of inputs, or a dict or tuple of them as in training.
            client: For columns scaled by site, the client whose statistics are used.
            batch_size: Number of rows to evaluate at a time.
        """
        record, targets, rows = self.preprocessing, None, frame
        dtype = trained_dtype(self.module)
        if isinstance(frame, (Tensor, np.ndarray)):
            rows = torch.as_tensor(frame)
            rows = rows if record.shape is None else record.read_tensor(rows)
        elif record.encoding is not None:
            rows, targets = record.encoding.inputs(frame, client), record.encoding.targets(frame)
        elif isinstance(frame, (Mapping, tuple)):
            rows = as_tensors("predict", "inputs", frame, dtype)
        else:
            raise HansaError(
                f"predict: {type(frame).__name__}: expected a tensor, or a dict or tuple of tensors: the model was not "
                "trained on tables."
            )
        if isinstance(rows, Tensor) and rows.is_floating_point():
            rows = rows.to(dtype)
        outputs, classes = predict(self, rows, batch_size), None
        if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == record.classes:
            classes = outputs.argmax(1)
        return Predictions(outputs, classes, targets, self.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, for tables."""
        encoding = self.preprocessing.encoding
        target = None if encoding is None else encoding.schema.target
        return () if target is None or target.categories is None else target.categories


def predict(model: nn.Module, inputs: Any, batch_size: int = 500) -> Any:
    """Return the outputs of a model: a tensor, or a dict or tuple of tensors, with a row per input.

    Args:
        model: A module, evaluated without gradients. A model of `load_model` normalises inputs as its run did.
        inputs: The inputs, one per row: a tensor, or a dict or tuple of tensors as in training.
        batch_size: Number of rows to evaluate at a time.

    >>> import torch
    >>> predict(torch.nn.Linear(2, 1), torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    check_integer("predict", "batch_size", batch_size)
    rows = count_rows(inputs)
    if rows == 0 or not has_rows(inputs, rows):
        expected = "at least one row, and equally many in every tensor"
        raise invalid_argument("predict", "inputs", describe_shapes(inputs), expected)
    call = model if isinstance(model, TrainedModel) else model_caller(model, inputs)
    name = type(model.module if isinstance(model, TrainedModel) else model).__name__
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), naming(f"{name} cannot take inputs {describe_shapes(inputs)}"):
            windows = [slice(start, start + batch_size) for start in range(0, rows, batch_size)]
            outputs = [call(trees.tree_map(lambda leaf, window=window: leaf[window], inputs)) for window in windows]
    finally:
        model.train(was_training)
    if len(windows) > 1 and not has_rows(outputs[0], batch_size):
        expected = f"{rows} or more, since the model returns {describe_shapes(outputs[0])}, not one row per input"
        raise invalid_argument("predict", "batch_size", batch_size, expected)
    return outputs[0] if len(windows) == 1 else concatenate_outputs(outputs)


@allow_code()
def load_model(
    folder: Path | str,
    model: Callable[[], nn.Module] | None = None,
    *,
    client: int | None = None,
    algorithm: Algorithm | None = None,
    task: Task | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load the trained model of a run folder, in evaluation mode and with its preprocessing.

    The model of a configuration is built from it; code that it names is imported. The training data is not needed.

    Args:
        folder: The folder of a run, or a .safetensors or .pt file that `export` wrote, with the file beside it.
        model: For a run started in Python, the class or function of its task's model.
        client: Load the model of this client: its own in decentralized runs, else the server's with its private blocks.
        algorithm: For a client's model of a run started in Python, its algorithm.
        task: For a client's model of a run started in Python, its task.
        trust: Import code that the folder names, even if this user did not create the folder on this machine.

    >>> import tempfile
    >>> import torch
    >>> import hansa
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = hansa.data.from_arrays(torch.rand(12, 2), torch.rand(12, 1), clients=3)
    ...     task = hansa.Task(lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, rows)
    ...     run = hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, out=f"{folder}/run")
    ...     trained = load_model(f"{folder}/run", lambda: torch.nn.Linear(2, 1))
    >>> trained.module
    Linear(in_features=2, out_features=1, bias=True)
    >>> trained.predict(torch.zeros(3, 2)).outputs.shape
    torch.Size([3, 1])
    """
    if _is_exported(Path(folder)):
        return _load_exported(Path(folder), model)
    run_folder = _find_run_folder(folder)
    config = run_folder.config
    if model is None or client is not None or named_code(config.data.augment):
        run_folder.require_trust(trust=trust)
    record, _ = read_preprocessing(run_folder / PREPROCESSING) or (None, {})
    if client is not None:
        module = _load_client_model(run_folder, client, algorithm, task)
    elif model is None and config.python is not None:
        raise HansaError(
            f"{run_folder}: started in Python, so its model is not in the folder: load_model(..., model=YOURS)."
        )
    else:
        if model is None:  # built without the training data where possible
            template = None if record is None else record.template()
            model = build.model_factory(config, build.load_data(config) if template is None else template)
        module = _load_state(model, _state_of(run_folder.read_model()), run_folder)
    if config.python is None:
        return TrainedModel(module, record, as_pipeline(AUGMENT.build(config.data.augment) or ()).test_pipeline())
    if record is not None and record.own:
        log.warning("%s: test rows passed through %s, which the loaded model does not apply: apply it yourself",
                    run_folder, ", ".join(record.own))  # fmt: skip
    return TrainedModel(module, record)


def _load_exported(path: Path, model: Callable[[], nn.Module] | None) -> TrainedModel:
    """Load an exported model by the file beside it; a model that is not built in is the caller's.

    Both files are untrusted: nothing in them is unpickled, and no code that they name is imported.
    """
    if path.suffix == ".pt":
        raise HansaError(
            f"{path}: a .pt file is a pickle, which is not loaded. Export the run to .safetensors, or load the state "
            "dict with torch.load if you trust the file."
        )
    sidecar = sidecar_path(path)
    stored = read_preprocessing(sidecar)
    if stored is None:
        raise HansaError(f"{path}: {sidecar.name}, which `hansa export` writes beside it, is missing.")
    record, metadata = stored
    content = path.read_bytes()
    if metadata.get("model_sha256") != io.sha256(content):
        raise DamagedFileError(f"{path}: {sidecar.name} belongs to another file: its SHA-256 differs. Export it again.")
    if model is None:
        template = record.template()
        if metadata.get("model") is None or template is None:
            raise HansaError(f"{path}: its model is your own code: load_model(..., model=YOURS).")
        if code := named_code(metadata["model"]):
            raise HansaError(
                f"{sidecar}: names code, {', '.join(code)}, which `hansa export` does not write. It was not imported: "
                "load_model(..., model=YOURS)."
            )
        with only_look():
            model = build.model_factory(Config(model=ModelSection.model_validate(metadata["model"])), template)
    return TrainedModel(_load_state(model, safetensors.torch.load(content), path), record)


def _is_exported(path: Path) -> bool:
    """Return whether a path is an exported model, and not the model of a run folder."""
    if not path.is_file() or path.suffix not in (".safetensors", ".pt"):
        return False
    return path.name != MODEL_FILE or sidecar_path(path).is_file() or not RunFolder.containing(path).exists


def sidecar_path(path: Path) -> Path:
    """Return the file with the preprocessing beside an exported model.

    >>> sidecar_path(Path("model.pt")).name
    'model.pt.preprocessing.json'
    """
    return path.with_name(f"{path.name}.{PREPROCESSING}")


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
    module = _load_state(run_task.model, _state_of(run_folder.read_model()), run_folder)
    wide = any(tensor.dtype == torch.float64 for tensor in saved_tensors(module).values())
    state, buffers = run_task.layout.pack(module, torch.float64 if wide else run.dtype)
    vectors = {MODEL: state, BUFFERS: buffers} if run_task.layout.buffer_dim else {MODEL: state}
    if not run_folder.checkpoint_rounds:
        raise HansaError(f"{run_folder}: has no client rows, because checkpoint.every is 0.")
    with RunRecord(run_folder.path) as record:
        store = DiskStore(record)
        if store.generation != int(run_folder.summary["rounds"]):
            raise HansaError(f"{run_folder}: the client rows are at round {store.generation}: resume the run first.")
        return run_task.module(client_vectors(run.algorithm, vectors, store, client)).eval()


@allow_code()
def predict_from_folder(
    folder: Path | str,
    inputs: Path | str | None = None,
    client: int | None = None,
    *,
    site: str | None = None,
    preprocessing: Path | str | None = None,
    trust: bool = False,
) -> Predictions:
    """Return the predictions of a run's model, or of a client's, for a file of inputs or for the run's test data.

    A file passes through the preprocessing of the run, without its training data. With a client and test rows that have
    owners, only its own test rows are used. ``site`` names the client whose statistics scale columns with
    ``scale: site``; in a federation they are in ``preprocessing``, a file in the site's folder. ``trust`` is as in
    `load_model`. The folder may also be an exported model.
    """
    if _is_exported(Path(folder)):
        if inputs is None:
            raise HansaError(f"{folder}: an exported model has no test data: pass a file of inputs.")
        return _predict_file(load_model(folder), inputs, site, preprocessing)
    run_folder = _find_run_folder(folder)
    run_folder.require_trust(trust=trust)
    if run_folder.config.python is not None:
        raise HansaError(f"{run_folder}: started in Python: hansa.load_model(..., model=YOURS) and hansa.predict.")
    model = load_model(run_folder.path, client=client, trust=trust)
    if inputs is not None:
        return _predict_file(model, inputs, site, preprocessing)
    federated = build.load_data(run_folder.config)
    if federated.test_inputs is None or federated.test_targets is None:
        raise HansaError(f"{run_folder}: its data has no test rows: pass a file of inputs.")
    rows, targets = federated.test_inputs, strip_weights(federated.test_targets)
    if client is not None and federated.test_owners is not None:
        own_rows = federated.test_owners == client
        if not bool(own_rows.any()):
            raise HansaError(f"{run_folder}: client {client} owns no test rows: pass a file of inputs.")
        rows, targets = take_rows(rows, own_rows), take_rows(targets, own_rows)
    return model.predict(rows)._replace(targets=targets)


def _predict_file(
    model: TrainedModel, inputs: Path | str, site: str | None, preprocessing: Path | str | None
) -> Predictions:
    if preprocessing is not None:
        record, _ = read_preprocessing(Path(preprocessing)) or (Preprocessing(), {})
        encoding, expected = record.encoding, model.preprocessing.encoding
        if encoding is None or expected is None or encoding.schema != expected.schema:
            raise HansaError(f"{preprocessing}: expected the {PREPROCESSING} of a site, with the model's schema.")
        model = TrainedModel(model.module, record, model.pipeline)
    if model.preprocessing.encoding is not None and Path(inputs).suffix.lower() == ".csv":
        return model.predict(inputs, client=site)
    return model.predict(read_inputs(inputs))


def read_inputs(path: Path | str) -> Tensor:
    """Read inputs from .npy, or .csv of numbers with or without a header."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".csv":
            read = partial(np.loadtxt, path, delimiter=",", ndmin=2, dtype=np.float32)
            with suppress(ValueError):  # a header
                return torch.from_numpy(read())
            return torch.from_numpy(read(skiprows=1))
    except (OSError, ValueError, TypeError) as error:
        raise HansaError(f"{path}: {error}") from error
    raise HansaError(f"{path}: expected .npy or .csv.")


def export(
    folder: Path | str, path: Path | str, model: Callable[[], nn.Module] | None = None, *, trust: bool = False
) -> Path:
    """Write the model of a run folder to a file and return its path.

    A file beside it, ``NAME.preprocessing.json``, holds the run's schema, normalisations and their SHA-256;
    `load_model` reads both. An ONNX graph of a table model takes encoded rows, [rows, inputs of the schema] in float32,
    as `TableEncoding.inputs` returns them; one of images normalises them as ``data.augment`` did.

    Args:
        folder: The folder of a run.
        path: The file: .safetensors or .pt (the state dict), or .onnx (needs ``hansa[onnx]``).
        model: For ONNX of a run started in Python, the class or function of its task's model.
        trust: For ONNX, import code that the folder names, even if this user did not create the folder on this machine.

    >>> import tempfile
    >>> import torch
    >>> import hansa
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = hansa.data.from_arrays(torch.rand(12, 2), torch.rand(12, 1), clients=3)
    ...     task = hansa.Task(lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, rows)
    ...     run = hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, out=f"{folder}/run")
    ...     export(f"{folder}/run", f"{folder}/model.pt").name
    'model.pt'
    """
    run_folder, path = _find_run_folder(folder), Path(path)
    if path.suffix not in FORMATS:
        raise HansaError(f"{path}: expected a name that ends in {', '.join(FORMATS)}.")
    io.make_folder(path.parent.resolve())
    parts = run_folder.read_model()
    content = parts[0] if len(parts) == 1 else safetensors.torch.save(_state_of(parts))
    if path.suffix == ".onnx":
        content = _onnx(run_folder, path, model, trust)
    elif path.suffix == ".pt":
        torch.save(safetensors.torch.load(content), buffer := memory.BytesIO())
        content = buffer.getvalue()
    io.write_file(path, content)
    stored = read_preprocessing(run_folder / PREPROCESSING)
    if stored is None:
        log.warning("%s: the run recorded no preprocessing, so the exported model has none", path)
    else:
        section, model_section = run_folder.config.model, None
        if run_folder.config.python is None and section.factory is None:
            model_section = {"name": section.name} | ({"options": section.options} if section.options else {})
        write_preprocessing(sidecar_path(path), stored[0], model_sha256=io.sha256(content), model=model_section)
    return path


@allow_code()
def _onnx(run_folder: RunFolder, path: Path, model: Callable[[], nn.Module] | None, trust: bool) -> bytes:
    """Return the ONNX graph of a run's model."""
    run_folder.require_trust(trust=trust)
    if not all(map(find_spec, ("onnx", "onnxscript"))):
        raise HansaError("export to ONNX needs two packages: pip install 'hansa[onnx]'.")
    module = load_model(run_folder.path, model, trust=trust)
    record = module.preprocessing
    if record.own and run_folder.config.python is not None:
        log.warning("%s: does not contain your %s, which test rows passed through", path, ", ".join(record.own))
    template = record.template()
    if template is None:
        if run_folder.config.python is not None:
            raise HansaError(
                f"{run_folder}: the model takes several tensors: torch.onnx.export(hansa.load_model(...), inputs, ...)."
            )
        template = build.load_data(run_folder.config)
    rows, dtype = template.inputs[:1].repeat(2, *[1] * (template.inputs.ndim - 1)), trained_dtype(module)
    rows = rows.to(dtype) if rows.is_floating_point() else rows
    shapes = {"inputs": ({0: torch.export.Dim("rows")},)}
    program = torch.onnx.export(module, (rows,), input_names=["inputs"], output_names=["outputs"],
                                dynamic_shapes=shapes, dynamo=True, verbose=False)  # fmt: skip
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def _find_run_folder(path: Path | str) -> RunFolder:
    group = SeedGroupFolder(path)
    if group.exists:
        raise HansaError(f"{group}: has several seeds. Pass one of them: {group.runs[0] if group.runs else group}.")
    run_folder = RunFolder.containing(path)
    if not (run_folder / MODEL_FILE).is_file():
        raise HansaError(f"{run_folder}: {MODEL_FILE} is missing. It is written when a run ends or stops.")
    return run_folder


def _state_of(parts: list[bytes]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in safetensors.torch.load(part).items()}


def _load_state(model: Callable[[], nn.Module], state: dict[str, Tensor], source: object) -> nn.Module:
    """Build a model and load a state dict into it."""
    module = model()
    expected = saved_tensors(module)
    wrong = sorted(set(expected) ^ set(state)) or [n for n, t in state.items() if expected[n].shape != t.shape]
    if wrong:
        raise HansaError(f"{source}: the model does not match the trained one: {', '.join(wrong[:5])}.")
    wide = any(tensor.dtype == torch.float64 for tensor in state.values())
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):  # frozen weights may be narrower
            dtype = state[name].dtype if name in state else torch.float64 if wide else tensor.dtype
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    module.load_state_dict({**module.state_dict(), **state})
    return module.eval()
