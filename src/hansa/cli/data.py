"""``hansa data``: list, download, verify and partition data sets, and infer the schema of tables.

``hansa predict`` and ``hansa export``: use the trained model of a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn
from rich.text import Text

from hansa.cli import options as opt
from hansa.cli.console import FAILED, err, out, print_table, say
from hansa.core.errors import HansaError
from hansa.study.report.formats import format_number

if TYPE_CHECKING:
    from hansa.runs.export import Predictions


Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Data folder. By default HANSA_DATA, or a folder in the user's cache."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option, such as target=y or scale=pooled. Repeatable."),
]


def list_sets(
    folder: Folder = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="Also show licences and addresses.")] = False,
) -> None:
    """List all data sets and whether they are downloaded."""
    from hansa import data
    from hansa.data.loading import CSV_FOLDER

    headings = ("name", "present", "input", "classes", "description", *(("licence", "homepage") if long else ()))
    rows: list[tuple[str | Text, ...]] = []
    for name, entry in data.DATASETS.items():
        present = Text("yes", style="green") if data.is_present(name, folder) else "no"
        shape = " x ".join(map(str, entry.shape))
        texts = (entry.title, *((entry.licence, entry.homepage) if long else ()))
        rows.append((Text(name, style="bold"), present, shape, str(entry.classes), *texts))
    for name in ("two-gaussians", "synthetic"):
        doc = getattr(data, name.replace("-", "_")).__doc__ or ""
        rows.append((Text(name, style="bold"), Text("generated", style="green"), "", "", doc.split("\n")[0]))
    rows.append((Text(CSV_FOLDER, style="bold"), "your files", "", "", "A folder of CSV files, one per client"))
    print_table(headings, rows)
    say(f"\ndata folder: {data.data_folder(folder)}", "dim")


def get(
    names: Annotated[list[str], typer.Argument(help="Data sets to download.")],
    folder: Folder = None,
) -> None:
    """Download data sets from their official addresses.

    Failed transfers are repeated. Files are verified by SHA-256.
    """
    from hansa import data

    for name in names:
        data.dataset_info(name)  # check all names before the first download
    columns = *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()
    bar = Progress(*columns, console=err(), disable=not err().is_terminal)
    tasks: dict[str, Any] = {}

    def show_progress(file: str, received: int, total: int) -> None:
        if file not in tasks:
            tasks[file] = bar.add_task(file, total=total)
        bar.update(tasks[file], completed=received)

    for name in names:
        tasks.clear()
        with bar:
            root = data.download(name, folder, show_progress)
        say(f"{name}: in {root}")


def check(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets.", show_default="all that are present")] = None,
    folder: Folder = None,
) -> None:
    """Verify the SHA-256 of every file.

    The exit code is 1 if a file is missing or damaged.
    """
    from hansa import data

    chosen = [data.dataset_info(name).name for name in names or []] or [
        name for name in data.DATASETS if data.is_present(name, folder)
    ]
    intact = True
    colours = {"ok": "green", "missing": "yellow", "damaged": "red"}
    for name in chosen:
        for file in data.check_files(name, folder):
            out().print(f"[{colours[file.state]}]{file.state:8}[/] {escape(name)}  {escape(file.path)}", soft_wrap=True)
            if file.state != "ok":
                say(f"         {file.detail}", "dim")
                intact = False
    if not intact:
        raise typer.Exit(FAILED)


def show(
    name: Annotated[str, typer.Argument(help="Data set.")] = "fashion-mini",
    clients: Annotated[int | None, typer.Option("--clients", "-n", help="Number of clients.", min=1)] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="Partition: iid, '{kind: dirichlet, alpha: 0.1}', ...")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the partition.", min=0)] = 0,
    folder: Folder = None,
    option: Options = None,
) -> None:
    """Show the label counts of the first clients and the heterogeneity of the partition."""
    from hansa.config import allow_code, from_yaml
    from hansa.config.build import load_data
    from hansa.data.sources import DATASETS

    overrides = [f"data.name={name}", f"seed={seed}"]
    overrides += [f"data.clients={clients}"] if clients is not None else []
    overrides += [f"data.partition={partition}"] if partition is not None else []
    overrides += [f"data.folder={folder}"] if folder is not None else []
    overrides += [f"data.options.{text}" for text in option or []]
    with allow_code():  # named by the command line alone
        data = load_data(from_yaml("", overrides))
    if data.classes is not None and data.targets.ndim == 1:
        class_names = DATASETS[data.name].class_names if data.name in DATASETS else ()
        labels = list(class_names) or [str(label) for label in range(data.classes)]
        counts = data.label_counts()[: out().width // 3].T.tolist()
        numbers = [str(client) for client in range(len(counts[0]))]
        rows = [[label, *map(str, label_row)] for label, label_row in zip(labels, counts, strict=True)]
        print_table(["client", *numbers], rows, right=numbers, keep=1)
    say(str(data.summary()))


def schema(
    folder: Annotated[Path, typer.Argument(help="Folder of CSV files, one per client, or one file.")],
    target: Annotated[str | None, typer.Option("--target", "-t", help="Column of targets.")] = None,
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write the schema: .yaml.", show_default=False)
    ] = None,
    check_by: Annotated[
        Path | None, typer.Option("--check", help="A schema: check that every file fits it, and infer none.")
    ] = None,
    option: Options = None,
) -> None:
    """Infer the schema of CSV files, or check that files fit one.

    Options are arguments of hansa.data.infer_schema: drop, ids, split, kind, scale (here pooled by default), missing
    (indicator), test, seed, delimiter, decimal, encoding. The exit code is 1 if a file does not fit. In a federation,
    infer it from one table and delete mean and std: they are then computed over all sites.
    """
    import yaml

    from hansa import data
    from hansa.core.errors import HansaError

    if check_by is not None:
        _check_tables(folder, data.Schema.load(check_by))
        return
    if target is None or (to is not None and to.suffix not in (".yaml", ".yml")):
        raise HansaError("data schema: expected --target COLUMN and --out FILE.yaml, or --check SCHEMA.")
    options: dict[str, Any] = {"scale": "pooled", "missing": "indicator"}
    try:
        options |= {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in option or [])}
        inferred = data.infer_schema(folder, target, **options)
    except (yaml.YAMLError, TypeError) as error:
        raise HansaError(f"data schema: --option: {error}.") from None
    if to is None:
        say(inferred.to_yaml().rstrip())
    else:
        inferred.save(to)
        say(f"{to}: {len(inferred.columns)} columns, {len(inferred.inputs)} inputs")
    say(f"SHA-256 {inferred.sha256}", "dim")


def _check_tables(folder: Path, schema: Any) -> None:
    """Print whether each file fits a schema, and counts of its missing, respelled and unknown cells."""
    from hansa.data.csv_folder import read_tables
    from hansa.data.schema import encode
    from hansa.data.sources import DataError

    all_fit = True
    for table in read_tables(folder, schema):
        try:
            counts = encode(schema.provisional(), table, training=schema.target is not None).counts
            lines = [f"[green]fits[/] {escape(table.source)}, {table.rows} rows"]
            lines += [f"     {escape(column)}: {counted}" for column, counted in counts.items()]
        except DataError as error:
            lines, all_fit = [f"[red]does not fit[/] {escape(str(error))}"], False
        out().print("\n".join(lines), soft_wrap=True)
    if not all_fit:
        raise typer.Exit(FAILED)


RunPath = Annotated[Path, typer.Argument(help="Run folder.")]
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
        message = f"accuracy {format_number(float((classes == targets).double().mean()), 'fraction')} of {message}"
    say(message)


def export(
    folder: RunPath,
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

    from hansa.data.sources import spreadsheet_text
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
