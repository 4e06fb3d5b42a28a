"""A trained model carries its preprocessing: raw files give the outputs of the evaluation, without training data."""

from __future__ import annotations

import json
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import hansa
from hansa.config import build, from_yaml
from hansa.data import Schema, TableColumn
from hansa.runs.experiment import open_run
from hansa.runs.export import predict_from_folder, sidecar_path
from hansa.runs.folder import RunFolder
from hansa.runs.preprocessing import Preprocessing, read_preprocessing

DRAFT = Schema(
    (
        TableColumn("ward", "category", ("x", "y", "z"), missing="indicator"),
        TableColumn("stage", "ordinal", ("low", "middle", "high"), scale="pooled"),
        TableColumn("age", "number", missing="mean", scale="pooled"),
        TableColumn("y", "target", ("no", "yes")),
    ),
    hansa.data.SplitColumn("fold"),
)
TEXT = """
rounds: 3
workers: 1
data: {name: csv-folder, folder: sites, options: {schema: draft.yaml}}
model: logistic
local: {lr: 0.3, steps: 5, batch_size: 8}
"""


def write_sites(folder):
    """Three sites of unequal size with other categories and other columns first, and one file of their test rows."""
    (folder / "sites").mkdir()
    draw, test_rows = random.Random(3), []
    for site, wards, rows in (("a", "xy", 30), ("b", "yz", 45), ("c", "x", 12)):
        lines = []
        for place in range(rows):
            age = "" if draw.random() < 0.1 else repr(draw.gauss(60, 15))
            stage, ward = draw.choice(["low", "middle", "high"]), draw.choice([*wards, "?"])
            sick = "yes" if draw.gauss(0, 1) + (stage == "high") + (ward == "y") > 0.5 else "no"
            fold = "test" if place % 4 == 0 else "train"
            lines.append(f"{age},{ward},{stage},{sick},{fold}")
            if fold == "test":
                test_rows.append(f"{sick},{ward},{age},{stage}")
        (folder / "sites" / f"{site}.csv").write_text("age,ward,stage,y,fold\n" + "\n".join(lines))
    (folder / "new.csv").write_text("y,ward,age,stage\n" + "\n".join(test_rows))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on tables, whose tables are gone."""
    folder = write_sites(tmp_path_factory.mktemp("tables"))
    DRAFT.save(folder / "draft.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        open_run(from_yaml(TEXT), folder / "run").execute()
    shutil.move(folder / "sites", folder / "gone")
    (folder / "draft.yaml").unlink()
    return folder


def test_predict_on_the_raw_rows_is_the_evaluation_on_them(place):
    predictions = predict_from_folder(place / "run", place / "new.csv")
    right = float(torch.eq(predictions.classes, predictions.targets).double().mean())
    assert right == RunFolder(place / "run").history[-1]["test_accuracy"]
    assert 0.5 < right < 1
    loss = nn.functional.cross_entropy(predictions.outputs.double(), predictions.targets)
    assert float(loss) == pytest.approx(RunFolder(place / "run").history[-1]["test_loss"], rel=1e-6)


def test_the_loaded_model_predicts_frames(place):
    model = hansa.load_model(place / "run")
    assert model.class_names == ("no", "yes")
    expected = predict_from_folder(place / "run", place / "new.csv")
    assert torch.equal(model.predict(place / "new.csv").outputs, expected.outputs)
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(place / "new.csv", dtype=str)
    assert torch.equal(model.predict(frame).outputs, expected.outputs)
    encoded = model.preprocessing.encoding.inputs(frame)
    assert torch.equal(model(encoded), expected.outputs), "called with encoded inputs, it is the bare model"
    without = model.predict(frame.drop(columns=["y"]))
    assert without.targets is None
    assert torch.equal(without.outputs, expected.outputs)
    with pytest.raises(hansa.HansaError, match="no column 'age'"):
        model.predict(frame.drop(columns=["age"]))


@pytest.mark.parametrize("name", ["weights.safetensors", "model.safetensors"])
def test_an_exported_file_and_its_neighbour_are_enough(place, tmp_path, name):
    path = hansa.export(place / "run", tmp_path / name)
    expected = predict_from_folder(place / "run", place / "new.csv")
    assert torch.equal(hansa.load_model(path).predict(place / "new.csv").outputs, expected.outputs)
    assert torch.equal(predict_from_folder(path, place / "new.csv").outputs, expected.outputs)
    beside = sidecar_path(path)
    content = json.loads(beside.read_text("utf-8"))
    record = Preprocessing.from_dict(content)
    assert content["sha256"] == record.sha256
    assert content["schema_sha256"] == record.encoding.schema.sha256
    content["schema"]["columns"][2]["mean"] += 1.0
    beside.write_text(json.dumps(content))
    with pytest.raises(hansa.HansaError, match="damaged"):
        hansa.load_model(path)
    beside.unlink()
    with pytest.raises(hansa.HansaError, match="is missing"):
        hansa.load_model(path)


@pytest.mark.parametrize("key", ["factory", "loss", "metric"])
@pytest.mark.parametrize("reader", [hansa.load_model, lambda path: predict_from_folder(path, path.parent / "new.csv")])
def test_code_that_an_exported_file_names_is_not_imported(place, tmp_path, monkeypatch, reader, key):
    path = hansa.export(place / "run", tmp_path / "weights.safetensors")
    (tmp_path / f"sidecar_{key}.py").write_text("open('touched', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    beside = sidecar_path(path)
    content = json.loads(beside.read_text("utf-8"))
    content["model"] = {key: f"sidecar_{key}:Net"}
    beside.write_text(json.dumps(content))
    with pytest.raises(hansa.HansaError, match=r"names code.*was not imported"):
        reader(path)
    assert not (tmp_path / "touched").exists()


def test_a_pickle_is_not_loaded(place, tmp_path):
    path = hansa.export(place / "run", tmp_path / "model.pt")
    with pytest.raises(hansa.HansaError, match=r"a \.pt file is a pickle, which is not loaded"):
        hansa.load_model(path)


def by_onnx(run, path, rows):
    """The outputs of an exported graph."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.reference import ReferenceEvaluator

        graph = onnx.load(hansa.export(run, path))
    return ReferenceEvaluator(graph).run(None, {"inputs": rows.numpy()})[0]


