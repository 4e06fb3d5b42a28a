"""A model with a frozen base in bfloat16 and a trained float32 head, as with LoRA: memory, gradients, files."""

from __future__ import annotations

import copy
import logging
import shutil
from functools import partial

import pytest
import safetensors.torch
import torch
from torch import nn

import hansa
from engine import problems
from hansa.engine import Pool
from hansa.runs.driver import Run

CPU = torch.device("cpu")
METHOD = hansa.presets.fedavg(local_lr=0.1, steps=3, batch_size=5, participation=0.5)


class Adapted(nn.Module):
    """A frozen bfloat16 base, a large constant buffer in float16, a trained low-rank path and a trained head."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        base = torch.Generator().manual_seed(5)
        self.base = nn.Linear(36, 16).requires_grad_(False)
        for part in self.base.parameters():
            part.copy_(torch.randn(part.shape, generator=base))
        self.base.to(torch.bfloat16)
        self.down, self.up, self.head = nn.Linear(36, 2, bias=False), nn.Linear(2, 16, bias=False), nn.Linear(16, 3)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16 * 4096).view(4096, 16).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        hidden = self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))
        return self.head(torch.tanh(hidden) * self.table[0].to(x.dtype))


class Unaware(nn.Module):
    """Gives its bfloat16 base inputs in float32: takes no step unless the base is converted, or under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(36, 16).requires_grad_(False).to(torch.bfloat16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x.flatten(1))))


def task(model=Adapted, **words) -> hansa.Task:
    return hansa.Task(model, nn.functional.cross_entropy, problems.data(test=40), **words)


def test_narrow_frozen_weights_keep_their_dtype_and_are_one_copy():
    mine = task()
    first, second = (mine.trainer(torch.float32, CPU) for _ in range(2))
    for name, dtype in (("base.weight", torch.bfloat16), ("base.bias", torch.bfloat16), ("table", torch.float16)):
        tensors = [mine.frozen[name], *(dict(each.module.state_dict())[name] for each in (first, second))]
        assert {tensor.dtype for tensor in tensors} == {dtype}
        assert len({tensor.data_ptr() for tensor in tensors}) == 1, name
    assert first.module.head.weight.dtype == torch.float32
    assert mine.layout.dim == 36 * 2 + 2 * 16 + 16 * 3 + 3
    assert mine.layout.buffer_dim == 0
    assert mine.network is None
    assert not first.module_state._state._tensors  # no copy of the table to restore it from


def test_the_gradient_is_that_of_plain_pytorch():
    mine = task()
    trainer, vectors = mine.trainer(torch.float32, CPU), mine.start(hansa.Key(3), torch.float32)
    trainer.load(vectors["model"], None)
    rows = torch.arange(7)
    loss, gradients = trainer.gradient(0, rows)
    plain = Adapted()
    plain.load_state_dict(mine.layout.unpack(vectors["model"]), strict=False)
    expected = nn.functional.cross_entropy(plain(mine.data.inputs[rows]), mine.data.targets[rows])
    expected.backward()
    assert torch.equal(loss, expected.detach())
    named = {entry.name: gradient for entry, gradient in zip(mine.layout.parameters, gradients, strict=True)}
    assert set(named) == {"down.weight", "up.weight", "head.weight", "head.bias"}
    for name, gradient in named.items():
        assert torch.equal(gradient, plain.get_parameter(name).grad), name


