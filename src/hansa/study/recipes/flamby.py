"""FLamby's two tabular benchmarks: Fed-Heart-Disease (four hospitals) and Fed-TCGA-BRCA (six regions).

Data, models, losses and metrics follow FLamby (du Terrail et al. 2022), written from its descriptions. The tables of
heart disease are embedded. Those of TCGA-BRCA are files of FLamby, verified by their SHA-256.

FLamby's numbers depend on the order in which PyTorch's DataLoader shuffles: examples/flamby.py draws the same orders.
"""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hansa.core.protocols import component
from hansa.data import FederatedData, data_folder, from_arrays
from hansa.data.csv_folder import HOSPITALS, read_hospital_tables
from hansa.data.sources import invalid_file, missing_file

REGIONS = tuple(f"region {number}" for number in range(6))
_NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
_CATEGORIES = {"cp": (2, 3, 4), "restecg": (1, 2)}
_TEST_ROWS = {
    "cleveland": "040480a020b3c59dc48a03b505c0481087c001ac9430180a847015a598491260f8e2001cebe4",
    "hungarian": "1100847cb841d42c88700d510093869198d144134848122f693a0411802910ba30",
    "switzerland": "07863a8c80c0",
    "va": "464800245b65020eb85b04886003a74580",
}
"""FLamby's test rows of each hospital, a bit for each complete row: a third, by label, drawn with seed 43."""
TCGA_FILES = {
    "brca.csv": "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
    "train_test_split.csv": "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
}
"""The files of Fed-TCGA-BRCA and their SHA-256."""
_TCGA_REMEDY = (
    "Put brca.csv and train_test_split.csv of github.com/owkin/FLamby (flamby/datasets/fed_tcga_brca and its "
    "dataset_creation_scripts) into the folder flamby of the data folder, which HANSA_DATA names."
)


class SiteRows(NamedTuple):
    """The rows of one client: inputs and targets for training and testing."""

    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor


class Benchmark(NamedTuple):
    """The clients of a benchmark by name, and the pooled test set."""

    sites: dict[str, SiteRows]
    test_inputs: torch.Tensor
    test_targets: torch.Tensor

    def federated(self, name: str) -> FederatedData:
        """Return the data of the clients with the pooled test set."""
        owners = [index for index, rows in enumerate(self.sites.values()) for _ in range(len(rows.targets))]
        data = from_arrays(
            torch.cat([rows.inputs for rows in self.sites.values()]),
            torch.cat([rows.targets for rows in self.sites.values()]),
            clients=owners,
            test=(self.test_inputs, self.test_targets),
            name=name,
        )
        return replace(data, client_names=tuple(self.sites))


def read_heart_disease() -> Benchmark:
    """Return Fed-Heart-Disease: 13 inputs, standardised by each hospital's own training rows.

    Rows with a missing value in the ten columns used are dropped. The pooled test rows are standardised by the training
    rows of all hospitals, as in FLamby.

    >>> [len(rows.targets) for rows in read_heart_disease().sites.values()]
    [199, 172, 30, 85]
    """
    raw: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for name, table in zip(HOSPITALS, read_hospital_tables()[0], strict=True):
        columns = [table.columns[column] for column in (*_NUMBERS, *_CATEGORIES, "disease")]
        cells = np.array([[float(cell) for cell in row] for row in zip(*columns, strict=True) if "?" not in row])
        categories = zip(cells[:, len(_NUMBERS) :].T, _CATEGORIES.values(), strict=False)
        indicators = [column == value for column, values in categories for value in values]
        inputs = np.column_stack([cells[:, : len(_NUMBERS)], *indicators]).astype(np.float32)
        test = np.unpackbits(np.frombuffer(bytes.fromhex(_TEST_ROWS[name]), dtype=np.uint8))[: len(cells)] == 1
        targets = torch.from_numpy(cells[:, -1:].astype(np.float32))
        raw[name] = (torch.from_numpy(inputs), targets, torch.from_numpy(test))

    def standardised(rows: torch.Tensor, train: torch.Tensor) -> torch.Tensor:
        return (rows - train.mean(dim=0)) / (train.std(dim=0) + 1e-9)

    sites = {}
    for name, (features, labels, test) in raw.items():
        scaled = standardised(features, features[~test])
        sites[name] = SiteRows(scaled[~test], labels[~test], scaled[test], labels[test])
    train = torch.cat([features[~test] for features, _, test in raw.values()])
    pooled = torch.cat([features[test] for features, _, test in raw.values()])
    return Benchmark(
        sites, standardised(pooled, train), torch.cat([targets[test] for _, targets, test in raw.values()])
    )


