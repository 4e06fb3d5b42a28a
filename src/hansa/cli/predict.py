"""``hansa predict`` and ``hansa export``: use the trained model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hansa.cli import options as opt
from hansa.cli.console import say
from hansa.core.errors import HansaError
from hansa.study.report.formats import format_percent

if TYPE_CHECKING:
    from hansa.runs.export import Predictions

Folder = Annotated[Path, typer.Argument(help="Run folder.")]
Model = Annotated[Path, typer.Argument(help="Run folder, or a .safetensors file that was exported from one.")]


def predict(
    folder: Model,
    inputs: Annotated[
        Path | None,
        typer.Argument(help="Inputs: .csv or .npy. By default the test data of the run.", show_default=False),
    ] = None,
    client: Annotated[
        int | None, typer.Option("--client", help="Use the model of this client, by default on its test rows.", min=0)
    ] = None,
    site: Annotated[
        str | None,
        typer.Option("--site", help="For columns scaled by site, the name of the client whose statistics are used."),
    ] = None,
    preprocessing: Annotated[
        Path | None,
        typer.Option("--preprocessing", help="In a federation, the preprocessing.json of the site, for such columns."),
    ] = None,
    to: Annotated[
        Path, typer.Option("--out", "-o", help="Where to write the predictions: .csv, or .npy for raw outputs.")
    ] = Path("predictions.csv"),
    trust: opt.Trust = False,
) -> None:
    """Predict classes or raw outputs for new inputs.

    Inputs pass through the preprocessing of the run; its training data is not needed.
    """
    from hansa.runs.export import predict_from_folder

    if to.suffix not in (".csv", ".npy"):
        raise HansaError(f"{to}: expected a file name that ends in .csv or .npy.")
    predictions = predict_from_folder(folder, inputs, client, site=site, preprocessing=preprocessing, trust=trust)
    _write_predictions(to, predictions)
    message = f"{len(predictions.outputs)} rows: {to}"
    classes, targets = predictions.classes, predictions.targets
    if classes is not None and targets is not None and targets.ndim == 1:
        message = f"accuracy {format_percent(float((classes == targets).double().mean()))} of {message}"
    say(message)


def export(
    folder: Folder,
    to: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Model: .safetensors, .pt or .onnx. Client record of all rounds: .csv or .npz."
        ),
    ],
    trust: opt.Trust = False,
) -> None:
    """Export the trained model or the client record."""
    from hansa.runs.folder import RunFolder

    if to.suffix in (".csv", ".npz"):
        run = RunFolder.containing(folder)
        rows, _ = run.clients(), run.summary  # warns if the record is not the one that the run ended with
        say(f"{rows.rows} rows: {rows.write(to)}")
        return
    from hansa.runs import export
    from hansa.runs.preprocessing import read_preprocessing

    _ = RunFolder.containing(folder).summary
    path = export.export(folder, to, trust=trust)
    say(f"model: {path}")
    if (stored := read_preprocessing(export.sidecar_path(path))) is None:
        say("preprocessing: not recorded by the run. The file contains the bare model.", "yellow")
        return
    say(f"preprocessing: {export.sidecar_path(path)} ({stored[0].describe() or 'none'})")
    if path.suffix == ".onnx" and stored[0].encoding is not None:
        say("The graph takes encoded rows: the inputs of the schema in their order, float32.", "yellow")
    elif path.suffix != ".onnx" and stored[0].describe():
        say("The state dict alone does not preprocess: load both with hansa.load_model.", "yellow")


def _write_predictions(path: Path, predictions: Predictions) -> None:
    import io

    import numpy as np
    import pandas

    from hansa.data.files import spreadsheet_text
    from hansa.runs.store.io import make_folder, write_file

    make_folder(path.parent.resolve())
    outputs, targets, names = predictions.outputs, predictions.targets, predictions.class_names
    if not hasattr(outputs, "reshape"):
        problem = f"the model returns a {type(outputs).__name__}, which no table holds"
        raise HansaError(f"{problem}: use hansa.load_model(...).predict(...) in Python.")
    if path.suffix == ".npy":
        content = io.BytesIO()
        np.save(content, outputs.numpy(), allow_pickle=False)
        write_file(path, content.getvalue())
        return
    if predictions.classes is None:
        table = pandas.DataFrame(outputs.reshape(len(outputs), -1).numpy()).add_prefix("output_")
    else:
        table = pandas.DataFrame({"prediction": predictions.classes.numpy()})
        if any(name != str(index) for index, name in enumerate(names)):
            table["class"] = [spreadsheet_text(names[number]) for number in table["prediction"]]
    if targets is not None and targets.ndim == 1:
        table["target"] = targets.numpy()
    write_file(path, table.to_csv(index_label="row", lineterminator="\n").encode())