def test_any_number_of_workers_and_a_resume_give_the_same_bits_and_files_keep_the_dtypes(tmp_path):
    mine = task()
    expected = hansa.run(METHOD, mine, rounds=4, seed=3, workers=1)
    for kind in ("process", "thread"):
        engine = partial(Pool, workers=2, kind=kind)
        assert torch.equal(Run(METHOD, mine, seed=3, engine=engine).advance(4).params, expected.params)
    hansa.run(METHOD, mine, rounds=2, seed=3, workers=1, out=tmp_path / "run")
    resumed = hansa.resume(tmp_path / "run", METHOD, mine, rounds=4)
    assert torch.equal(resumed.params, expected.params)
    dtypes = {name: tensor.dtype for name, tensor in Adapted().state_dict().items()}
    file = hansa.export(tmp_path / "run", tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(file)
    loaded = hansa.load_model(tmp_path / "run", Adapted)
    for state in (resumed.model.state_dict(), exported, loaded.module.state_dict()):
        assert {name: tensor.dtype for name, tensor in state.items()} == dtypes
        assert all(
            torch.equal(state[name], tensor) for name, tensor in Adapted().base.state_dict(prefix="base.").items()
        )
    rows = mine.data.test_inputs
    with torch.no_grad():
        assert torch.equal(loaded.predict(rows).outputs, resumed.model.eval()(rows))


def test_a_run_in_float64_converts_all_weights():
    mine = task()
    trainer = mine.trainer(torch.float64, CPU)
    assert {each.dtype for each in (*trainer.module.parameters(), *trainer.module.buffers())} == {torch.float64}
    assert Run(METHOD, mine, dtype=torch.float64).advance(1).model.base.weight.dtype == torch.float64


def test_a_model_that_does_not_take_narrow_weights_is_converted_and_one_under_autocast_is_not(caplog):
    with caplog.at_level(logging.INFO, "hansa"):
        plain = task(Unaware, execution="eager")
    assert "takes no step with" in caplog.text
    assert "x.to(weight.dtype)" in caplog.text
    assert plain.trainer(torch.float32, CPU).module.base.weight.dtype == torch.float32
    mixed = task(Unaware, autocast="bfloat16")
    assert mixed.trainer(torch.float32, CPU).module.base.weight.dtype == torch.bfloat16
    assert Run(METHOD, mixed).advance(1).model.base.weight.dtype == torch.bfloat16


def test_native_true_is_refused_with_the_reason():
    with pytest.raises(hansa.HansaError, match="no native form: it has frozen weights of fewer bits than float32"):
        task(execution="native")


class Writes(Adapted):
    """Writes to its table from the third batch on."""

    assigns = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4 and self.assigns:
            self.table = self.table + 1
        elif len(x) == 4:
            self.table += 1
        return super().forward(x)


class Assigns(Writes):
    assigns = True


@pytest.mark.parametrize("model", [Writes, Assigns])
def test_writing_to_a_shared_buffer_is_refused(model):
    with pytest.raises(hansa.HansaError, match="table was left unchanged by the first batch"):
        Run(copy.copy(METHOD).with_local(batch_size=4), task(model)).advance(1)


class Base(nn.Module):
    """A frozen base of more than a MiB with a trained head."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(8, 40_000), nn.Linear(40_000, 3)
        nn.init.constant_(self.base.weight, 0.01)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x)))


def test_the_disk_holds_large_frozen_weights_once_for_the_runs_of_a_study(tmp_path):
    rows = hansa.data.from_arrays(torch.ones(12, 8), torch.arange(12) % 3, clients=3)
    mine = hansa.Task(Base, nn.functional.cross_entropy, rows)
    folders = [tmp_path / name for name in ("study/one/seed-0", "study/one/seed-1", "study/two/seed-0", "alone")]
    for group in (tmp_path / "study" / "one", tmp_path / "study" / "two"):
        group.mkdir(parents=True)
        (group / "group.yaml").touch()
    runs = [hansa.run(METHOD, mine, rounds=1, seed=2, workers=1, out=folder) for folder in folders]
    files = [folder / "frozen.safetensors" for folder in folders]
    assert len({file.stat().st_ino for file in files[:3]}) == 1
    assert files[3].read_bytes() == files[0].read_bytes()
    assert set(safetensors.torch.load_file(files[0])) == {"base.weight", "base.bias"}
    assert set(safetensors.torch.load_file(folders[0] / "model.safetensors")) == {"head.weight", "head.bias"}
    loaded = hansa.load_model(folders[1], Base)
    exported = safetensors.torch.load_file(hansa.export(folders[2], tmp_path / "whole.safetensors"))
    for name, tensor in runs[1].model.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor)
        assert torch.equal(exported[name], tensor)
    hansa.resume(folders[0], METHOD, mine, rounds=2)
    assert files[0].stat().st_ino == files[1].stat().st_ino
    shutil.copytree(folders[1], tmp_path / "moved")
    assert hansa.load_model(tmp_path / "moved", Base)
    (tmp_path / "moved" / "frozen.safetensors").write_bytes(b"other")
    with pytest.raises(hansa.HansaError, match=r"frozen.safetensors is damaged"):
        hansa.load_model(tmp_path / "moved", Base)
    files[1].unlink()
    with pytest.raises(hansa.HansaError, match=r"frozen.safetensors is missing.*copy it from a run of the same study"):
        hansa.load_model(folders[1], Base)
