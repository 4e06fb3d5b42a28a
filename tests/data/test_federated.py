"""Federated data: views, counts, summaries, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hansa.core.errors import HansaError
from hansa.data import Dataset, FederatedData, apply_split, label_counts
from hansa.data.partitions import Split


def tiny() -> FederatedData:
    return FederatedData(
        torch.arange(12.0).view(6, 2),
        torch.tensor([0, 0, 1, 1, 2, 2]),
        torch.tensor([0, 2, 4, 1, 5]),
        torch.tensor([0, 3, 3, 5]),
        classes=3,
        name="tiny",
    )


def test_rows_of_each_client() -> None:
    data = tiny()
    assert [data.rows(client).tolist() for client in range(3)] == [[0, 2, 4], [], [1, 5]]
    with pytest.raises(HansaError, match="tiny: client 3: there are 3, numbered from 0"):
        data.rows(3)


def test_summary_by_hand() -> None:
    # client 0 holds labels 0 0 1 1 (1 bit), client 1 holds 1 1 1 1 (0 bits)
    split = Split.of_rows([[0, 1, 2, 3], [4, 5, 6, 7]])
    data = FederatedData(
        torch.zeros(8, 1), torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]), split.index, split.offsets, classes=2
    )
    found = data.summary()
    assert (found.clients, found.samples, found.smallest, found.median, found.largest) == (2, 8, 4, 4.0, 4)
    assert found.label_entropy == pytest.approx(0.5)
    # label 0 has one holder; label 1 is shared 1/3 to 2/3: 2^(log2 3 - 2/3) = 3 / 2^(2/3)
    assert found.effective_clients == pytest.approx((1.0, 3 / 2 ** (2 / 3)))
    assert "2 clients, 8 samples: 4 / 4 / 4 per client" in str(found)


def test_regression_data_have_a_summary_without_labels() -> None:
    split = Split.of_rows([[0], [1, 2]])
    data = FederatedData(torch.zeros(3, 1), torch.randn(3), split.index, split.offsets)
    assert data.summary().label_entropy is None
    with pytest.raises(HansaError, match="no classes"):
        data.label_counts()
    with pytest.raises(HansaError, match="a class number per row"):
        label_counts(split, torch.randn(3), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "expected one target per row"),
        ({"targets": torch.tensor([0, 0, 1, 1, 2, 3])}, "targets run from 0 to 3: expected 0 to 2"),
        ({"index": torch.tensor([0, 2, 4, 1, 6])}, "rows 0 to 6, the data has 6"),
        ({"index": torch.tensor([0, 2, 4, 1, -1])}, "rows -1 to 4"),
        ({"test_inputs": torch.zeros(2, 2)}, "needs both"),
        ({"test_inputs": torch.zeros(2, 3), "test_targets": torch.tensor([0, 1])}, r"training inputs \(2,\)"),
        ({"test_inputs": torch.zeros(2, 2), "test_targets": torch.tensor([0, 3])}, "test targets run from 0 to 3"),
    ],
)
def test_data_that_do_not_fit_together_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    data = tiny()
    fields = {name: getattr(data, name) for name in ("inputs", "targets", "index", "offsets", "classes", "name")}
    with pytest.raises(HansaError, match=message):
        FederatedData(**{**fields, **change})


def test_with_clients_keeps_the_test_set() -> None:
    source = Dataset(
        "one", torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.ones(2, 3), torch.tensor([0, 0]), classes=1
    )
    data = apply_split(source, Split.of_rows([[0], [3]]))
    assert data.inputs is source.inputs  # nothing is copied
    assert data.test_inputs is source.test_inputs
    assert data.population == 2
    assert data.rows(1).untyped_storage().data_ptr() == data.index.untyped_storage().data_ptr()
