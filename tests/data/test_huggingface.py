"""Datasets of the package ``datasets`` and partitioners of ``flwr_datasets`` as clients: row by row what these say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.data import from_hf

datasets = pytest.importorskip("datasets", reason="not exercised: pip install 'hansa[datasets]'")
ROWS = 157
CITIES = ["rome", "oslo", "bonn", "graz", "lima"]


@pytest.fixture(scope="module")
def table() -> Any:
    draw = np.random.default_rng(0)
    labels = datasets.ClassLabel(names=["no", "yes", "maybe", "never"])
    columns = {
        "age": draw.normal(50, 10, ROWS).tolist(),
        "visits": draw.integers(0, 9, ROWS).tolist(),
        "label": draw.integers(0, 4, ROWS).tolist(),
        "city": [CITIES[i] for i in draw.choice(5, ROWS, p=[0.4, 0.3, 0.15, 0.1, 0.05])],
        "score": draw.random(ROWS).tolist(),
        "words": ["ab " * int(n) for n in draw.integers(1, 6, ROWS)],
    }
    features = datasets.Features({"age": datasets.Value("float32"), "visits": datasets.Value("int32"), "label": labels,
                                  "city": datasets.Value("string"), "score": datasets.Value("float32"),
                                  "words": datasets.Value("string")})  # fmt: skip
    return datasets.Dataset.from_dict(columns, features=features)


PARTITIONERS: dict[str, Any] = {
    "iid": lambda p: p.IidPartitioner(num_partitions=7),
    "dirichlet": lambda p: p.DirichletPartitioner(5, "label", 0.5, min_partition_size=3, self_balancing=True, seed=3),
    "inner dirichlet": lambda p: p.InnerDirichletPartitioner([40, 11, 30], "label", 0.6, seed=1),
    "shards": lambda p: p.ShardPartitioner(4, "label", num_shards_per_partition=2, seed=2),
    "pathological": lambda p: p.PathologicalPartitioner(4, "label", 2, class_assignment_mode="first-deterministic"),
    "sizes": lambda p: p.SizePartitioner([5, 70, 20]),
    "linear": lambda p: p.LinearPartitioner(6),
    "square": lambda p: p.SquarePartitioner(4),
    "exponential": lambda p: p.ExponentialPartitioner(4),
    "continuous": lambda p: p.ContinuousPartitioner(4, "score", strictness=0.7, seed=5),
    "natural": lambda p: p.NaturalIdPartitioner("city"),
    "grouped": lambda p: p.GroupedNaturalIdPartitioner("city", 2),
}


@pytest.mark.filterwarnings("ignore:The sum of", "ignore:Specifying null_placement:FutureWarning")  # of the packages
@pytest.mark.parametrize("name", PARTITIONERS)
def test_every_client_has_the_rows_of_its_partition_in_their_order(table: Any, name: str) -> None:
    package = pytest.importorskip(
        "flwr_datasets.partitioner", reason="not exercised: pip install 'hansa[flwr-datasets]'"
    )
    ours, theirs = PARTITIONERS[name](package), PARTITIONERS[name](package)
    data = from_hf(table, ["age", "visits", "score"], "label", clients=ours)
    theirs.dataset = table
    assert data.population == theirs.num_partitions
    assert len(set(data.sizes.tolist())) > 1 or name == "shards"
    for client in range(data.population):
        part, rows = theirs.load_partition(client), data.rows(client)
        expected = np.stack([np.asarray(part[column][:], np.float32) for column in ("age", "visits", "score")], axis=1)
        assert data.inputs[rows].numpy().tobytes() == expected.tobytes()
        assert data.targets[rows].tolist() == part["label"][:]
    if name == "natural":
        assert data.client_names == tuple(sorted(CITIES))
    assert not ours.is_dataset_assigned()  # a copy was used
    used = theirs.dataset  # that of a ShardPartitioner is sorted now
    again = from_hf(used, ["age", "visits", "score"], "label", clients=theirs)
    assert torch.equal(again.inputs[again.index], data.inputs[data.index])
    assert torch.equal(again.offsets, data.offsets)


def test_a_partitioner_of_columns_or_of_another_dataset_is_refused(table: Any) -> None:
    package = pytest.importorskip(
        "flwr_datasets.partitioner", reason="not exercised: pip install 'hansa[flwr-datasets]'"
    )
    with pytest.raises(hansa.HansaError, match="VerticalSizePartitioner divides columns, not rows"):
        from_hf(table, "age", "label", clients=package.VerticalSizePartitioner([3, 4]))
    used = package.IidPartitioner(3)
    used.dataset = table.select(range(50))
    with pytest.raises(hansa.HansaError, match="IidPartitioner already partitions another dataset"):
        from_hf(table, "age", "label", clients=used)
    with pytest.raises(hansa.HansaError, match="assigns the rows"):
        from_hf(table, "age", "label", clients=package.IidPartitioner(3), partition=hansa.data.iid())
    with pytest.raises(hansa.HansaError, match=r"partitions a datasets\.Dataset, found dict"):
        from_hf({"age": [1.0], "label": [0]}, "age", "label", clients=package.IidPartitioner(3))


def test_text_is_collated_batch_by_batch_from_the_dataset_itself(table: Any) -> None:
    def lengths(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = [torch.ones(len(row["words"]) // 3, 1) for row in rows]
        return nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.tensor([row["label"] for row in rows])

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(tokens.sum(1))

    splits = datasets.DatasetDict(table.train_test_split(0.3, seed=0))
    data = from_hf(splits, collate_fn=lengths, client_column="city")
    assert sum(data.samples(client) for client in range(data.population)) == len(splits["train"])
    inputs, targets = data.fetch(0, data.rows(0)[:2])
    rows = [splits["train"][int(row)] for row in data.rows(0)[:2]]
    assert targets.tolist() == [row["label"] for row in rows]
    assert inputs.sum((1, 2)).tolist() == [len(row["words"]) / 3 for row in rows]
    task = hansa.Task(Reader, nn.functional.cross_entropy, data)
    run = hansa.run(hansa.presets.fedavg(local_lr=0.05, steps=2, batch_size=8), task, rounds=2)
    assert run.history[-1]["test_loss"] < run.history[0]["test_loss"]
    assert run.clients().by_client()["test_accuracy"].shape == (5,)
    by_label = from_hf(table, collate_fn=lengths, label_column="label", clients=4, partition=hansa.data.dirichlet(0.3))
    assert by_label.population == 4


def test_columns_of_tokens_are_a_dict_for_forward() -> None:
    rows = {"input_ids": [[1, 2], [3, 4], [5, 6]], "attention_mask": [[1, 1], [1, 0], [1, 1]], "label": [0, 1, 0]}
    data = from_hf(datasets.Dataset.from_dict(rows), ["input_ids", "attention_mask"], "label", clients=[0, 1, 1])
    assert {name: values.tolist() for name, values in data.inputs.items()} == {
        "input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_column": "age"}, "expected input_column= and label_column=, or collate_fn="),
        ({"input_column": "age", "label_column": "label", "collate_fn": list}, "collate_fn= replaces input_column="),
        ({"input_column": ["age", "sight"], "label_column": "label"}, "no column 'sight'"),
        ({"input_column": ["age", "city"], "label_column": "label"}, "column 'city': input 0 is"),
        ({"input_column": [], "label_column": "label"}, "expected input_column="),
        ({"collate_fn": list, "client_column": "city"}, "takes clients= or client_column="),
    ],
)
def test_what_does_not_fit_is_refused(table: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hansa.HansaError, match=message):
        from_hf(table, clients=3, **arguments)
