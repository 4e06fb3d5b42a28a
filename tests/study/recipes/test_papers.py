"""The recipes against a table typed from the papers: published numbers, rates and settings, cell by cell."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hansa.config import Config, from_yaml
from hansa.study.recipes import SCALES, library
from hansa.study.recipes.verdict import compare_with_paper

RECIPES = sorted(library())

EIGHT = ("FedAvg", "FedAdam", "FedAMSGrad", "SCAFFOLD", "FedProx", "FedDyn", "AFGA", "CAFGA")
"""The order of the rows of AFGA's tables."""

AFGA_1 = """
75.57 1.10 313  | 76.85 1.69 180
77.07 0.05 425  | 78.46 0.19 157
77.53 0.60 388  | 79.59 0.76 154
76.94 1.17 273  | 76.46 3.95 146
75.63 1.24 500+ | 76.91 1.39 180
77.68 0.06 297  | 78.55 0.36 160
78.45 0.58 302  | 80.02 2.00 152
79.18 1.02 233  | 82.10 0.67 112
"""
AFGA_2 = """
49.88 0.33 600+ | 51.21 0.23 600+
50.40 0.53 600+ | 51.99 0.81 375
50.58 0.99 600+ | 52.15 0.58 278
51.71 0.21 396  | 55.12 1.01 235
49.75 0.13 600+ | 51.28 0.10 600+
49.93 0.22 396  | 51.93 0.52 600+
52.08 0.17 436  | 53.87 0.68 369
53.08 0.72 380  | 54.41 0.24 230
"""
AFGA_3 = """
48.66 0.01 500+ | 49.59 0.56 500+
52.35 0.10 391  | 52.23 0.08 189
52.09 0.23 239  | 51.96 0.06 220
51.39 0.02 500+ | 52.76 0.06 166
48.55 0.01 252  | 49.33 0.48 229
51.87 0.03 500+ | 50.81 0.08 500+
53.08 0.08 121  | 53.13 0.04 108
53.20 0.05 152  | 53.57 0.02 91
"""
AWARE_1 = """
FedAvg   52.40 0.47 | 50.47 0.20 | 46.10 0.19
FedAvgM  61.22 0.23 | 58.13 0.97 | 56.83 0.73
FedProx  52.38 0.51 | 50.58 0.58 | 47.11 0.38
SCAFFOLD 49.57 0.08 | 50.61 0.34 | 31.36 2.80
FedNova  52.39 0.52 | 45.39 0.32 | 40.98 1.50
FedYogi  61.07 1.51 | 59.10 0.52 | 57.64 1.14
FedDyn   58.88 0.41 | 56.85 0.28 | 56.13 0.41
FedAWARE 64.54 0.38 | 61.41 0.20 | 61.28 0.39
"""

