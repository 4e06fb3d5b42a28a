"""A folder of CSV files: columns, targets, who owns what, and errors that name file and line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hansa
from hansa.data import Schema, from_csv_folder
from hansa.data.csv_folder import HOSPITALS
from hansa.data.schema import read_csv

NORTH = "age,ward,y\n30,b,1\n41.5,a,0\n52,b,1\n33,a,0\n60,c,1\n"
SOUTH = "ward,y,age\na,0,20\nc,1,21\n"  # the same columns in another order


@pytest.fixture
def sites(tmp_path):
    (tmp_path / "north.csv").write_text(NORTH)
    (tmp_path / "south.csv").write_text(SOUTH)
    return tmp_path


def test_numbers_stay_words_become_columns_and_files_are_clients(sites):
    held = from_csv_folder(sites, "y", test=0)
    assert held.sizes.tolist() == [5, 2]
    assert held.test_inputs is None
    rows = held.inputs[held.rows(1)]
    assert rows.tolist() == [[20, 1, 0, 0], [21, 0, 0, 1]]  # age, then ward a, b, c
    assert held.inputs[held.rows(0)][1].tolist() == [41.5, 1, 0, 0]
    assert held.targets[held.rows(0)].tolist() == [1, 0, 1, 0, 1]
    assert (held.targets.dtype, held.classes) == (torch.int64, 2)


def test_a_share_of_every_client_is_for_testing_by_the_seed(sites):
    held = from_csv_folder(sites, "y", test=0.5, seed=3)
    assert held.sizes.tolist() == [3, 1]
    assert len(held.test_targets) == 3
    assert held.test_owners.tolist() == [0, 0, 1]
    everything = sorted(map(tuple, torch.cat([held.inputs, held.test_inputs]).tolist()))
    assert everything == sorted(map(tuple, from_csv_folder(sites, "y", test=0).inputs.tolist()))
    again = from_csv_folder(sites, "y", test=0.5, seed=3)
    assert torch.equal(again.test_inputs, held.test_inputs)


def test_targets_may_be_words_numbers_or_numbers_by_wish(sites):
    words = from_csv_folder(sites, "ward", test=0)
    assert words.targets.tolist() == [1, 0, 1, 0, 2, 0, 2]
    assert words.classes == 3
    assert from_csv_folder(sites, "y", kind="number", test=0).targets.dtype == torch.float32
    ages = from_csv_folder(sites, "age", test=0)
    assert ages.classes is None
    assert ages.targets.tolist() == [30, 41.5, 52, 33, 60, 20, 21]
    assert from_csv_folder(sites, "y", drop=["ward"], test=0).shape == (1,)
    (sites / "dates.csv").write_text("seen,y\n1970-01-02,0\n1970-01-04,1\n1970-01-03T12:00:00,1\n")
    dates = from_csv_folder(sites / "dates.csv", "y", test=0)
    assert (dates.schema["seen"].kind, dates.inputs.tolist()) == ("date", [[1.0], [3.0], [2.5]])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("age,ward,y\n1,a,0\n,b,1\n", {}, r"east.csv, line 3: 'age' is empty"),
        ("age,ward,y\n1,a,0\n2,b\n", {}, r"east.csv, line 3: 2 values for 3 columns"),
        ("age,ward\n1,a\n", {}, r"no column 'y'|other columns than east.csv: 'y'"),
        ("age,ward,y,z\n1,a,0,3\n", {}, r"other columns than east.csv: 'z'"),
        ("age,age,y\n1,2,0\n", {}, r"has a column twice"),
        ("age,ward,y\n", {}, r"a header and at least one row"),
        (NORTH, {"target": "Y"}, r"no column 'Y'. Known: age, ward, y"),
        (NORTH, {"drop": ["wards"]}, r"no column 'wards'. Did you mean ward"),
        (NORTH, {"drop": ["ward", "age"]}, r"no column of inputs"),
        (NORTH, {"test": 1}, r"test=1\): expected 0 <= test < 1"),
        (NORTH, {"kind": "bool"}, r"kind='bool'"),
        ("age,ward,y\n1,a,yes\n", {"kind": "number"}, r"east.csv, line 2: 'y' is 'yes': not a number"),
        ('age,ward,y\n1,"a,0\n', {}, r"cannot be read as CSV"),
        ("age,ward,y\n" + "".join(f"1,name{at},0\n" for at in range(101)), {}, "104 different texts.*drop"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(sites, text, options, message):
    (sites / "east.csv").write_text(text)
    with pytest.raises(hansa.HansaError, match=message):
        from_csv_folder(sites, **{"target": "y", **options})


def test_a_header_has_a_bound_and_a_folder_has_tables(tmp_path):
    names = ",".join(f"c{place}" for place in range(50_000))
    assert len(read_csv("wide.csv", text=f"{names}\n{',' * 49_999}\n").columns) == 50_000
    with pytest.raises(hansa.HansaError, match="150000 columns: expected at most 100000"):
        read_csv("wider.csv", text=f"{names},{names},{names}\n1\n")
    with pytest.raises(hansa.HansaError, match=r"no .csv files"):
        from_csv_folder(tmp_path / "none", "y")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=80) | st.text(alphabet='ay,\n"0.1\r\0 ', max_size=60).map(str.encode))
def test_any_bytes_are_data_or_one_error(tmp_path, content):
    (tmp_path / "any.csv").write_bytes(b"a,y\n" + content)
    try:
        held = from_csv_folder(tmp_path, "y", test=0)
    except hansa.HansaError as problem:
        told = str(problem)
        held = None
    assert "any.csv" in told if held is None else torch.isfinite(held.inputs).all()


def test_a_file_and_the_command_line_name_a_folder(sites, monkeypatch):
    from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
    from command_line import CliRunner

    monkeypatch.chdir(sites)
    words = ["run", "--preset", "fedavg", "--set", "data={name: csv-folder, folder: ., options: {target: y}}"]
    found = CliRunner().invoke(app, [*words, "--set", "model=logistic", "--rounds", "1", "--out", "run", "-q"])
    assert found.exit_code == 0, found.output
    shown = CliRunner().invoke(app, ["data", "show", "csv-folder", "--folder", ".", "--option", "target=y"])
    assert shown.exit_code == 0, shown.output
    wrong = CliRunner().invoke(app, [*words[:3], "--set", "data={name: csv-folder, options: {target: y}}"])
    assert wrong.exit_code == 2


# ---- the embedded tables of four hospitals


def test_the_data_set_has_the_hospitals_as_clients():
    data = hansa.data.federate("heart-disease", test=0.25)
    assert data.client_names == HOSPITALS
    owned = data.sizes + torch.bincount(data.test_owners)
    assert owned.tolist() == [303, 294, 123, 200]
    info = hansa.data.dataset_info("heart-disease")
    assert (data.shape, data.classes) == (info.shape, info.classes)
    sick = [
        int(data.targets[data.rows(client)].sum() + data.test_targets[data.test_owners == client].sum())
        for client in range(4)
    ]
    assert sick == [139, 106, 115, 149]  # of UCI's documentation
    assert abs(data.inputs[:, 0].mean()) < 1e-6


def test_the_files_give_the_data_of_the_data_set(tmp_path):
    hansa.data.download("heart-disease", tmp_path)
    folder = tmp_path / "heart-disease"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["README.txt", "schema.yaml", *(f"{name}.csv" for name in HOSPITALS)]
    )
    licence = (folder / "README.txt").read_text()
    assert "CC BY 4.0" in licence
    assert all(name in licence for name in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano"))
    assert Schema.load(folder / "schema.yaml").is_open
    by_file = hansa.data.from_csv_folder(folder, schema=folder / "schema.yaml", test=0.25)
    by_name = hansa.data.federate("heart-disease", test=0.25)
    assert torch.equal(by_file.inputs, by_name.inputs)
    assert torch.equal(by_file.test_targets, by_name.test_targets)
