"""The model that a client has after a run: its own in decentralized runs, private blocks in the server's otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hansa


class Net(nn.Module):
    """With BatchNorm, whose statistics a client may keep to itself."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


@pytest.fixture(scope="module")
def task():
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(70, 4, generator=draw)
    targets = inputs[:, :3].argmax(1)
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor([9, 14, 20, 27]))
    held = hansa.data.from_arrays(inputs, targets, clients=owners, test=(inputs[:30], targets[:30]))
    return hansa.Task(Net, nn.functional.cross_entropy, held)


COMMON = {"local_lr": 0.1, "steps": 3, "batch_size": 6}
METHODS = {
    "private": hansa.presets.fedavg(**COMMON).with_local(private_blocks=hansa.local.blocks("head*", "norm*")),
    "dsgd": hansa.presets.dsgd(topology=hansa.gossip.ring(), **COMMON),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_a_clients_model_is_the_same_from_memory_and_from_the_folder(name, dtype, task, tmp_path):
    method = METHODS[name]
    run = hansa.run(method, task, rounds=3, workers=1, dtype=dtype)
    hansa.run(method, task, rounds=3, workers=1, dtype=dtype, out=tmp_path / "x")
    server = run.model.state_dict()
    for client in (0, 3):
        mine = run.client_model(client).state_dict()
        loaded = hansa.load_model(tmp_path / "x", client=client, algorithm=method, task=task).module.state_dict()
        assert all(torch.equal(mine[key], loaded[key]) and mine[key].dtype == loaded[key].dtype for key in mine)
        assert mine["head.weight"].dtype == dtype
        rows = run.store.read(client)
        if name == "dsgd":
            flat = torch.cat([mine[entry.name].flatten() for entry in task.layout.parameters])
            assert torch.equal(flat.sort().values, rows["local/row"][: task.layout.dim].sort().values)
        else:
            assert torch.equal(mine["body.weight"], server["body.weight"])
            assert not torch.equal(mine["head.weight"], server["head.weight"])
            assert rows["local/private"].numel() == 6 * 3 + 3 + 12
            assert not torch.equal(mine["norm.running_mean"], server["norm.running_mean"])
    ours, theirs = (run.client_model(client).state_dict() for client in (0, 3))
    assert not torch.equal(ours["head.weight"], theirs["head.weight"])


def test_what_there_is_not_is_told(task, tmp_path):
    hansa.run(hansa.presets.fedavg(**COMMON), task, rounds=1, workers=1, out=tmp_path / "x")
    again = {"algorithm": hansa.presets.fedavg(**COMMON), "task": task}
    with pytest.raises(hansa.HansaError, match="clients have no models of their own"):
        hansa.load_model(tmp_path / "x", client=1, **again)
    with pytest.raises(hansa.HansaError, match=r"client=4\): expected a client's number, from 0 to 3"):
        hansa.load_model(tmp_path / "x", client=4, **again)
    with pytest.raises(hansa.HansaError, match="started in Python: load_model"):
        hansa.load_model(tmp_path / "x", client=1)