def test_onnx_of_a_table_takes_encoded_rows(place, tmp_path):
    record, _ = read_preprocessing(sidecar_path(hansa.export(place / "run", tmp_path / "model.safetensors")))
    rows = record.encoding.inputs(place / "new.csv")
    outputs = by_onnx(place / "run", tmp_path / "model.onnx", rows)
    expected = predict_from_folder(place / "run", place / "new.csv").outputs.numpy()
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(rows))).squeeze(1)


def test_a_regression_of_ones_own_model_started_in_python(tmp_path):
    write_sites(tmp_path)
    for path in (tmp_path / "sites").glob("*.csv"):  # rows without a target cannot be trained on
        lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith(",")]
        path.write_text("\n".join(lines))
    data = hansa.data.from_csv_folder(tmp_path / "sites", "age", split="fold", missing="indicator", drop=["y"])
    assert data.classes is None
    assert data.shape == (7,)
    task = hansa.Task(Net, nn.functional.mse_loss, data)
    run = hansa.run(hansa.presets.fedavg(steps=2, batch_size=4), task, rounds=1, out=tmp_path / "run", workers=1)
    model = hansa.load_model(tmp_path / "run", Net)
    tests = [line.split(",") for path in sorted((tmp_path / "sites").glob("*.csv"))
             for line in path.read_text("utf-8").splitlines() if line.endswith(",test")]  # fmt: skip
    frame = [dict(zip(("age", "ward", "stage"), cells, strict=False)) for cells in tests]
    outputs = model.predict(frame)
    assert torch.equal(outputs.outputs, hansa.predict(run.model, data.test_inputs))
    assert torch.equal(outputs.targets, data.test_targets)
    path = hansa.export(tmp_path / "run", tmp_path / "model.safetensors")
    with pytest.raises(hansa.HansaError, match="model=YOURS"):
        hansa.load_model(path)
    with pytest.raises(hansa.HansaError, match="does not match"):
        hansa.load_model(tmp_path / "run", lambda: nn.Linear(5, 1))
    assert torch.equal(hansa.load_model(path, Net).predict(frame).outputs, outputs.outputs)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x) + bias[:, None]
        return {"scores": scores, "norm": scores.norm(dim=1)}