def read_tcga_brca(folder: Path | str | None = None) -> Benchmark:
    """Return Fed-TCGA-BRCA: 39 inputs, targets (event, time).

    Args:
        folder: The data folder; its folder ``flamby`` has the two files.
    """
    texts = []
    for name, digest in TCGA_FILES.items():
        path = data_folder(folder) / "flamby" / name
        if not path.is_file():
            raise missing_file(path, _TCGA_REMEDY)
        content = path.read_bytes()
        if (actual := hashlib.sha256(content).hexdigest()) != digest:
            raise invalid_file(path, f"contents of SHA-256 {digest}", actual, _TCGA_REMEDY)
        texts.append(content.decode())
    patients, folds = (list(csv.reader(io.StringIO(text)))[1:] for text in texts)
    fold_of = {patient: (fold, region) for patient, fold, region in folds}
    cells = {row[0]: [float(cell) for cell in row[1:]] for row in patients if row[0] in fold_of}
    values = torch.tensor(list(cells.values()), dtype=torch.float64).float()
    inputs, targets = values[:, :-2], values[:, -2:]

    def rows(column: int, key: str) -> torch.Tensor:
        return torch.tensor([index for index, patient in enumerate(cells) if fold_of[patient][column] == key])

    sites = {}
    for index, name in enumerate(REGIONS):
        train, test = rows(1, f"train_{index}"), rows(1, f"test_{index}")
        sites[name] = SiteRows(inputs[train], targets[train], inputs[test], targets[test])
    pooled = rows(0, "test")
    return Benchmark(sites, inputs[pooled], targets[pooled])


@component
def heart_disease() -> FederatedData:
    """Return Fed-Heart-Disease for a configuration.

    >>> heart_disease().population
    4
    """
    return read_heart_disease().federated("fed-heart-disease")


@component
def tcga_brca(folder: str | None = None) -> FederatedData:
    """Return Fed-TCGA-BRCA for a configuration."""
    return read_tcga_brca(folder).federated("fed-tcga-brca")


@component
def sample_survival() -> FederatedData:
    """Return a small synthetic data set in the form of Fed-TCGA-BRCA: times decrease with the first input.

    >>> sample_survival().population
    6
    """
    generator = torch.Generator()
    generator.manual_seed(0)
    sites = {}
    for index, name in enumerate(REGIONS):
        inputs = torch.randn(20 + 3 * index, 39, generator=generator)
        times = torch.exp(-inputs[:, 0]) * (0.5 + torch.rand(len(inputs), generator=generator))
        events = (torch.rand(len(inputs), generator=generator) < 0.7).float()
        targets = torch.stack([events, times], dim=1)
        sites[name] = SiteRows(inputs[4:], targets[4:], inputs[:4], targets[:4])
    _, _, *tests = (torch.cat(tensors) for tensors in zip(*sites.values(), strict=True))
    return Benchmark(sites, *tests).federated("sample-survival")


class LinearModel(nn.Module):
    """A linear layer with one output: a logit, or a log-risk."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return output


class LogisticModel(LinearModel):
    """FLamby's model of Fed-Heart-Disease: the probability of disease."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x))


@component
def binary_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of -y log p - (1 - y) log(1 - p) of probabilities p."""
    return nn.functional.binary_cross_entropy(output, target)


@component
def correct_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return for each row whether the probability rounds to its label, 0 or 1.

    >>> correct_rows(torch.tensor([[0.9], [0.6]]), torch.tensor([[1.0], [0.0]])).tolist()
    [1.0, 0.0]
    """
    return ((output > 0.5) == (target > 0.5)).float().reshape(-1)


@component
def cox_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the negative partial log-likelihood of Cox's model, divided by the number of rows.

    The rows at risk at a row's time are those with a later time, and of equal times the rows before it.

    >>> round(cox_loss(torch.zeros(2, 1), torch.tensor([[1.0, 5.0], [1.0, 3.0]])).item(), 4)  # log(2) / 2
    0.3466
    """
    order = torch.argsort(-target[:, 1], stable=True)
    scores, events = output.reshape(-1)[order], target[order, 0]
    return ((torch.logcumsumexp(scores, 0) - scores) * events).mean()
