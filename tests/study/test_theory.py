"""`hansa.theory` against the oracle's typed theorems, its estimates on quadratics, and the command."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hansa
from cli.conftest import SMALL
from command_line import run_command
from hansa.core.errors import HansaError
from hansa.gossip import (
    clipped,
    cluster_rho,
    complete,
    exponential,
    hypercube,
    ring,
    unbalanced_complete,
)
from hansa.study.theorems import (
    ProblemConstants,
    TheorySetting,
    adaptive_bound,
    aware_bound,
    clustered_bound,
    clustered_limits,
    resampled_bound,
    theorem_results,
    topology_results,
)
from hansa.study.theory import estimate_constants, recorded_values
from oracle import theory as oracle

positive = st.floats(0.01, 10.0)
rhos = st.just(0.0) | st.floats(0.01, 1.0)


@st.composite
def problems(draw: Any) -> ProblemConstants:
    names = ("L", "G", "sigma_l", "sigma_g", "sigma_within", "sigma_between", "gap")
    return ProblemConstants(d=float(draw(st.integers(1, 100))), **{name: draw(positive) for name in names})


RATES = st.fixed_dictionaries(
    {
        "eta": positive,
        "eta_l": st.floats(1e-4, 1.0),
        "b1": st.floats(0.0, 0.95),
        "b2": st.floats(0.0, 0.999),
        "eps": st.floats(1e-6, 1.0),
    }
)


@settings(max_examples=60, deadline=None)
@given(problems(), RATES, st.integers(2, 20), st.data(), st.floats(0.0, 0.99), st.floats(0.0, 2.0), st.booleans())
def test_fedams_and_fedcams_are_the_papers(
    p: ProblemConstants, rates: Any, m: int, data: Any, q: float, gamma: float, compressed: bool
) -> None:
    n = data.draw(st.integers(1, m))
    common = {**rates, "L": p.L, "G": p.G, "sl": p.sigma_l, "sg": p.sigma_g, "gap": p.gap, "d": p.d}
    if compressed:
        want = (
            oracle.cams_compressed(5, m, 100, q=q, gamma=gamma, **common)
            if n == m
            else oracle.cams_compressed_partial(5, m, n, 100, q=q, **common)
        )
    else:
        want = oracle.cams_full(5, m, 100, **common) if n == m else oracle.cams_partial(5, m, n, 100, **common)
    setting = TheorySetting(
        family="adaptive", clients=m, participants=n, steps=(5,) * m, rounds=100, server_lr=rates["eta"], q=q,
        local_lr=rates["eta_l"], b1=rates["b1"], b2=rates["b2"], eps=rates["eps"], gamma=gamma,
        compressor="sign()" if compressed else "",
    )  # fmt: skip
    found = adaptive_bound(setting, p)
    assert [found[name] for name in ("largest eta_l", "Psi", "Phi", "bound")] == pytest.approx(list(want), rel=1e-9)
    (bound,) = (result for result in theorem_results(setting, p) if result.values)
    number = ("4.18" if n == m else "B.2") if compressed else "4.4" if n == m else "4.9"
    assert (bound.name, bound.values) == (f"[CAMS] Theorem {number}", found)


@settings(max_examples=60, deadline=None)
@given(problems(), RATES, st.integers(1, 6), st.integers(2, 9), st.integers(1, 50), rhos, st.data())
def test_ha_fed_is_the_papers(p: ProblemConstants, rates: Any, K: int, n: int, tau: int, rho: float, data: Any) -> None:
    m = data.draw(st.integers(1, n))
    limits, psi, phis, bound = oracle.hafed(
        K, n, m, rho, tau, 100, **rates, L=p.L, G=p.G, s=p.sigma_l, within=p.sigma_within, between=p.sigma_between,
        gap=p.gap, d=p.d,
    )  # fmt: skip
    setting = TheorySetting(
        clients=K * n, participants=K * m, sizes=(n,) * K, reporters=(m,) * K, cluster_rho=(rho,) * K,
        steps=(tau,) * K * n, rounds=100, server_lr=rates["eta"], local_lr=rates["eta_l"], b1=rates["b1"],
        b2=rates["b2"], eps=rates["eps"],
    )  # fmt: skip
    found = clustered_bound(setting, p)
    assert clustered_limits(setting, p, rates["eta_l"]) == pytest.approx(tuple(limits), rel=1e-9)
    names = ("Psi", "Phi_1", "Phi_2", "Phi_3", "Phi_4", "bound")
    assert [found[name] for name in names] == pytest.approx([psi, *phis, bound], rel=1e-9)
    largest = found["largest eta_l"]
    assert largest <= min(clustered_limits(setting, p, largest))
    assert largest * 1.001 > min(clustered_limits(setting, p, largest * 1.001))


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(1, 6), st.integers(1, 9), st.integers(1, 50), rhos)
def test_afga_is_the_papers(p: ProblemConstants, K: int, m: int, I: int, rho: float) -> None:  # noqa: E741
    setting = TheorySetting(
        clients=9 * K, participants=m * K, sizes=(9,) * K, reporters=(m,) * K, cluster_rho=(rho,) * K,
        steps=(I,) * 9 * K, rounds=100,
    )  # fmt: skip
    first, later = resampled_bound(setting, p).values()
    if K > 1:
        variances = p.sigma_within, p.sigma_between
    else:
        variances = p.sigma_g, 0.0
    leading, second = oracle.afga(K, m, rho, I, 100, p.L, p.G, p.sigma_l, *variances, p.gap)
    assert later == pytest.approx(second)
    if K == 1:  # equation (3) counts the noise once, (36) twice: the same order
        leading -= p.L * p.sigma_l**2 / math.sqrt(100 * I * m)
    assert first == pytest.approx(leading)


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data(), st.floats(1e-4, 0.1))
def test_aware_is_the_papers(p: ProblemConstants, steps: list[int], data: Any, lr: float) -> None:
    n = len(steps)
    zeta = tuple(data.draw(st.lists(positive, min_size=n, max_size=n)))
    raw = np.array(data.draw(st.lists(positive, min_size=n, max_size=n)))
    found = (raw / raw.sum()).tolist()
    p = ProblemConstants(**p.known(), zeta=zeta, gradient_norm=0.7, gradient_scale=1.3)
    chi2 = math.fsum((f * n) ** 2 for f in found)
    setting = TheorySetting(
        clients=n, participants=n, steps=tuple(steps), weights=(1 / n,) * n, local_lr=lr, alpha=0.5, chi_square=chi2,
        diversity=1.7,
    )  # fmt: skip
    bound = aware_bound(setting, p)
    hetero, drift, gap, rho, stationary, factors = oracle.aware(
        steps, [1 / n] * n, found, lr, 0.5, 1.0, p.L, p.sigma_l, p.sigma_g, zeta, 0.7, 1.3, 1.7
    )
    assert (bound["Phi_Hetero"], bound["drift"], bound["momentum gap"]) == pytest.approx((hetero, drift, gap))
    assert bound["rho^t"] == pytest.approx(rho, rel=1e-6, abs=1e-6)
    if rho > 1e-3:
        assert bound["bound without vanishing terms"] == pytest.approx(stationary, rel=1e-4)
    elif rho < 0:
        assert math.isinf(bound["bound without vanishing terms"])
    want = factors[0] * p.sigma_g**2 + factors[1] * 0.7**2
    assert bound["bound at this model"] == pytest.approx(want, abs=1e-6)


def test_orders_of_the_corollaries() -> None:
    def orders(name: str, **facts: Any) -> tuple[list[float], list[bool | None]]:
        setting = TheorySetting(family="adaptive", steps=(4,) * facts["clients"], rounds=400, **facts)
        (row,) = (row for row in theorem_results(setting, ProblemConstants()) if row.name == f"[CAMS] Corollary {name}")
        return [inside for _, inside in row.orders.values()], list(row.conditions.values())

    plain, enough = orders("4.6", clients=10, participants=10)
    assert plain == pytest.approx([math.sqrt(40), 1 / 80, 1 / math.sqrt(16000)])
    assert enough == [True]
    sent, _ = orders("4.20", clients=10, participants=10, q=0.75, compressor="sign()")
    assert sent[2] == pytest.approx(4 * plain[2])
    some, _ = orders("4.11", clients=100, participants=10)
    assert some[2] == pytest.approx(math.sqrt(4 / 4000))
    both = TheorySetting(family="adaptive", clients=100, participants=10, steps=(4,) * 100, compressor="sign()")
    assert not any("Corollary" in row.name for row in theorem_results(both, ProblemConstants()))


def check_topology(sizes: list[int], m: int, graph: Any = None, **known: Any) -> list[Any]:
    rates = cluster_rho(graph or ring(), sizes)
    return topology_results(sizes, [m] * len(sizes), rates, known.get("steps"), known.get("rounds"))


@pytest.mark.parametrize(
    ("sizes", "m", "graph", "dense", "few"),
    [
        ([8] * 4, 2, ring(), False, True),  # rho 0.805 > 1/(2 sqrt 6)
        ([8] * 4, 2, unbalanced_complete(seed=30, spread=0.35), True, True),  # rho 0.125
        ([8] * 4, 8, ring(), True, True),  # m = n leaves rho free
        ([8] * 8, 8, ring(), True, False),
        ([5] * 2, 1, exponential(), True, True),  # rho 1/4 = 1/(2 sqrt 4), met exactly
    ],
)
def test_the_conditions_on_topologies_are_those_printed(
    sizes: list[int], m: int, graph: Any, dense: bool, few: bool
) -> None:
    corollary, _ = check_topology(sizes, m, graph)
    assert list(corollary.conditions.values()) == [dense, few, None]
    n, rate = sizes[0], max(cluster_rho(graph, sizes))
    assert dense == (m == n or 2 * rate * math.sqrt(n - m) <= 1 + 1e-9)


def test_the_afga_theorems_as_printed() -> None:
    """rho <= M/(M+N) over all clients, rho_max <= m/(m+n) over clusters, the tightest where sizes differ."""
    _, one = check_topology([50], 5)
    assert one.name == "[AFGA] Theorem 4.6"
    assert one.conditions == {"rho_max = 0.9947 <= M/(M + N) = 0.09091": False, "R >= I M": None}
    _, uneven = check_topology([4, 16], 2, complete())
    assert uneven.name == "[AFGA] Theorem D.3"
    assert "rho_max = 0 <= m/(m + n) = 0.1111" in uneven.conditions
    _, exact = check_topology([4], 2, hypercube())
    assert exact.conditions["rho_max = 0.3333 <= M/(M + N) = 0.3333"] is True


def test_rates_of_topologies_scale_as_the_theorems_say() -> None:
    once, four_times = (check_topology([8] * 4, 2, complete(), steps=steps, rounds=1000) for steps in (12, 48))
    for place, factors in ((0, (2, 1 / 2, 1 / 2)), (1, (2, 1 / 4, 1 / 2))):
        for (_, few), (_, many), factor in zip(
            once[place].orders.values(), four_times[place].orders.values(), factors, strict=True
        ):
            assert many == pytest.approx(factor * few)
    assert once[1].orders["server rate"][1] == pytest.approx(8 * math.sqrt(12 / 2))
    for rounds, enough in ((96, False), (97, True)):
        assert check_topology([8] * 4, 2, complete(), steps=12, rounds=rounds)[0].conditions[
            f"T = {rounds} > tau M = 96"
        ] is enough  # fmt: skip


def draw_least_squares(sizes: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    draw = np.random.default_rng(0)
    return (
        tuple(torch.from_numpy(draw.standard_normal((rows, 3))) for rows in sizes),
        tuple(torch.from_numpy(draw.standard_normal(rows)) for rows in sizes),
    )


class TestEstimates:
    """On least squares f_i = ||A_i x - b_i||^2/(2 rows_i): the Hessian is A'A/rows, a row's gradient a (a x - b)."""

    sizes = (3, 5, 8, 4)
    A, b = draw_least_squares(sizes)
    x = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64)

    @property
    def gradients(self) -> torch.Tensor:
        return torch.stack([a.T @ (a @ self.x - b) / len(b) for a, b in zip(self.A, self.b, strict=True)])

    def test_smoothness_is_the_largest_eigenvalue_over_clients(self) -> None:
        task = hansa.training.quadratic(self.A, self.b, x0=self.x)
        found = hansa.measures.smoothness(task, clients=None, iterations=200)
        largest = max(float(torch.linalg.eigvalsh(a.T @ a / len(a)).max()) for a in self.A)
        assert pytest.approx(largest, rel=1e-6) == found.L
        assert pytest.approx(float(self.gradients.norm(dim=1).max()), rel=1e-6) == found.G
        losses = [float(((a @ self.x - b) ** 2).mean() / 2) for a, b in zip(self.A, self.b, strict=True)]
        assert found.loss == pytest.approx(np.mean(losses))
        assert found.clients == (0, 1, 2, 3)
        some = hansa.measures.smoothness(task, clients=2, seed=3)
        assert (len(some.clients), some.L <= found.L + 1e-9) == (2, True)
        assert torch.equal(task.x0, self.x)

    def test_stochastic_gradients_of_an_own_model_with_unequal_clients(self) -> None:
        class Line(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.tensor([0.5, -1.0, 0.3]))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.w

        inputs, targets = torch.cat(self.A).float(), torch.cat(self.b).float()
        ends = np.cumsum(self.sizes)
        clients = [range(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        data = hansa.data.from_arrays(inputs, targets, clients=[list(rows) for rows in clients])
        task = hansa.Task(Line, lambda out, y: ((out - y) ** 2).mean() / 2, data)
        found = hansa.measures.smoothness(task, clients=None, iterations=100, batch_size=1, batches=8)
        rows = [a * (a @ self.x - b)[:, None] for a, b in zip(self.A, self.b, strict=True)]
        assert pytest.approx(max(float(r.norm(dim=1).max()) for r in rows), rel=1e-4) == found.G
        largest = max(float(torch.linalg.eigvalsh(a.T @ a / len(a)).max()) for a in self.A)
        assert pytest.approx(largest, rel=1e-4) == found.L

    def test_constants_of_a_clustered_method_are_those_of_its_clusters(self) -> None:
        task = hansa.training.quadratic(self.A, self.b, x0=self.x)
        method = hansa.presets.ha_fed(clusters=[[0, 2], [1, 3]], reporters=1, steps=2)
        found, g = estimate_constants(method, task), self.gradients
        means = torch.stack([g[[0, 2]].mean(dim=0), g[[1, 3]].mean(dim=0)])
        within = ((g[[0, 2]] - means[0]).square().sum() + (g[[1, 3]] - means[1]).square().sum()) / 4
        assert found.sigma_within == pytest.approx(math.sqrt(within))
        assert found.sigma_between == pytest.approx(math.sqrt((means - g.mean(dim=0)).square().sum() / 2))
        assert found.sigma_g == pytest.approx(math.sqrt((g - g.mean(dim=0)).square().sum() / 4))
        assert found.zeta == pytest.approx((g - g.mean(dim=0)).square().sum(dim=1).tolist())
        assert found.sigma_l == 0.0
        assert found.gradient_scale == pytest.approx(math.sqrt(g.square().sum() / 4))
        assert found.d == 3


def test_a_report_of_each_family_with_estimated_constants_knows_every_value() -> None:
    task = hansa.training.quadratic(torch.eye(3).expand(8, 3, 3), torch.arange(24.0).view(8, 3) / 24)
    adaptive = hansa.theory(hansa.presets.fedams(steps=4, participation=0.5), task, rounds=50, estimate=True)
    assert [each.name for each in adaptive.results] == ["[CAMS] Corollary 4.11", "[CAMS] Theorem 4.9"]
    sent = hansa.theory(hansa.presets.fedcams(steps=4, participation=1.0), task, rounds=50, estimate=True)
    assert [each.name for each in sent.results] == ["[CAMS] Corollary 4.20", "[CAMS] Theorem 4.18"]
    ha_fed = hansa.presets.ha_fed(clusters=2, reporters=2, steps=4, topology=[ring(), complete()])
    clustered = hansa.theory(ha_fed, task, rounds=50, estimate=True)
    assert clustered.setting.cluster_rho == pytest.approx((1 / 3, 0.0))
    assert clustered.setting.rho_max == pytest.approx(1 / 3)
    assert clustered["Corollary 5.11"].conditions["K = 2 < n = 4"] is True
    resampled = hansa.theory(hansa.presets.afga(participation=0.25, steps=4), task, rounds=50, estimate=True)
    assert resampled["Theorem 4.6"].orders["rate"][0] == "O(1/sqrt(R I M))"
    measured = {"chi_square": 9.0, "surrogate_diversity": 3.0}
    aware = hansa.theory(hansa.presets.fedaware(steps=4), task, rounds=50, estimate=True, measured=measured)
    assert aware["Theorem 4.2"].values["factor of sigma_g^2"] == pytest.approx(2 * (9 - 8))
    for report in (adaptive, sent, clustered, resampled, aware):
        assert report.estimated
        for result in report.results:
            assert result.needs == ()
            assert not any(math.isnan(value) for value in result.values.values())
        json.dumps(report.record(), allow_nan=False)


def test_unequal_steps_come_from_the_clients_data() -> None:
    data = hansa.data.from_arrays(torch.randn(12, 2), torch.zeros(12), clients=[list(range(8)), list(range(8, 12))])
    task = hansa.Task(lambda: nn.Linear(2, 1), lambda out, y: ((out[:, 0] - y) ** 2).mean(), data)
    report = hansa.theory(hansa.presets.fedaware(epochs=2, batch_size=2, local_lr=0.1), task)
    assert report.setting.steps == (8, 4)
    values = report["Corollary 3.2"].values
    assert (values["K~"], values["K_min"]) == (6.0, 4)
    assert report["Corollary 3.2"].conditions == {"eta_l = 0.1 <= 1/max K_i = 0.125": True}


def test_what_the_theorems_do_not_cover_is_said() -> None:
    method = hansa.presets.ha_fed(steps=3, local_momentum=0.9, gossip_every=2, active=0.5, robust=clipped(1.0))
    said = " ".join(hansa.theory(method, clients=32).setting.deviations)
    for word in ("momentum", "gossip_every=2", "bernoulli", "clipped"):
        assert word in said
    assert hansa.theory(hansa.presets.ha_fed(steps=3), clients=32).setting.deviations == ()
    assert hansa.theory(hansa.presets.fedams(steps=3), clients=32).setting.deviations == ()
    two_way = hansa.presets.fedcams(steps=3, two_way=True)
    assert "uncompressed broadcast" in " ".join(hansa.theory(two_way, clients=32).setting.deviations)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"algorithm": hansa.presets.fedavg(steps=2), "clients": 4}, "no theorem covers it"),
        ({"algorithm": hansa.presets.fedams(steps=2)}, "expected one of the two"),
        ({"algorithm": hansa.presets.fedams(steps=2), "clients": 4, "estimate": True}, "from a task"),
        ({"algorithm": hansa.presets.fedams(steps=2), "clients": 4, "constants": {"sigma": 1.0}}, "not a constant"),
        ({"algorithm": hansa.presets.fedams(steps=2), "clients": 4, "constants": {"L": -1.0}}, "at least 0"),
        ({"algorithm": hansa.presets.fedams(steps=2), "clients": 0}, "clients"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HansaError, match=words):
        hansa.theory(**arguments)


called = partial(run_command, "theory")


def test_the_command_reads_files_presets_and_runs_and_estimates(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{SMALL}algorithm: fedcams\n")
    plain = called(str(tmp_path / "run.yaml"))
    assert plain.exit_code == 0, plain.output
    assert "[CAMS] Corollary 4.20" in plain.output
    assert "T = 3 >= K m = 12: does not hold" in plain.output
    estimated = json.loads(called(str(tmp_path / "run.yaml"), "--estimate", "--json").output)
    assert estimated["estimated"] is True
    assert estimated["setting"]["clients"] == 6
    assert estimated["constants"]["d"] == 610
    assert estimated["theorems"][1]["values"]["bound"] > 0
    given = called("fedams", "--set", "local.steps=5", "--constant", "L=10", "--constant", "G=2", "--json")
    bound = json.loads(given.output)["theorems"][1]
    assert bound["values"]["largest eta_l"] > 0
    assert (bound["values"]["bound"], bound["needs"]) == (None, ["sigma_l", "sigma_g", "gap", "d"])
    own = called("ha_fed", "--clients", "30", "--set", "gossip.clusters=3", "--set", "gossip.topology=complete")
    assert "rho_max = 0 <= 1/(2 sqrt(n - m)) = 0.1768: holds" in own.output


def test_a_run_adds_what_it_measured(tmp_path: Path) -> None:
    task = hansa.training.quadratic(torch.eye(3).expand(4, 3, 3), torch.arange(12.0).view(4, 3))
    from hansa.runs.folder import RunFolder

    method = hansa.presets.fedcams(steps=2)
    hansa.run(method, task, rounds=3, out=tmp_path / "run", measures=[hansa.measures.compression], workers=1)
    history = RunFolder(tmp_path / "run").history
    measured = recorded_values(history)
    assert measured["q"] == max(record["q"] for record in history)
    assert measured["gamma"] == max(record["gamma"] for record in history)
    refused = called(str(tmp_path / "run"))
    assert refused.exit_code == 2
    assert "started in Python" in refused.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fedams", "--constant", "L"], "expected NAME=VALUE"),
        (["fedams", "--constant", "L=x"], "expected NAME=VALUE"),
        (["fedams", "--set", "data.name=femnist"], "--clients"),
        (["fedavg"], "no theorem covers"),
        ([], "expected a configuration file"),
    ],
)
def test_bad_commands_end_with_a_remedy(arguments: list[str], words: str) -> None:
    result = called(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
