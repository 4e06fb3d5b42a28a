"""Frozen weights and determinism on the simulated accelerator. tests/engine/test_devices.py runs this in a
process of its own, since torch must know a device before the first gradient of a process."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import hansa
from engine.fake_ray import FakeRay
from engine.simulated_device import simulated_device
from hansa.engine import ray_pool
from hansa.engine.ray_pool import RayPool
from hansa.runs.driver import Run
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder, arithmetic_of
from training import test_frozen_weights as frozen
from training.test_determinism import METHOD, Puts, Watching, settings, task


def test_on_a_device_the_trainers_share_one_copy(monkeypatch):
    monkeypatch.setenv("HANSA_NATIVE", "off")
    with simulated_device() as device:
        mine = frozen.task()
        first, second = (mine.trainer(torch.float32, device) for _ in range(2))
        for name, dtype in (("base.weight", torch.bfloat16), ("table", torch.float16)):
            ours, theirs = (dict(each.module.state_dict())[name] for each in (first, second))
            assert ours.device.type == device.type
            assert ours.dtype == dtype
            before = float(ours.flatten()[0])
            theirs.flatten()[0] += 1
            assert float(ours.flatten()[0]) == before + 1  # the same memory
            theirs.flatten()[0] -= 1
        expected = Run(frozen.METHOD, mine).advance(2)
        assert torch.equal(Run(frozen.METHOD, mine, device=device).advance(2).params, expected.params)


def test_an_accelerator_is_deterministic_unless_that_is_switched_off():
    mine, before = task(), settings()
    with simulated_device() as device:
        for wanted, expected in (
            (None, before.for_training()),
            (True, before.for_training()),
            (False, before),
        ):
            Watching.seen.clear()
            Run(METHOD, mine, device=device, deterministic=wanted).advance(1)
            assert set(Watching.seen) == {expected}
            assert settings() == before


def test_an_operation_without_a_deterministic_form_is_an_error_that_names_the_remedy():
    mine = task(Puts)
    with simulated_device() as device:
        with pytest.raises(
            hansa.HansaError, match=r"round 0, client \d, step 0: .*put_.*deterministic=False"
        ) as caught:
            Run(METHOD, mine, device=device).advance(1)
        assert "deterministic: false" in str(caught.value)
        assert Run(METHOD, mine, device=device, deterministic=False).advance(1).state.round == 1


def test_the_choice_is_recorded_and_kept_on_resume(tmp_path, caplog):
    mine = task()
    with simulated_device() as device:
        hansa.run(METHOD, mine, rounds=1, device=device, deterministic=False, out=tmp_path / "run")
        assert RunFolder(tmp_path / "run").config.deterministic is False
        Watching.seen.clear()
        hansa.resume(tmp_path / "run", METHOD, mine, rounds=2, device=device)
        assert not any(each.enabled for each in Watching.seen)
        assert not caplog.text
        Watching.seen.clear()
        hansa.resume(tmp_path / "run", METHOD, mine, rounds=3, device=device, deterministic=True)
        assert all(each.enabled for each in Watching.seen)
        assert "not deterministic" in caplog.text  # started so, resumed otherwise: the last bits may differ
        freely = Run(METHOD, mine, device=device, deterministic=False)
        assert arithmetic_of(freely).endswith(", not deterministic")
    on_cpu = [arithmetic_of(Run(METHOD, mine, device="cpu", deterministic=given)) for given in (True, False)]
    assert on_cpu[0] == on_cpu[1]


@pytest.fixture
def ray(monkeypatch):
    """A cluster in this process with one accelerator, whose actors change our settings."""
    monkeypatch.setenv("HANSA_WORKER", "")
    monkeypatch.setattr(ray_pool, "_import_ray", lambda: FakeRay(gpus=1))
    before, threads = settings(), torch.get_num_threads()
    yield partial(RayPool, workers=2, gpus=0.5)
    before.apply_to_process()
    torch.set_num_threads(threads)


def test_ray_actors_with_accelerators_are_deterministic_unless_that_is_switched_off(ray):
    mine, before = task(), settings()
    for wanted, expected in (
        (False, before),
        (None, before.for_training()),
        (False, before),
        (True, before.for_training()),
    ):
        Watching.seen.clear()
        with simulated_device():
            run = Run(METHOD, mine, deterministic=wanted, engine=ray).advance(1)
        assert set(Watching.seen) == {expected}
        varying = ", not deterministic" if wanted is False else ""
        assert run.training_devices == [f"simulated (simulated accelerator){varying}"]
        before.apply_to_process()


def test_ray_actors_name_the_remedy_for_an_operation_without_a_deterministic_form(ray):
    mine, before = task(Puts), settings()
    with simulated_device():
        with pytest.raises(hansa.HansaError, match=r"round 0, client \d, step 0: .*put_.*deterministic=False"):
            Run(METHOD, mine, engine=ray).advance(1)
        before.apply_to_process()  # which the actors, here in this process, have changed
        assert Run(METHOD, mine, deterministic=False, engine=ray).advance(1).state.round == 1


CONFIG = """
name: small
rounds: 2
engine: {kind: ray, gpus: 0.5}
workers: 2
deterministic: false
data: {name: synthetic, clients: 6, options: {largest: 60}}
model: logistic
local: {lr: 0.05, steps: 2, batch_size: 10}
"""


def test_a_run_on_ray_actors_records_their_devices_and_says_when_they_change(ray, tmp_path, caplog):
    folder = tmp_path / "run"
    with simulated_device():
        open_run(hansa.config.from_yaml(CONFIG), folder).execute()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["devices"] == ["simulated (simulated accelerator), not deterministic"]
        assert summary["server_device"] == "cpu"
        open_run(None, folder, rounds=3).execute()
        assert not caplog.text
        open_run(None, folder, rounds=4, deterministic=True).execute()
        assert "trained on simulated (simulated accelerator), not deterministic before the resume" in caplog.text
        assert json.loads((folder / "summary.json").read_text())["devices"] == ["simulated (simulated accelerator)"]
