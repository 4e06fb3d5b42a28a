from __future__ import annotations

import pytest
import torch
from torch import nn

from hansa import HansaError, Layout
from hansa.core.vectors.layout import convert_module, widen_module


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
    named = layout.unpack(flat, rest)
    assert set(named) == set(module.state_dict()) - {"1.num_batches_tracked"}
    for name, tensor in named.items():
        assert torch.equal(tensor.to(torch.float32), module.state_dict()[name]), name


def test_buffers_lie_apart_and_travel_both_ways():
    module, layout = net(), Layout.of(net())
    module[1].num_batches_tracked.fill_(9)
    assert layout.buffer_dim == 3 + 3
    layout.write_buffers(module, torch.arange(6.0) + 0.6)
    assert module[1].running_var.tolist() == pytest.approx([3.6, 4.6, 5.6])
    assert int(module[1].num_batches_tracked) == 9
    assert layout.read_buffers(module, torch.empty(6)).tolist() == pytest.approx([0.6, 1.6, 2.6, 3.6, 4.6, 5.6])


class Odd(nn.Module):
    """Buffers of every kind that no average should touch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor([16777217]))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("hole", torch.tensor([float("nan")]))
        self.register_buffer("chosen", torch.tensor([True]))
        self.register_buffer("mean", torch.tensor([0.5]))
        self.register_buffer("scratch", torch.tensor([0.5]), persistent=False)


def test_only_finite_real_persistent_buffers_travel():
    assert [entry.name for entry in Layout.of(Odd()).buffers] == ["mean"]


def test_buffers_can_be_left_out():
    layout = Layout.of(net()).without({"1.running_mean"})
    assert [(entry.name, entry.offset) for entry in layout.buffers] == [("1.running_var", 0)]
    assert Layout.of(net()).without({"other"}) == Layout.of(net())


def test_converting_keeps_imaginary_parts_and_whole_numbers():
    module = convert_module(Odd(), torch.float64)
    assert (module.wave.dtype, module.wave.tolist()) == (torch.complex128, [1 + 2j])
    assert (module.count.dtype, module.count.tolist()) == (torch.int64, [16777217])
    assert (module.layer.weight.dtype, module.mask.dtype) == (torch.float64, torch.float64)
    widen_module(module, torch.float32)
    assert module.layer.weight.dtype == torch.float64


def shared(change):
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    change(module)
    return module


def test_parameters_that_share_memory_without_being_one_are_refused_by_name():
    def same_data(module):
        module[1].weight.data = module[0].weight.data

    def a_part(module):
        module[1].weight.data = module[0].weight.data[1:]

    def a_buffer(module):
        module.register_buffer("copy", module[0].weight.detach().T)

    def frozen(module):
        same_data(module)
        module[1].weight.requires_grad_(False)

    for change, name in ((same_data, "1.weight"), (a_part, "1.weight"), (a_buffer, "copy"), (frozen, "1.weight")):
        with pytest.raises(HansaError, match=f"0.weight and {name} share memory|{name} and 0.weight share memory"):
            Layout.of(shared(change))


def test_a_parameter_that_repeats_itself_and_one_without_shape_are_refused():
    def repeated(module):
        module[1].weight.data = torch.zeros(3, 1).expand(3, 3)

    with pytest.raises(HansaError, match=r"parameter 1\.weight repeats its own memory"):
        Layout.of(shared(repeated))
    with pytest.raises(HansaError, match=r"0\.weight has no shape yet"):
        Layout.of(nn.Sequential(nn.LazyLinear(3)))


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
