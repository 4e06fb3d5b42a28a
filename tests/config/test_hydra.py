"""Configurations composed by Hydra equal those of files; what is wrong is refused by Hydra's types or by our checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hansa import HansaError
from hansa.config import Config, ConfigError, from_yaml, hydra, json_schema
from hansa.presets import catalogue


def as_dict(**changes: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(hydra.structured()()), **changes}


def test_the_dataclass_has_every_section_and_key_with_its_default() -> None:
    assert hydra.read(as_dict()) == Config()
    known = {field.name for field in dataclasses.fields(hydra.structured())}
    assert known == set(json_schema()["properties"]) - {"python"}
    for field in dataclasses.fields(hydra.structured()):
        if dataclasses.is_dataclass(field.type):
            section = Config.model_fields[field.name].annotation
            assert {each.name for each in dataclasses.fields(field.type)} == set(section.model_fields)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": {"preset": "fedprox", "mu": 0.01}}, "algorithm: fedprox"),
        ({"algorithm": {"preset": "fedprox", "mu": 0.5}, "seed": 2}, "algorithm: {preset: fedprox, mu: 0.5}\nseed: 2"),
        ({"sample": {"count": 3}, "seeds": [1, 4]}, "sample: {count: 3}\nseeds: [1, 4]"),
        ({"data": {**as_dict()["data"], "factory": "mine:rows"}}, "data: {factory: 'mine:rows'}"),
        ({"channels": {"model": {"aggregate": "median"}}}, "channels: {model: {aggregate: median}}"),
        ({"evaluate": {**as_dict()["evaluate"], "per_client": True}}, "evaluate: {per_client: true}"),
        ({"workers": 1, "max_norm": 1e12}, "workers: 1"),
    ],
)
def test_what_is_read_equals_the_file_that_sets_the_same(changes: dict[str, Any], text: str) -> None:
    read = hydra.read(as_dict(**changes))
    assert read == from_yaml(text)
    assert read.model_dump(exclude_unset=True).keys() <= from_yaml(text).model_dump(exclude_unset=True).keys() | {
        "algorithm"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"preset": "fedavg", "mu": 0.5}}, "hydra: algorithm.mu: fedavg has no such argument"),
        ({"algorithm": {"preset": "fedaverage"}}, "no preset 'fedaverage'"),
        ({"rounds": 0}, "hydra: rounds: expected at least 1"),
        ({"epochs": 3}, r"no such key\. Did you mean local\.epochs"),
    ],
)
def test_our_validation_stays(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hydra.read(as_dict(**changes))


def test_without_hydra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hydra.core.config_store", None)
    with pytest.raises(HansaError, match=r"pip install 'hansa\[hydra\]'"):
        hydra.register()


@pytest.fixture
def compose() -> Any:
    package = pytest.importorskip("hydra", reason="not exercised: pip install 'hansa[hydra]'")
    hydra.register()
    with package.initialize(version_base=None):
        yield lambda *overrides: package.compose("hansa", list(overrides))


def test_overrides_and_presets_compose(compose: Any) -> None:
    config = hydra.read(compose("preset=fedams", "server.lr=0.3", "local.epochs=2", "data.clients=7"))
    assert config == from_yaml("algorithm: fedams\nserver: {lr: 0.3}\nlocal: {epochs: 2.0}\ndata: {clients: 7}")
    config = hydra.read(compose("preset=fedprox", "algorithm.mu=0.2", "sample={participation: 1/2}"))
    assert config == from_yaml("algorithm: {preset: fedprox, mu: 0.2}\nsample: {participation: 1/2}")
    config = hydra.read(compose("server.lr=${local.lr}", "local.lr=0.1"))  # OmegaConf's interpolation
    assert config.server.lr == 0.1


@pytest.mark.parametrize("preset", sorted(catalogue()))
def test_every_preset_is_an_option(compose: Any, preset: str) -> None:
    assert hydra.read(compose(f"preset={preset}")) == from_yaml(f"algorithm: {preset}")


@pytest.mark.parametrize(
    ("override", "message"),
    [("rounds=many", "Error merging override rounds=many"), ("server.rate=1", "Could not override 'server.rate'"),
     ("preset=fedavgg", "Could not find 'preset/fedavgg'")],
)  # fmt: skip
def test_hydra_refuses_wrong_types_and_unknown_names(compose: Any, override: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        compose(override)
