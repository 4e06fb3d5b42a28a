from __future__ import annotations

import pytest
import torch
from torch import nn

from hansa import HansaError, Layout


def net():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4))


def test_parameters_are_views_so_a_step_copies_nothing():
    module, layout = net(), Layout.of(net())
    flat = torch.zeros(layout.dim)
    bound = layout.bind(module, flat)
    with torch.no_grad():
        module[3].bias.add_(5.0)
        flat[0] = 7.0
    assert flat[-4:].tolist() == [5.0] * 4
    assert bound[0].detach()[0, 0, 0, 0].item() == 7.0
    assert all(p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for p in bound)


def test_convolution_weights_are_channels_last_for_free():
    module, layout = net(), Layout.of(net())
    layout.bind(module, torch.zeros(layout.dim))
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module[0].weight.shape == (3, 2, 3, 3)


def test_pack_and_named_are_inverse_for_parameters_and_buffers():
    module = net()
    module[1].running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    module[1].num_batches_tracked.fill_(9)
    layout = Layout.of(module)
    flat, rest = layout.pack(module, torch.float64)
    named = layout.named(flat, rest)
    assert set(named) == set(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert torch.equal(named[name].to(tensor.dtype), tensor), name
    assert named["1.num_batches_tracked"].dtype == torch.int64


def test_buffers_lie_apart_and_travel_both_ways():
    module, layout = net(), Layout.of(net())
    assert layout.buffer_dim == 3 + 3 + 1
    layout.write_buffers(module, torch.arange(7.0) + 0.6)
    assert module[1].running_var.tolist() == pytest.approx([3.6, 4.6, 5.6])
    assert int(module[1].num_batches_tracked) == 7
    assert layout.read_buffers(module, torch.empty(7)).tolist() == pytest.approx([0.6, 1.6, 2.6, 3.6, 4.6, 5.6, 7.0])


def test_frozen_parameters_never_travel():
    module = net()
    module[0].requires_grad_(False)
    assert [entry.name for entry in Layout.of(module).parameters] == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_tied_parameters_travel_once():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    assert Layout.of(module).dim == 9


def test_a_module_with_nothing_to_train_is_refused():
    with pytest.raises(HansaError, match="no trainable parameter"):
        Layout.of(nn.ReLU())


def test_a_vector_of_the_wrong_length_is_refused():
    layout = Layout.of(net())
    with pytest.raises(HansaError, match=rf"\(3,\) for parameters: expected \({layout.dim},\)"):
        layout.bind(net(), torch.zeros(3))
