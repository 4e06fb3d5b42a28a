"""What the terminal shows of a topology: numbers by hand, and pictures that hold every client and edge."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from hansa import gossip
from hansa.core.errors import HansaError

SVG = "{http://www.w3.org/2000/svg}"


def shown(found: gossip.Description, width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        Console(file=file, width=width).print(found)
        file.flush()
        return raw.getvalue().decode(encoding)


def test_numbers_of_the_papers_setting() -> None:
    found = gossip.describe(gossip.ring(), 32, 4, participation=0.25, dim=29_000, steps=48, rounds=300)
    assert found.sizes == (8, 8, 8, 8)
    assert found.corollary.reporters == (2, 2, 2, 2)
    assert (found.edges, found.messages, found.step_bytes) == (32, 64, 64 * 29_000 * 4)
    assert json.loads(json.dumps(found.record())) == {
        "topology": "ring()",
        "clients": 32,
        "clusters": 4,
        "cluster_sizes": [8, 8, 8, 8],
        "reporters": [2, 2, 2, 2],
        "rho": {"8": pytest.approx(0.8047, abs=1e-4)},
        "cluster_rho": [pytest.approx(0.8047, abs=1e-4)] * 4,
        "rho_max": pytest.approx(0.8047, abs=1e-4),
        "edges": 32,
        "messages_per_step": 64,
        "bytes_per_step": 7_424_000,
        "drift": pytest.approx(5.1213, abs=1e-3),
        "useful_steps": pytest.approx(5.1213, abs=1e-3),
        "corollary_5_11": {
            "holds": False,
            "bound": pytest.approx(0.2041, abs=1e-4),
            "dense_enough": False,
            "few_enough": True,
            "changes": ["8 reporters a cluster instead of 2", "complete() instead of ring(): rho 0.000"],
            "orders": {
                "rounds": "T > tau M",
                "server_lr": "Theta(sqrt(tau M))",
                "local_lr": "Theta(1/sqrt(T tau))",
                "rate": "O(1/sqrt(T tau M))",
                "least_rounds": 48 * 8 + 1,
                "server_scale": pytest.approx((48 * 8) ** 0.5),
                "local_scale": pytest.approx(1 / 120),
                "rate_scale": pytest.approx(1 / (300 * 48 * 8) ** 0.5),
                "enough_rounds": False,
            },
        },
        "afga": {
            "theorem": "Theorem D.3",
            "holds": False,
            "bound": 0.2,
            "orders": {
                "rounds": "R >= I M",
                "server_lr": "Theta(n sqrt(I/m))",
                "local_lr": "Theta(1/sqrt(R I^2))",
                "rate": "O(1/sqrt(R I m))",
                "least_rounds": 48 * 8,
                "server_scale": pytest.approx(8 * 24**0.5),
                "local_scale": pytest.approx(1 / (300**0.5 * 48)),
                "rate_scale": pytest.approx(1 / (300 * 48 * 2) ** 0.5),
                "enough_rounds": False,
            },
        },
    }


def test_the_terminal_says_all_of_it() -> None:
    page = shown(gossip.describe(gossip.ring(), 32, 4, participation=0.25, dim=29_000))
    for words in (
        "32 in 4 clusters of 8",
        "rho_max              0.805",
        "7,424,000 (29,000 numbers of 4 bytes)",
        "does not hold",
        "rho_max = 0.805 > 1/(2 sqrt(n - m)) = 0.204",
        "K = 4 < n = 8",
        "it would with        8 reporters a cluster instead of 2",
        "or with              complete() instead of ring(): rho 0.000",
        "ring() over 8 clients (one cluster)",
    ):
        assert words in page


def test_the_terminal_says_what_the_theorems_ask_of_rounds_and_rates() -> None:
    plain = shown(gossip.describe(gossip.ring(), 32, 4, participation=0.25))
    for words in ("rounds             T > tau M\n", "Theta(sqrt(tau M))\n", "1/(1 - rho) = 5.1", "m/(m + n) = 0.200"):
        assert words in re.sub(r" +\n", "\n", plain)
    known = shown(gossip.describe(gossip.ring(), 50, participation=0.1, steps=24, rounds=500))
    for words in (
        "T > tau M: 121 or more; 500 are enough",
        "Theta(sqrt(tau M)), with 11 inside",
        "Theta(1/sqrt(T tau)), with 0.00913 inside",
        "O(1/sqrt(T tau M)), with 0.00408 inside",
        "AFGA Theorem 4.6     does not hold",
        "rho = 0.995 > M/(M + N) = 0.091",
        "R >= I M: 120 or more; 500 are enough",
        "Theta(N sqrt(I/M)), with 110 inside",
        "Theta(1/sqrt(R I^2)), with 0.00186 inside",
        "min{1/(1 - rho), tau} = min{190.2, 24} = 24.0",
    ):
        assert words in known, words


def test_unequal_clusters_and_full_reporting_are_said() -> None:
    page = shown(gossip.describe(gossip.ring(), 20, [list(range(8)), list(range(8, 20))]))
    assert "20 in 2 clusters of 8 to 12" in page
    assert "reporters a cluster  8 to 12" in page
    assert "0.805 (n = 8), 0.911 (n = 12)" in page
    assert "m = n: rho_max is free" in page
    assert re.search(r"Corollary 5.11 +holds", page)
    assert gossip.describe(gossip.ring(), 8).record()["corollary_5_11"]["bound"] is None


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    page = shown(gossip.describe(gossip.ring(), 5, reporters=1), encoding="ascii")
    assert "##..#\n###..\n.###.\n..###\n#..##" in "\n".join(line.rstrip() for line in page.splitlines())


def test_narrow_terminals_are_not_overrun() -> None:
    for width in (20, 40, 80):
        assert all(
            len(line) <= width for line in shown(gossip.describe(gossip.star(), 30, reporters=3), width).splitlines()
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"clients": 8, "reporters": 2, "participation": 0.5}, "reporters=2, participation=0.5.*one of the two"),
        ({"clients": 8, "clusters": 2, "reporters": 5}, r"reporters=5\): expected at most the 4"),
        ({"clients": 8, "participation": 1.5}, "reporters=1.5"),
        ({"clients": 8, "dim": 0}, r"describe\(dim=0\)"),
        ({"clients": 8, "steps": 0}, r"describe\(steps=0\)"),
        ({"clients": 8, "rounds": 0}, r"describe\(rounds=0\)"),
        ({"clients": 0}, "population=0"),
        ({"clients": 8, "clusters": gossip.by_labels(2)}, "needs the label counts"),
    ],
)
def test_bad_questions_are_refused(call: dict[str, object], message: str) -> None:
    with pytest.raises(HansaError, match=message):
        gossip.describe(gossip.ring(), **call)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 5, 12, 40])
def test_the_circle_shows_every_client_once(n: int) -> None:
    picture = gossip.text(gossip.ring()(n), width=60)
    assert sorted(map(int, re.findall(r"\d+", picture))) == list(range(n))
    assert all(len(line) <= 60 for line in picture.splitlines())


def test_lines_join_exactly_the_clients_that_talk() -> None:
    def dots(picture: str) -> int:
        return sum(bin(ord(c) - 0x2800).count("1") for c in picture if 0x2800 <= ord(c) <= 0x28FF)

    sizes = [
        dots(gossip.text(gossip.edges(pairs)(4)))
        for pairs in ([(0, 2), (1, 3), (0, 1)], [(0, 2), (1, 3), (0, 1), (2, 3)])
    ]
    assert 0 < sizes[0] < sizes[1]
    assert dots(gossip.text(gossip.isolated()(4))) == 0
    # of four clients, 3 stands left and 1 right at one height: an unbroken line when they talk, a gap when they do not
    for pairs, unbroken in (([(1, 3), (0, 1), (1, 2)], True), ([(0, 1), (1, 2), (2, 3)], False)):
        picture = gossip.text(gossip.edges(pairs)(4))
        between = next(line for line in picture.splitlines() if "3" in line)
        assert (" " not in between[between.index("3") : between.index("1")]) == unbroken


def test_many_clients_are_shown_as_the_pattern_of_the_matrix() -> None:
    picture = gossip.text(gossip.ring()(100), width=50).splitlines()
    assert len(picture) == 25
    assert picture[0][0] not in " \u2800"
    assert len(gossip.text(gossip.ring().sparse(5000), width=40).splitlines()) == 20
    assert gossip.text(gossip.ring()(4), ascii_only=True) == "##.#\n###.\n.###\n#.##"


@pytest.mark.parametrize(
    ("topology", "n"), [(gossip.ring(), 1), (gossip.ring(), 8), (gossip.star(), 33), (gossip.complete(), 12)]
)
def test_svg_has_one_circle_a_client_and_one_line_an_edge(topology: gossip.Topology, n: int) -> None:
    W = topology(n)
    root = ET.fromstring(gossip.svg(W, size=200))
    assert root.findtext(f"{SVG}title") == f"gossip graph of {n} clients"
    assert len(root.findall(f".//{SVG}circle")) == n
    assert len(root.findall(f".//{SVG}line")) == gossip.edge_count(W)
    assert [label.text for label in root.iter(f"{SVG}text")] == [str(client) for client in range(n)]
    for circle in root.iter(f"{SVG}circle"):
        for axis in ("cx", "cy"):
            assert float(circle.get("r", 0)) <= float(circle.get(axis, 0)) <= 200 - float(circle.get("r", 0))


def test_a_large_svg_is_the_pattern_of_the_matrix() -> None:
    root = ET.fromstring(gossip.svg(gossip.ring().sparse(128)))
    assert len(root.findall(f".//{SVG}rect")) == 3 * 128
    assert len(gossip.svg(gossip.complete().sparse(500))) < 2_000_000


@pytest.mark.parametrize(
    ("draw", "message"),
    [(lambda: gossip.text([[1.0]], width=3), "width=3"), (lambda: gossip.svg([[1.0]], size=1), "size=1")],
)
def test_pictures_too_small_are_refused(draw: object, message: str) -> None:
    with pytest.raises(HansaError, match=message):
        draw()  # type: ignore[operator]
