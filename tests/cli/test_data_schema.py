"""Schemas of files on the command line; after a run its model loaded, asked, exported."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

import hansa
from hansa.config import build
from hansa.data import Schema
from hansa.runs.folder import RunFolder


def test_a_schema_is_inferred_written_and_checked(cli, folder):
    (folder / "sites").mkdir()
    (folder / "sites" / "north.csv").write_text(
        "age,ward,who,fold,y\n40,icu,a,train,1\n50,icu,b,train,0\n?,icu,c,test,0\n"
    )
    (folder / "sites" / "south.csv").write_text("age,ward,who,fold,y\n60,surgery,d,train,1\n")
    words = ["data", "schema", "sites", "--target", "y", "--option", "ids=[who]", "--option", "split=fold"]
    shown = cli.ok(*words)
    assert "categories: [icu, surgery]" in shown.stdout
    written = cli.ok(*words, "-o", "schema.yaml")
    schema = Schema.load(folder / "schema.yaml")
    assert (schema["age"].mean, schema["age"].missing, schema["who"].kind) == (50.0, "indicator", "id")
    assert schema.sha256 in written.stdout
    cli.ok("data", "schema", "sites", "--check", "schema.yaml")
    (folder / "sites" / "south.csv").write_text("age,ward,who,fold,y\n60,garden,d,train,1\n")
    wrong = cli("data", "schema", "sites", "--check", "schema.yaml")
    assert wrong.exit_code == 1
    assert "south.csv, line 2: 'ward' is 'garden'" in wrong.stdout
    assert "fits" in wrong.stdout
    cli.refused("data", "schema", "sites")
    assert "drops" in cli("data", "schema", "sites", "--target", "y", "--option", "drops=[who]").output
    cli.refused("data", "schema", "sites", "--target", "y", "-o", "schema.txt")


def test_files_are_checked_by_an_open_schema_as_by_a_closed_one(cli, folder):
    """It said "fits" of values that the schema does not list, as long as a mean was open."""
    (folder / "sites").mkdir()
    (folder / "sites" / "a.csv").write_text("age,ward,y\n40,garden,1\n50,icu,0\n")
    columns = "[{name: age, kind: number, scale: pooled}, {name: ward, kind: category, categories: [icu]%s}, %s]"
    target = "{name: y, kind: target, categories: ['0', '1']}"
    for name, unknown, last in (("open", "", target), ("zero", ", unknown: zero", target),
                                ("class", ", unknown: zero", target.replace("'1'", "'2'"))):  # fmt: skip
        (folder / f"{name}.yaml").write_text(f"hansa_schema: 1\ncolumns: {columns % (unknown, last)}\n")
    wrong = cli("data", "schema", "sites", "--check", "open.yaml")
    assert (wrong.exit_code, "'ward' is 'garden'" in wrong.stdout) == (1, True)
    fits = cli("data", "schema", "sites", "--check", "zero.yaml")
    assert (fits.exit_code, "ward: 1 unknown" in fits.stdout) == (0, True)
    wrong = cli("data", "schema", "sites", "--check", "class.yaml")
    assert (wrong.exit_code, "'y' is '1'" in wrong.stdout) == (1, True)


def test_cells_that_a_spreadsheet_would_run_are_texts(cli, folder):
    (folder / "sites").mkdir()
    for name in ("=cmd()", "@b"):
        rows = "".join(f"{place},{'=1+1' if place > 9 else 'well'}\n" for place in range(20))
        (folder / "sites" / f"{name}.csv").write_text("age,state\n" + rows)
    data = "data={name: csv-folder, folder: sites, options: {target: state, scale: pooled}}"
    words = ["run", "--preset", "fedavg", "--set", data, "--set", "model=logistic", "--set", "local.lr=1.0"]
    cli.ok(*words, "--rounds", "5", "--out", "x", "-q")
    cli.ok("export", "x", "-o", "clients.csv")
    clients = (folder / "clients.csv").read_text("utf-8")
    assert ",'=cmd()" in clients
    assert ",=" not in clients
    assert ",'@b" in clients
    assert ",@" not in clients
    (folder / "new.csv").write_text("age\n0\n19\n")
    cli.ok("predict", "x", "new.csv")
    lines = (folder / "predictions.csv").read_text("utf-8").split()
    assert lines[0] == "row,prediction,class"
    assert sorted(line.split(",")[2] for line in lines[1:]) == ["'=1+1", "well"]
    exported = cli("export", "x", "-o", "model.safetensors")
    assert "preprocessing: model.safetensors.preprocessing.json (schema " in exported.stdout.replace("\n", "")
    cli.ok("predict", "model.safetensors", "new.csv", "-o", "again.csv")
    assert (folder / "again.csv").read_bytes() == (folder / "predictions.csv").read_bytes()


@pytest.fixture
def done(cli, folder):
    cli.ok("run", "small.yaml", "-o", "x", "-q")
    return folder / "x"


def test_predictions_of_the_test_data_and_of_files(cli, folder, done):
    result = cli.ok("predict", "x")
    with open(folder / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["prediction"] == row["target"] for row in rows) / len(rows)
    assert right == pytest.approx(RunFolder(done).history[-1]["test_accuracy"])
    assert f"accuracy {100 * right:.1f}% of {len(rows)} rows" in result.stdout
    inputs = build.load_data(RunFolder(done).config).test_inputs[:4].numpy()
    np.save(folder / "some.npy", inputs)
    np.savetxt(
        folder / "some.csv", inputs, delimiter=",", header=",".join(map(str, ["a"] * inputs.shape[1])), comments=""
    )
    model = hansa.load_model(done)
    assert not model.training
    expected = hansa.predict(model, torch.from_numpy(inputs)).numpy()
    assert np.allclose(hansa.predict(model, torch.from_numpy(inputs), batch_size=3), expected, atol=1e-6)
    for name in ("some.npy", "some.csv"):
        cli.ok("predict", "x", name, "-o", "raw.npy")
        assert np.allclose(np.load(folder / "raw.npy"), expected, atol=1e-5)
    np.save(folder / "wide.npy", np.zeros((2, 7), np.float32))
    wrong = cli.refused("predict", "x", "wide.npy")
    assert "inputs of shape (7,): the model takes (60,)" in wrong.stderr


def test_exports_hold_the_same_model(cli, folder, done):
    for name in ("model.pt", "model.safetensors"):
        cli.ok("export", "x", "-o", name)
    assert (folder / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    state = torch.load(folder / "model.pt", weights_only=True)
    model = hansa.load_model(done)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.module.state_dict().items())
    cli.refused("export", "x", "-o", "model.tar")


def test_what_has_no_model_says_so(cli, folder):
    cli.ok("run", "small.yaml", "-o", "g", "--seeds", "2", "-q")
    with pytest.raises(hansa.HansaError, match="seed-0"):
        hansa.load_model(folder / "g")
    (folder / "g" / "seed-1" / "model.safetensors").unlink()
    cli.refused("predict", "g/seed-1")


def test_a_client_predicts_with_its_own_model_on_its_own_rows(cli, folder):
    (folder / "sites").mkdir()
    for site, shift in (("a", 0.0), ("b", 3.0), ("c", -2.0)):
        rows = [f"{at % 7},{at % 5 + shift},{int(at % 7 > 3)}" for at in range(30 + int(shift))]
        (folder / "sites" / f"{site}.csv").write_text("p,q,y\n" + "\n".join(rows))
    (folder / "own.yaml").write_text(
        "rounds: 2\nworkers: 1\nmodel: logistic\nalgorithm: dsgd\nlocal: {lr: 0.05, steps: 2, batch_size: 4}\n"
        "data: {name: csv-folder, folder: sites, options: {target: y, test: 0.2}}\n"
    )
    cli.ok("run", "own.yaml", "-o", "x", "-q")
    cli.ok("predict", "x", "--client", "1", "-o", "one.npy")
    federated = build.load_data(RunFolder(folder / "x").config)
    outputs = torch.from_numpy(np.load(folder / "one.npy"))
    assert len(outputs) == 6  # a fifth of 33
    mine = hansa.load_model(folder / "x", client=1)
    assert torch.equal(outputs, hansa.predict(mine, federated.test_inputs[federated.test_owners == 1]))
    assert not torch.equal(
        outputs, hansa.predict(hansa.load_model(folder / "x"), federated.test_inputs[federated.test_owners == 1])
    )
    assert "from 0 to 2" in cli("predict", "x", "--client", "7").output
