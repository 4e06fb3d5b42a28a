"""What each augmentation does to images, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from hansa import Key
from hansa.training.augment import Pipeline, as_pipeline, crop, flip, normalize
from mistakes import refused

IMAGES = torch.arange(1.0, 1 + 6 * 2 * 5 * 4).view(6, 2, 5, 4)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("last", [False, True], ids=["planar", "channels-last"])
def test_crop_cuts_every_image_at_a_place_of_its_own(last):
    images = IMAGES.contiguous(memory_format=torch.channels_last) if last else IMAGES
    found = crop(padding=2)(images, generator(3))
    places = set()
    for image, cut in zip(IMAGES, found, strict=True):
        wide = torch.zeros(2, 9, 8)
        wide[:, 2:7, 2:6] = image
        fits = [(y, x) for y in range(5) for x in range(5) if torch.equal(wide[:, y : y + 5, x : x + 4], cut)]
        assert fits
        places.add(fits[0])
    assert len(places) > 2
    assert found.is_contiguous(memory_format=torch.channels_last) is last


def test_crop_reaches_every_place_and_fills_by_channel():
    seen = set()
    for seed in range(60):
        found = crop(padding=1, fill=[-1.0, -2.0])(torch.ones(1, 2, 3, 3), generator(seed))
        for channel, fill in ((0, -1.0), (1, -2.0)):
            assert set(found[0, channel].flatten().tolist()) <= {1.0, fill}
        seen.add(tuple((found[0, 0] == 1).flatten().tolist()))
    assert len(seen) == 9


def test_flip_mirrors_about_its_share():
    images = torch.rand(400, 1, 2, 3)
    found = flip(p=0.25)(images, generator())
    mirrored = torch.tensor([not torch.equal(a, b) for a, b in zip(images, found, strict=True)])
    assert torch.equal(found[mirrored], images[mirrored].flip(3))
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(flip(p=0)(images, generator()), images)


def test_normalize_is_torchvisions():
    found = normalize(mean=[0.5, 1.0], std=[2.0, 4.0])(IMAGES, generator())
    wanted = torch.stack([(IMAGES[:, 0] - 0.5) / 2, (IMAGES[:, 1] - 1) / 4], dim=1)
    assert torch.equal(found, wanted)


def test_each_place_in_the_list_draws_at_its_own_address():
    def once(batch, generator):
        return batch + torch.rand(batch.shape, generator=generator)

    key = Key(0).child(1)
    first = Pipeline((once,))(torch.zeros(3), key, generator(9))
    second = Pipeline((once, once))(torch.zeros(3), key, generator()) - first
    assert not torch.allclose(first, second)
    assert torch.equal(first, Pipeline((once,))(torch.zeros(3), key, generator(4)))
    assert not torch.equal(first, Pipeline((once,))(torch.zeros(3), Key(0).child(2), generator()))


test_what_is_wrong_is_told = refused(
    (lambda: crop(padding=0), r"crop\(padding=0\)"),
    (lambda: flip(p=1.5), r"flip\(p=1.5\)"),
    (lambda: normalize([0.5], [0.0]), r"normalize\(std="),
    (lambda: normalize([0.5, 0.1], [1.0]), r"normalize\(std=.*2 numbers"),
    (lambda: as_pipeline([flip]), r"flip\(\) makes one"),
    (lambda: as_pipeline(["flip"]), "expected a function"),
    (lambda: crop()(torch.zeros(2, 3), generator()), r"\[2, 3\]"),
    (lambda: crop()({"a": 1}, generator()), "found dict"),
    (lambda: normalize([0.5], [1.0])(IMAGES, generator()), "2 channels"),
    (lambda: Pipeline((lambda batch, generator: None,))(IMAGES, Key(0), generator()), "returned None"),
)
