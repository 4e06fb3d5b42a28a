"""Augmented runs are the same to the bit for any number of workers, in clusters, across a resume, in files."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, config, presets
from hansa.config.sections import PARTITION
from hansa.gossip import isolated
from hansa.sample import per_cluster
from hansa.training.augment import crop, flip, normalize
from training import augmented_models

pytestmark = pytest.mark.usefixtures("shared_workers")

OPTIONS = {"local_lr": 0.1, "steps": 3, "batch_size": 4}
PARTS = [crop(padding=1), flip(), normalize([0.1, 0.2, 0.3], [1.0, 2.0, 0.5])]


def trained(task, algorithm=None, workers=1, rounds=3):
    return hansa.run(algorithm or presets.fedavg(participation=0.75, **OPTIONS), task, rounds=rounds, workers=workers)


@pytest.mark.parametrize(
    ("model", "own"),
    [(augmented_models.Net, augmented_models.noisy), (augmented_models.stack, augmented_models.careless)],
    ids=["dropout, BatchNorm and a frozen block", "native"],
)
def test_workers_and_a_resume_change_nothing(model, own, tmp_path):
    task = hansa.Task(model, cross_entropy, augmented_models.images(), augment=[*PARTS, own])
    algorithm = presets.fedams(participation=0.75, **OPTIONS)
    whole = trained(task, algorithm)
    hansa.run(algorithm, task, rounds=1, workers=1, out=tmp_path / "run")
    resumed = hansa.run(algorithm, task, rounds=3, workers=2, out=tmp_path / "run")
    for other in (trained(task, algorithm, workers=2), trained(task, algorithm, workers=3), resumed):
        for name, vector in whole.state.vectors.items():
            assert torch.equal(other.state.vectors[name], vector)
        assert [r["train_loss"] for r in other.history] == [r["train_loss"] for r in whole.history]
    less = hansa.Task(model, cross_entropy, augmented_models.images(), augment=PARTS)
    assert not torch.equal(trained(less, algorithm).params, whole.params)
    with pytest.raises(HansaError, match="augment"):
        hansa.run(algorithm, less, rounds=5, workers=1, out=tmp_path / "run")


@pytest.mark.parametrize("make", [augmented_models.Net, augmented_models.stack], ids=["eager", "native"])
def test_clusters_that_do_not_mix_take_the_steps_of_clients_alone(make):
    """A cohort draws at the addresses of its clients: gossip along no link is FedAvg."""
    task = hansa.Task(make, cross_entropy, augmented_models.images((5, 9, 14, 7)), augment=PARTS)
    alone = trained(task, presets.fedavg(participation=1.0, **OPTIONS))
    apart = presets.fedavg(sampler=per_cluster(1.0), **OPTIONS)
    mixing = hansa.Mixing(isolated(), clusters=((0, 1), (2, 3)))
    together = trained(task, apart.with_local(mixing=mixing))
    assert torch.equal(together.params, alone.params)
    gossip = presets.ha_fed(clusters=2, reporters=1, **OPTIONS)
    assert torch.equal(trained(task, gossip).params, trained(task, gossip, workers=2).params)


def test_only_normalisation_touches_test_rows():
    data = augmented_models.images()
    mean, std = [0.1, 0.2, 0.3], [1.0, 2.0, 0.5]
    by_hand = (data.test_inputs - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    for make, execution in ((augmented_models.Net, "auto"), (augmented_models.stack, "native")):
        task = hansa.Task(make, cross_entropy, data, augment=PARTS, execution=execution)
        trainer = task.trainer(torch.float32, torch.device("cpu"))
        vectors = task.start(hansa.Key(0), torch.float32)
        found = task.evaluate(trainer, vectors)
        module = task.module(vectors).eval()
        with torch.no_grad():
            wanted = float(cross_entropy(module(by_hand), data.test_targets))
        assert found["test_loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_file_says_it():
    text = """
data:
  factory: training.augmented_models:images
  augment: [{kind: crop, padding: 1}, flip, {kind: normalize, mean: [0.1, 0.2, 0.3], std: [1, 2, 0.5]},
            {kind: training.augmented_models:noisy, sigma: 0.2}, training.augmented_models:careless]
model: {factory: training.augmented_models:Net}
"""
    asked = config.from_yaml(text, ["data.augment.0.padding=2"])
    with config.allow_code():
        task = config.build.build_task(asked, config.build.load_data(asked))
    found = task.augment.parts
    assert found[:3] == (crop(padding=2), flip(), PARTS[2])
    assert (found[3].func, found[3].keywords) == (augmented_models.noisy, {"sigma": 0.2})
    assert found[4] is augmented_models.careless
    assert config.from_yaml(config.to_yaml(asked)) == asked
    with pytest.raises(HansaError, match=r"data.augment.0.*crop has no 'pading'"):
        config.from_yaml("data: {augment: [{kind: crop, pading: 4}]}")
    with pytest.raises(HansaError, match="no augmentation 'flipp'"):
        config.from_yaml("data: {augment: flipp}")


def test_the_papers_pipeline_on_the_page_is_a_file():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    found = [dedent(block) for block in re.findall(r"(?:^    .*\n)+", page, flags=re.MULTILINE)]
    (asked,) = [config.from_yaml(block) for block in found if block.startswith("data:") and "augment:" in block]
    parts = [part["kind"] if isinstance(part, dict) else part for part in asked.data.augment]
    assert parts == ["crop", "flip", "normalize"]
    split = PARTITION.build(asked.data.partition).split(torch.zeros(500), 10, hansa.Key(0))
    assert split.sizes.tolist() == [40] * 10
