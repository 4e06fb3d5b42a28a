"""FEMNIST and Shakespeare as the hub has them, offline: a data set in memory, and a folder that was saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from hansa.data import from_hub
from hansa.data.readers import encode

TEXT = "To be, or not to be, that is the question: Whether tis nobler in the mind to suffer the slings and arrows"
ROLES = ["hamlet"] * 12 + ["ophelia"] * 3 + ["hamlet"] * 8


class Columns:
    """What is asked of a data set of ``datasets``, without the package."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}

    def select(self, rows):
        return Columns(**{name: [values[row] for row in rows] for name, values in self.columns.items()})


def play(columns=Columns, **changes):
    windows = [TEXT[at : at + 80] for at in range(len(ROLES))]
    following = [TEXT[at + 80] for at in range(len(ROLES))]
    return columns(**{"character_id": ROLES, "x": windows, "y": following, **changes})


def letters(columns=Columns):
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (28, 28), dtype=np.uint8) for _ in range(25)]
    return columns(writer_id=["f2"] * 20 + ["f1"] * 5, image=images, character=[at % 62 for at in range(25)]), images


def test_roles_own_their_windows_and_the_last_are_for_testing():
    held = from_hub("shakespeare", source=play(), test=0.25)
    assert held.sizes.tolist() == [15, 3]  # of 20 and 3
    assert len(held.test_targets) == 5
    assert held.inputs[held.rows(1)][0].tolist() == encode(TEXT[12:92]).tolist()
    assert held.test_targets.tolist() == encode("".join(TEXT[at + 80] for at in (18, 19, 20, 21, 22))).tolist()
    assert held.inputs.dtype == torch.uint8


def test_writers_own_their_images_which_are_normalised_as_elsewhere():
    source, images = letters()
    held = from_hub("femnist", source={"train": source})
    assert held.sizes.tolist() == [18, 5]
    assert len(held.test_targets) == 2
    first = held.inputs[held.rows(1)][0, 0]
    assert torch.allclose(first, (torch.from_numpy(images[20]).float() / 255 - 0.9637) / 0.1597, atol=1e-5)
    assert held.classes == 62
    assert from_hub("femnist", source=source, owners=1).population == 1


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (play(x=["short"] * 23), {}, "row 0 has 5 characters and 1 as target"),
        (play(x=["\u20ac" * 80] * 23), {}, "LEAF's alphabet"),
        (Columns(role=["a"], x=["b"], y=["c"]), {}, "no column 'character_id'"),
        (play(), {"owners": 3}, "at most 2"),
        (play(), {"test": 1.0}, "test=1.0"),
    ],
)
def test_what_does_not_fit_is_refused(source, options, message):
    with pytest.raises(hansa.HansaError, match=message):
        from_hub("shakespeare", source=source, **options)


def test_an_unknown_set_is_told():
    with pytest.raises(hansa.HansaError, match="Did you mean femnist"):
        from_hub("femnis")


def test_a_saved_folder_is_read_by_the_package_from_a_file_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    play(lambda **columns: datasets.Dataset.from_dict(columns)).save_to_disk(str(tmp_path / "arrow"))
    held = from_hub("shakespeare", source=tmp_path / "arrow", test=0.25)
    assert torch.equal(held.inputs, from_hub("shakespeare", source=play(), test=0.25).inputs)
    text = f"data: {{name: hub-shakespeare, options: {{source: {tmp_path / 'arrow'}, owners: 2}}}}"
    assert hansa.config.build.load_data(hansa.config.from_yaml(text)).population == 2
    with pytest.raises(hansa.HansaError, match="cannot be opened"):
        from_hub("shakespeare", source=tmp_path)