OTHERS = """
hafed-table-1 | accuracy | CIFAR-10, ResNet-18 | FedAMSGrad: 79.72 3.31 | HA-Fed: 84.38 0.33
hafed-table-1 | accuracy | CIFAR-10, ConvMixer | FedAMSGrad: 73.96 3.02 | HA-Fed: 76.6 2.35
hafed-table-1 | accuracy | CIFAR-100, ResNet-18 | FedAMSGrad: 56.34 0.79 | HA-Fed: 57.12 0.47
hafed-table-1 | accuracy | CIFAR-100, ConvMixer | FedAMSGrad: 61.97 0.35 | HA-Fed: 62.4 0.22
hafed-table-1 | accuracy | Fashion-MNIST, CNN | FedAMSGrad: 88.79 0.16 | HA-Fed: 89.25 0.22
hafed-table-1 | accuracy | Fashion-MNIST, ConvMixer | FedAMSGrad: 83.54 3.36 | HA-Fed: 84.49 1.57
hafed-figure-7 | accuracy |  | FedAvg: 70 | FedYogi: 70 | FedAdam: 70 | HA-Fed: 76
hafed-figure-9 | accuracy |  | p_c = 1, q = 1: 78 | p_c = 1/2, q = 4: 78 | p_c = 1/4, q = 8: 78
afga-table-4 | accuracy |  | FedAMSGrad: 79.59 0.76 | + gossip: 77.39 0.01 | + re-sampling (AFGA): 80.02 2
afga-table-4 | accuracy |  | + clusters (CAFGA): 82.1 0.67
afga-table-5 | accuracy | Setting 1 | AFGA: 78.8 | AFGA (a): 76.59
afga-table-5 | rounds | Setting 1 | AFGA: 302 | AFGA (a): 419
afga-table-5 | accuracy | Setting 2 | AFGA: 82.61 | AFGA (a): 81.51
afga-table-5 | rounds | Setting 2 | AFGA: 152 | AFGA (a): 239
afga-table-5 | accuracy | Setting 3 | CAFGA: 81.56 | CAFGA (a): 81.15
afga-table-5 | rounds | Setting 3 | CAFGA: 142 | CAFGA (a): 194
afga-table-5 | accuracy | Setting 4 | CAFGA: 83.15 | CAFGA (a): 82.99
afga-table-5 | rounds | Setting 4 | CAFGA: 69 | CAFGA (a): 136
afga-table-6 | accuracy |  | FedAvg: 70.32 0.44 | FedAdam: 73.8 0.58 | FedAMSGrad: 75.59 0.73 | SCAFFOLD: 74.6 0.67
afga-table-6 | accuracy |  | FedProx: 70.26 0.45 | FedDyn: 74.15 2.23 | AFGA: 74.72 0.32 | CAFGA: 75.96 0.67
afga-table-7 | 70% |  | FedAMSGrad: 76 | AFGA: 91.76 | CAFGA: 76.22
afga-table-7 | 75% |  | FedAMSGrad: 128 | AFGA: 130.98 | CAFGA: 102.86
afga-table-7 | 78% |  | FedAMSGrad: 194 | AFGA: 223.48 | CAFGA: 172.42
afga-table-7 | 80% |  | FedAMSGrad: 281 | AFGA: 250.86 | CAFGA: 179.82
afga-table-8 | accuracy |  | DSGD: 80.23 | DAdam: 70.37 | PGA: 80.93 | AFGA: 82.16 | CAFGA: 83.03
afga-table-8 | rounds |  | DSGD: 50 | DAdam: 227 | PGA: 210 | AFGA: 152 | CAFGA: 112
cams-table-3 | accuracy |  | eps = 1e-1: 90.45 | eps = 1e-2: 90.51 | eps = 1e-3: 90.94 | eps = 1e-4: 90.72
cams-table-3 | accuracy |  | eps = 1e-6: 90.49 | eps = 1e-8: 90.3
cams-table-2 | bits | one way | uncompressed: 3.58e11 | sign: 1.84e11 | top-k 1/64: 1.84e11 | top-k 1/128: 1.82e11
cams-table-2 | bits | one way | top-k 1/256: 1.8e11
cams-table-2 | bits | two ways | uncompressed: 3.58e11 | sign: 1.12e10 | top-k 1/64: 1.12e10 | top-k 1/128: 5.59e09
cams-table-2 | bits | two ways | top-k 1/256: 2.79e09
"""

Published = dict[tuple[str, str, str, str], tuple[float, float | None, bool]]


def number(text: str, spread: str | None = None) -> tuple[float, float | None, bool]:
    return float(text.rstrip("+")), None if spread is None else float(spread), text.endswith("+")


def typed() -> Published:
    """(recipe, row, column, measure): (number, ±, only a lower bound), from the papers."""
    table: Published = {}
    for name, lines in (("afga-table-1", AFGA_1), ("afga-table-2", AFGA_2), ("afga-table-3", AFGA_3)):
        for row, line in zip(EIGHT, lines.split("\n")[1:-1], strict=True):
            for place, cell in enumerate(line.split("|"), start=1):
                accuracy, spread, rounds = cell.split()
                table[name, row, f"Setting {place}", "accuracy"] = number(accuracy, spread)
                table[name, row, f"Setting {place}", "rounds"] = number(rounds)
    for line in AWARE_1.split("\n")[1:-1]:
        row, rest = line.split(maxsplit=1)
        for column, cell in zip(("statistical", "hybrid", "hybrid+"), rest.split("|"), strict=True):
            table["aware-table-1", row, column, "accuracy"] = number(*cell.split())
    for line in OTHERS.split("\n")[1:-1]:
        name, measure, column, *cells = line.split(" | ")
        for row, _, numbers in (cell.rpartition(": ") for cell in cells):
            table[name, row, column, measure] = number(*numbers.split())
    return table


def test_every_published_number_and_spread_is_that_of_the_paper() -> None:
    published = {
        (name, cell.row, cell.column, measure): (value.value, value.spread, value.exceeded)
        for name, recipe in library().items()
        if name.startswith(("cams-", "hafed-", "afga-", "aware-"))
        for cell in recipe.cells("paper")
        for measure, value in cell.published.items()
    }
    assert published == typed()


