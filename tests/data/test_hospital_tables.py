"""The embedded tables of four hospitals: as a data set, as files, and with their licence."""

from __future__ import annotations

import torch

import hansa
from hansa.data import Schema
from hansa.data.csv_folder import HOSPITALS


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