class Placed(Named):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(super().forward(x, bias).values())


class Whole(Named):
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().forward(**x)


@pytest.mark.parametrize(("model", "by_name"), [(Named, True), (Placed, False), (Whole, True)])
def test_predict_takes_what_training_took_and_returns_what_the_model_returns(tmp_path, model, by_name):
    x, bias = np.random.default_rng(0).normal(size=(20, 3)).astype("float32"), np.arange(20.0)
    inputs = {"x": x, "bias": bias} if by_name else (x, bias)
    data = hansa.data.from_arrays(inputs, np.arange(20) % 2, clients=2)

    def loss(output, target):
        return nn.functional.cross_entropy(output["scores"] if by_name else output[0], target)

    run = hansa.run(hansa.presets.fedavg(steps=1), hansa.Task(model, loss, data), rounds=1, out=tmp_path / "run")
    expected = hansa.training.modules.model_caller(run.model, data.inputs)(data.inputs)
    loaded = hansa.load_model(tmp_path / "run", model)
    outputs = [loaded(data.inputs), loaded.predict(inputs).outputs, hansa.predict(run.model, data.inputs)]
    for found in (*outputs, loaded.predict(inputs, batch_size=7).outputs):
        torch.testing.assert_close(found, expected)
    with pytest.raises(hansa.HansaError, match="equally many in every tensor"):
        loaded.predict({"x": x, "bias": bias[:3]} if by_name else (x, bias[:3]))
    with pytest.raises(hansa.HansaError, match=r"cannot take inputs .*TypeError"):
        loaded.predict({"x": x} if by_name else (x,))
    with pytest.raises(hansa.HansaError, match="or a dict or tuple of tensors"):
        loaded.predict("rows.csv")


def test_outputs_that_are_no_rows_need_one_batch():
    whole = type("Mean", (nn.Module,), {"forward": lambda self, x: x.mean(0)})()
    assert hansa.predict(whole, torch.ones(6, 2)).tolist() == [1, 1]
    with pytest.raises(hansa.HansaError, match=r"batch_size=5\): expected 6 or more"):
        hansa.predict(whole, torch.ones(6, 2), batch_size=5)


class Whitened(nn.Linear):
    """Its load hook reads a buffer of the loaded state, as gpytorch's modules do."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("started", torch.tensor(0))
        self.register_load_state_dict_post_hook(Whitened.keep_bias_of_what_has_started)

    def get_extra_state(self) -> dict[str, str]:
        return {"made": "by its class"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == self.get_extra_state()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.started:
            self.started.fill_(1)
        return super().forward(x)

    @staticmethod
    def keep_bias_of_what_has_started(module, missing):
        assert not missing.missing_keys
        if not module.started:
            module.bias.data.zero_()


def test_the_state_is_complete_when_the_hooks_of_a_loaded_module_run(tmp_path):
    rows = hansa.data.from_arrays(np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2, clients=2)
    task = hansa.Task(Whitened, nn.functional.cross_entropy, rows)
    run = hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, out=tmp_path / "run")
    loaded = hansa.load_model(tmp_path / "run", Whitened).module
    assert run.model.started == loaded.started == 1
    assert run.model.bias.abs().sum() > 0
    assert torch.equal(loaded.bias, run.model.bias)


def test_columns_scaled_by_site_need_the_site(tmp_path, monkeypatch):
    write_sites(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = "options: {target: y, split: fold, missing: mean, scale: site}"
    open_run(from_yaml(TEXT, [f"data={{name: csv-folder, folder: sites, {options}}}"]), "run").execute()
    federated = build.load_data(RunFolder("run").config)
    shutil.rmtree(tmp_path / "sites")
    rows = (tmp_path / "new.csv").read_text("utf-8").splitlines()
    (tmp_path / "b.csv").write_text("\n".join([rows[0], *rows[9:21]]))  # 8 test rows of a, then 12 of b
    outputs = predict_from_folder("run", "b.csv", site="b").outputs
    own = federated.test_inputs[federated.test_owners == 1]
    assert torch.equal(outputs, hansa.predict(hansa.load_model("run"), own))
    with pytest.raises(hansa.HansaError, match=r"'age' is scaled by site.*Known: a, b, c"):
        predict_from_folder("run", "b.csv")


def test_a_run_on_images_normalises_wherever_its_model_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = """
rounds: 1
workers: 1
data:
  {name: fashion-mini, clients: 30, options: {normalize: false},
   augment: [{kind: crop, padding: 1}, {kind: normalize, mean: [0.29], std: [0.35]}]}