def configs(name: str, scale: str = "paper") -> dict[tuple[str, str], Config]:
    cells = library()[name].cells(scale)
    return {(cell.row, cell.column): from_yaml(yaml.safe_dump(cell.document)) for cell in cells}


def part(value: Any) -> dict[str, Any]:
    """A component of a configuration as its kind and options."""
    return {"kind": value} if isinstance(value, str) else dict(value)


def rates(config: Config) -> tuple[float, float | None, float | None]:
    """Local rate, server rate, eps."""
    plain = config.model_dump()
    server: dict[str, Any] = plain["server"] or {}
    return plain["local"]["lr"], server.get("lr"), server.get("eps")


CAMS = {
    "ResNet-18": {
        "FedAvg": (0.01, 1.0, None),
        "FedAdam": (0.01, 0.1, 0.1),
        "FedYogi": (0.01, 1.0, 0.1),
        "FedAMSGrad": (0.01, 0.1, 0.1),
        "FedAMS": (0.01, 1.0, 1e-3),
    },
    "ConvMixer": {
        "FedAvg": (0.01, 1.0, None),
        "FedAdam": (0.01, 1.0, 0.1),
        "FedYogi": (0.01, 1.0, 0.1),
        "FedAMSGrad": (0.01, 1.0, 0.1),
        "FedAMS": (0.01, 1.0, 1e-3),
    },
}
HAFED = {
    "CIFAR-10, ResNet-18": ((0.1, 0.0005, 1e-8), (0.1, 0.001, 1e-8)),
    "CIFAR-10, ConvMixer": ((0.1, 0.001, 1e-8), (0.1, 0.01, 1e-8)),
    "CIFAR-100, ResNet-18": ((0.1, 0.001, 1e-8), (0.1, 0.001, 1e-8)),
    "CIFAR-100, ConvMixer": ((1.0, 0.01, 1e-8), (1.0, 0.01, 1e-8)),
    "Fashion-MNIST, CNN": ((0.1, 0.01, 1e-8), (0.1, 0.01, 1e-8)),
    "Fashion-MNIST, ConvMixer": ((0.1, 0.0005, 1e-8), (0.1, 0.001, 1e-8)),
}
SERVER_OF_AFGA = {"FedAdam": 0.01, "FedAMSGrad": 0.01, "AFGA": 0.01, "CAFGA": 0.01, "FedDyn": None}


def test_rates_of_cams_and_hafed() -> None:
    mixer = {(row, ""): each for row, each in CAMS["ConvMixer"].items()}
    both = {(row, column): each for column, rows in CAMS.items() for row, each in rows.items()}
    hafed = {(row, column): each for column, pair in HAFED.items()
             for row, each in zip(("FedAMSGrad", "HA-Fed"), pair, strict=True)}  # fmt: skip
    seven = {("FedAvg", ""): (0.01, 1.0, None), ("FedAMSGrad", ""): (0.1, 0.001, 1e-8)}
    seven |= {(row, ""): (0.1, 0.01, 1e-8) for row in ("FedYogi", "FedAdam", "HA-Fed")}
    for name, expected in {"cams-figure-1": both, "cams-figure-8": both, "cams-figure-1-convmixer": mixer,
                           "hafed-table-1": hafed, "hafed-figure-7": seven}.items():  # fmt: skip
        assert {cell: rates(config) for cell, config in configs(name).items()} == expected, name
    same = dict.fromkeys([f"cams-figure-{number}" for number in (4, 5, 6, 7)], (0.01, 1.0, 1e-3))
    same |= dict.fromkeys([f"hafed-figure-{number}" for number in ("2a", "2b", "3")], (1.0, 0.01, 1e-8))
    for name, each in {**same, "hafed-figure-9": (0.1, 0.01, 1e-8)}.items():
        assert {rates(config) for config in configs(name).values()} == {each}, name
    eight = {row: rates(config) for (row, _), config in configs("hafed-figure-8").items()}
    assert (eight["FedAMSGrad"], eight["HA-Fed"]) == ((0.1, 0.001, 1e-8), (0.1, 0.01, 1e-8))
    assert (eight["D-AMSGrad"][0], eight["D-AMSGrad"][2]) == (0.001, 1e-8)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("cams-figure", "hafed-", "aware-"))])
