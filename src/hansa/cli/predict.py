"""``hansa predict`` and ``hansa export``: what a finished run is good for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hansa.cli.console import guarded, out

Folder = Annotated[Path, typer.Argument(help="The folder of a run. Code that its configuration names is imported.")]


@guarded
def predict(
    folder: Folder,
    inputs: Annotated[
        Path | None, typer.Argument(help="A .npy, .npz, .safetensors or .csv of rows; by default the run's test data.")
    ] = None,
    client: Annotated[
        int | None, typer.Option("--client", help="By the model that this client has, on its own test rows.", min=0)
    ] = None,
    to: Annotated[
        Path, typer.Option("--out", "-o", help="Where the predictions go: .csv, or .npy of the raw outputs.")
    ] = Path("predictions.csv"),
) -> None:
    """What the trained model says of some inputs: the class of each row, or the raw outputs."""
    from hansa.core.errors import HansaError
    from hansa.runs.export import predicted
    from hansa.study.report import formats

    if to.suffix not in (".csv", ".npy"):
        raise HansaError(f"{to}: expected a name that ends in .csv or .npy.")
    found = predicted(folder, inputs, client)
    _write(to, found)
    told = f"{len(found.outputs)} rows: {to}"
    if found.classes is not None and found.targets is not None and found.targets.ndim == 1:
        told = f"accuracy {formats.percent(float((found.classes == found.targets).double().mean()))} of {told}"
    out().print(told, markup=False, soft_wrap=True)


@guarded
def export(
    folder: Folder,
    to: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="model.safetensors, .pt or .onnx; clients.csv or .npz for the record of clients.",
        ),
    ],
) -> None:
    """The trained model in another format, or the record of what every client did in every round."""
    if to.suffix in (".csv", ".npz"):
        from hansa.runs.folder import RunFolder

        rows = RunFolder.holding(folder).clients()
        written = rows.write_csv(to) if to.suffix == ".csv" else rows.write_npz(to)
        out().print(f"{rows.rows} rows: {written}", markup=False, soft_wrap=True)
        return
    from hansa.runs import export

    out().print(f"model: {export.export(folder, to)}", markup=False, soft_wrap=True)


def _write(path: Path, found: object) -> None:
    import csv
    import io

    import numpy as np

    from hansa.runs.export import Predicted
    from hansa.runs.store.io import make_folder, write_file

    assert isinstance(found, Predicted)
    make_folder(path.parent.resolve())
    if path.suffix == ".npy":
        content = io.BytesIO()
        np.save(content, found.outputs.numpy(), allow_pickle=False)
        write_file(path, content.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = found.targets is not None and found.targets.ndim == 1
    if found.classes is not None:
        columns, rows = ["prediction"], [[value] for value in found.classes.tolist()]
    else:
        flat = found.outputs.reshape(len(found.outputs), -1)
        columns, rows = [f"output_{place}" for place in range(flat.shape[1])], flat.tolist()
    writer.writerow(["row", *columns, *(["target"] if known else [])])
    targets = found.targets.tolist() if known and found.targets is not None else []
    for place, row in enumerate(rows):
        writer.writerow([place, *row, *([targets[place]] if known else [])])
    write_file(path, text.getvalue().encode())