model: logistic
local: {steps: 2, batch_size: 10}
evaluate: {every: 0}
"""
    open_run(from_yaml(text), "run").execute()
    data = build.load_data(RunFolder("run").config)
    expected = predict_from_folder("run")
    right = torch.eq(expected.classes, expected.targets).double().mean()
    assert float(right) == pytest.approx(RunFolder("run").history[-1]["test_accuracy"])
    model = hansa.load_model("run")
    bare = model.module(data.test_inputs)
    assert not torch.allclose(bare, expected.outputs, atol=1e-3)
    assert torch.equal(hansa.predict(model, data.test_inputs), expected.outputs)
    exported = hansa.load_model(hansa.export("run", "model.safetensors"))
    assert torch.equal(hansa.predict(exported, data.test_inputs), expected.outputs)
    pixels = (data.test_inputs * 255).round().to(torch.uint8)
    assert torch.allclose(model.predict(pixels).outputs, expected.outputs, atol=1e-5)
    np.save("pixels.npy", pixels.numpy())
    assert torch.allclose(predict_from_folder("run", "pixels.npy").outputs, expected.outputs, atol=1e-5)
    outputs = by_onnx("run", "model.onnx", data.test_inputs[:9])
    np.testing.assert_allclose(outputs, expected.outputs[:9].numpy(), rtol=1e-4, atol=1e-5)


def test_an_augmentation_that_a_foreign_folder_names_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = "rounds: 1\nworkers: 1\nmodel: logistic\ndata: {name: fashion-mini, clients: 50}\nlocal: {steps: 1}\n"
    open_run(from_yaml(text), "run").execute()
    (tmp_path / "augment_trap.py").write_text("import pathlib\npathlib.Path('touched').touch()\n")
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text("utf-8"))
    stored["data"]["augment"] = [{"kind": "augment_trap:noise"}]
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(stored))
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))  # noqa: E731
    with pytest.raises(hansa.HansaError, match="augment_trap:noise"):
        hansa.load_model("run", make)
    assert not (tmp_path / "touched").exists()


def noisy(batch, generator):
    return batch + 1.0


noisy.on_test = True  # type: ignore[attr-defined]


def test_ones_own_function_is_named_where_it_cannot_be_carried(tmp_path, caplog):
    images = torch.rand(24, 1, 4, 4)
    data = hansa.data.from_arrays(images, torch.arange(24) % 2, clients=3)
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2))  # noqa: E731
    task = hansa.Task(make, nn.functional.cross_entropy, data, augment=[noisy])
    hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, out=tmp_path / "run", workers=1)
    record, _ = read_preprocessing(tmp_path / "run" / "preprocessing.json")
    assert record.own == ("noisy",)
    hansa.load_model(tmp_path / "run", make)
    assert "passed through noisy, which the loaded model does not apply" in caplog.text


@pytest.mark.parametrize("side", [1, 2])
def test_bytes_of_images_are_averaged_and_scaled_as_the_training_images_were(tmp_path, monkeypatch, side):
    monkeypatch.chdir(tmp_path)
    text = "rounds: 1\nworkers: 1\nmodel: logistic\nlocal: {steps: 1}\n"
    text += f"data: {{name: fashion-mini, clients: 50, options: {{downsample: {side}}}}}\n"
    open_run(from_yaml(text), "run").execute()
    whole = (hansa.data.load("fashion-mini", normalize=False).test_inputs[:20] * 255).round().to(torch.uint8)
    small = build.load_data(RunFolder("run").config).test_inputs[:20]
    for model in (hansa.load_model("run"), hansa.load_model(hansa.export("run", "model.safetensors"))):
        assert f"blocks of {side} x {side}" in model.preprocessing.describe()
        assert torch.allclose(model.predict(whole).outputs, model.predict(small).outputs, atol=1e-5)
    with pytest.raises(hansa.HansaError, match=r"\(1, 21, 21\): the model takes \(1, 28, 28\)"):
        model.predict(whole[:, :, :21, :21])