def test_settings_of_cams_hafed_and_aware(name: str) -> None:
    for (row, column), config in configs(name).items() if name != "hafed-figure-4" else ():
        assert config.rounds == 500
        if name.startswith("aware-"):
            assert (config.data.clients, config.local.lr, part(config.sample)["participation"]) == (100, 0.01, 0.1)
            continue
        partition = part(config.data.partition)
        if name.startswith("cams-"):
            assert (config.data.clients, partition["kind"], config.local.batch_size) == (100, "iid", 20), row
            assert config.local.epochs == 3 or "figure-3" in name, row
            continue
        assert (config.data.clients, config.local.batch_size) == (32, 50), row
        assert config.local.steps == 48 or name == "hafed-figure-3", row
        shards = (2000, 60) if "100" in config.data.name else (200, 6)
        assert (partition["shards"], partition["per_client"]) == shards, column
        assert config.algorithm.preset != "ha_fed" or config.gossip.clusters == 4
    assert name != "hafed-table-1" or library()[name].at("paper").seeds == 3


@pytest.mark.parametrize(("name", "doubled"), [("afga-table-1", 2.0), ("afga-table-2", 1.0), ("afga-table-3", 10.0)])
def test_rates_and_setting_of_afga(name: str, doubled: float) -> None:
    shakespeare = name == "afga-table-3"
    local = {
        "FedAvg": 1.0 if shakespeare else 0.1,
        "FedAdam": 1.0,
        "FedAMSGrad": 1.0,
        "AFGA": doubled,
        "CAFGA": doubled,
    }
    for (row, column), config in configs(name).items():
        expected = local.get(row, 0.1), SERVER_OF_AFGA.get(row, 1.0)
        assert rates(config)[:2] == expected, (row, column)
        clients = 100 if column == "Setting 1" else 50
        assert config.data.clients == clients
        assert config.rounds == (600 if name == "afga-table-2" else 500)
        assert (config.local.steps, config.local.batch_size) == (100 if shakespeare else 24, 50)
        if row == "CAFGA":
            assert config.gossip is not None
            assert config.gossip.clusters == 5


SETTINGS_OF_AFGA = {"Setting 1": (100, 0.05), "Setting 2": (50, 0.1), "Setting 3": (100, 0.1), "Setting 4": (50, 0.2)}


@pytest.mark.parametrize("name", ["afga-table-4", "afga-table-5", "afga-table-6", "afga-table-7", "afga-table-8"])
def test_rates_and_setting_of_the_other_tables_of_afga(name: str) -> None:
    local = {"fedavg": 0.1, "scaffold": 0.1, "fedprox": 0.1, "feddyn": 0.1, "fedadam": 1.0, "fedamsgrad": 1.0}
    local |= {"afga": 2.0, "cafga": 2.0}
    server = {"feddyn": None} | dict.fromkeys(("fedadam", "fedamsgrad", "afga", "cafga"), 0.01)
    for (row, column), config in configs(name).items():
        clients, share = SETTINGS_OF_AFGA[column or ("Setting 1" if name == "afga-table-7" else "Setting 2")]
        assert (config.data.clients, config.rounds) == (clients, 500), (row, column)
        assert (config.local.steps, config.local.batch_size) == (24, 50)
        assert part(config.data.partition) == {"kind": "dirichlet", "alpha": 0.6}
        if (preset := config.algorithm.preset) not in local:
            assert name == "afga-table-8"  # the methods without a server, whose rates the paper does not give
            continue
        assert rates(config)[:2] == (local[preset], server.get(preset, 1.0)), (row, column)
        if preset == "cafga":
            reporters = config.gossip.reporters
            assert isinstance(reporters, int)
            assert (config.gossip.clusters, 5 * reporters) == (5, round(share * clients)), (row, column)
        else:
            assert part(config.sample)["participation"] == share


def test_forms_of_the_ninth_figure_of_hafed() -> None:
    cells = {row: config.gossip for (row, _), config in configs("hafed-figure-9").items()}
    forms = {row: (gossip.active, gossip.gossip_every) for row, gossip in cells.items()}
    assert (forms["p_c = 1/2, q = 4"], forms["p_c = 1/4, q = 8"]) == ((0.5, 4), (0.25, 8))
    assert {gossip.reporters for gossip in cells.values()} == {2}


REDDI = {  # logarithms of base 10: the local rate, the server's, eps; in the order of the authors' tables
    "reddi-cifar-100": ((-1, -1.5, -1.5, -1.5, -1), (-1, 0, 0, 0, 0.5), (-2, -1, -1)),
    "reddi-emnist": ((-1.5, -1.5, -1.5, -1.5, -1), (-1, -2.5, -2.5, -0.5, 0), (-2, -4, -4)),
    "reddi-shakespeare": ((0, 0, 0, 0, 0), (-0.5, -2, -2, -0.5, 0), (-1, -3, -3)),
}
REDDI_SETTINGS = {"reddi-cifar-100": (20, 4000), "reddi-emnist": (20, 1500), "reddi-shakespeare": (4, 1200)}
REDDI_BEST = {
    "reddi-cifar-100": ("FedYogi",),
    "reddi-emnist": ("FedAdam", "FedYogi", "FedAvgM"),
    "reddi-shakespeare": ("FedAdagrad", "FedYogi", "FedAvgM"),
}


@pytest.mark.parametrize("name", REDDI)
def test_rates_settings_and_best_methods_of_reddi(name: str) -> None:
    cells = {row: config for (row, _), config in configs(name).items()}
    local, server, eps = REDDI[name]
    for place, row in enumerate(("FedAdagrad", "FedAdam", "FedYogi", "FedAvgM", "FedAvg")):
        *found, offset = rates(cells[row])
        assert found == pytest.approx([10 ** local[place], 10 ** server[place]], rel=1e-3), row
        assert offset == (pytest.approx(10 ** eps[place]) if place < 3 else None), row
        assert (cells[row].local.batch_size, cells[row].rounds) == REDDI_SETTINGS[name]
        assert (part(cells[row].sample)["count"], cells[row].local.epochs) == (10, 1)
        assert cells[row].server.weights == "samples"
    (claim,) = library()[name].claims
    assert set(claim.better) == set(REDDI_BEST[name])
    assert set(claim.than or cells.keys() - set(claim.better)) == cells.keys() - set(claim.better)


def test_the_diversity_figure_is_fedavg_alone_in_the_hybrid_setting() -> None:
    cells = configs("aware-figure-2")
    alphas = {}
    for (row, _), config in cells.items():
        assert config.algorithm.preset == "fedavg"
        assert (config.data.name, config.data.clients, config.local.epochs, config.local.batch_size) == (
            "cifar10",
            100,
            3,
            64,
        )
        assert part(config.data.partition)["kind"] == "dirichlet"
        alphas[row] = part(config.data.partition)["alpha"]
    assert alphas == {f"Dirichlet({alpha})": alpha for alpha in (0.1, 0.3, 0.5, 0.7)}
    measures = {measure.metric for measure in library()["aware-figure-2"].measures.values()}
    assert measures == {"test_accuracy", "diversity", "aggregate_norm"}


def test_training_loss_of_hafed_is_the_papers_global_one() -> None:
    for name in [name for name in RECIPES if name.startswith("hafed-")]:
        losses = {measure.metric for measure in library()[name].measures.values() if "loss" in measure.metric}
        assert losses == {"local_mean_loss"}, name
        for scale in SCALES:
            assert all(config.evaluate.local_mean for config in configs(name, scale).values()), (name, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_no_pipeline_normalises_twice_or_never(scale: str) -> None:
    for name in RECIPES:
        for cell, config in configs(name, scale).items():
            normalised = [step for step in config.data.augment or () if part(step)["kind"] == "normalize"]
            by_loader = config.data.options.get("normalize", True)
            expected = 0 if name.startswith("niid-") else 1  # NIID-Bench trains on pixels from 0 to 1
            assert len(normalised) + by_loader == expected, (name, cell)


def test_numbers_of_other_data_have_no_difference_and_no_target_of_the_paper() -> None:
    history = [{"round": r, "test_accuracy": 0.5 + r / 100, "simulated_seconds": 60.0} for r in range(1, 41)]
    checked = 0
    for name, recipe in library().items():
        measures = recipe.measured("cpu")
        if recipe.same_data("cpu"):
            assert measures == recipe.measures, name
            continue
        for measure in measures.values():
            if measure.target is not None:
                assert measure.target in recipe.at("cpu").targets.values(), name
        if not {measure.metric for measure in measures.values()} <= {"test_accuracy"}:
            continue
        cells = [(cell.row, cell.column) for cell in recipe.cells("cpu")]
        comparisons, _ = compare_with_paper(recipe, "cpu", dict.fromkeys(cells, [history] * 3))
        assert comparisons
        assert {one.difference for one in comparisons} == {None}, name
        checked += 1
    assert checked >= 5
    assert library()["afga-table-3"].same_data("cpu")  # Shakespeare, with a smaller network
    assert not library()["afga-table-1"].same_data("cpu")
    assert library()["cams-table-2"].measures["bits"].counted  # the same on any data
