"""What 10^6 and 10^7 clients cost each family of methods: bytes from the code's own packets, time from measured passes.

    python benchmarks/studies/internet_scale.py --measure    the server's passes, into docs/results/passes.json
    python benchmarks/studies/internet_scale.py --write      the tables of docs/internet-scale.md, anew

A thousandth of the clients takes part in a round. Bytes are those of the packets that would travel, as the ledger
counts them; `tests/study/test_internet_scale.py` holds them against the ledgers of small runs, and the page's tables
against this file.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import hansa
from hansa import compress, server
from hansa.core.types import Population, RoundContext
from hansa.core.vectors import arithmetic
from hansa.gossip import messages, ring
from hansa.runs.store.base import BLOCK

ROOT = Path(__file__).parents[2]
PAGE, PASSES, MILLION = (
    ROOT / "docs" / name for name in ("internet-scale.md", "results/passes.json", "results/million.json")
)
PARAMETERS = 1_000_000
POPULATIONS = (10**6, 10**7)
SHARE = 1000  # of so many clients one takes part
CLUSTER, STEPS = 1000, 10  # of HA-Fed and CAFGA: clients of a cluster, local steps a round
LINE = 1.25e9  # bytes a second: 10 Gbit/s
DISK = 2e9  # bytes a second that rows are streamed at


@dataclass(frozen=True)
class Family:
    """A family's costs in vectors and bytes, d being the parameters.

    ``up`` and ``down`` are the bytes of a participant and round, ``peer`` those that a client sends to its neighbours;
    ``server`` counts vectors of d numbers at the server, ``kept`` those that every client (or its site, or in a
    simulation the run's store) keeps; ``rows`` those that the server itself keeps of every client. ``passes`` names the
    measured passes over d numbers that the server makes of each upload.
    """

    name: str
    preset: str
    up: Callable[[int], int]
    down: Callable[[int], int]
    server: int
    kept: int = 0
    rows: int = 0
    peer: Callable[[int], int] = lambda d: 0
    passes: str = "dense"


@cache
def packet_bytes(compressor: compress.Compressor | None, parameters: int) -> int:
    """The bytes of one packet; None is a vector as it is."""
    x = torch.zeros(parameters)
    packet = (
        compress.direct().send(x, {}, hansa.Key(0))[0] if compressor is None else compressor.encode(x, hansa.Key(0))
    )
    return packet.nbytes


def dense(d: int) -> int:
    """A whole vector of float32."""
    return packet_bytes(None, d)


def signs(d: int) -> int:
    """A scale and a bit an entry."""
    return packet_bytes(compress.sign(), d)


def ring_bytes(d: int) -> int:
    """What travels between clients of HA-Fed in a round, of each of them: its model to two neighbours after each step,
    and the server's, which reporters pass on."""
    return (STEPS * messages(ring().sparse(CLUSTER)) // CLUSTER + 1) * dense(d)


def rejoined(d: int, missed: int = SHARE) -> int:
    """What two-way FedCAMS sends a client that missed so many rounds: the increments, or the whole where that is less.

    >>> rejoined(1_000_000, 10) == 10 * signs(1_000_000), rejoined(1_000_000) == dense(1_000_000)
    (True, True)
    """
    return min(missed * signs(d), dense(d))


FAMILIES = (
    Family("FedAvg", "fedavg", dense, dense, 1),
    Family("FedAMS", "fedams", dense, dense, 4),
    Family("FedCAMS, one way", "fedcams", signs, dense, 4, kept=1, passes="sign"),
    Family("FedCAMS, both ways", "fedcams", signs, rejoined, 6, kept=1, passes="sign"),
    Family("SCAFFOLD", "scaffold", lambda d: 2 * dense(d), lambda d: 2 * dense(d), 2, kept=1, passes="twice"),
    Family("FedDyn", "feddyn", dense, dense, 2, kept=1),
    Family("HA-Fed, CAFGA", "ha_fed", dense, dense, 4, peer=ring_bytes),
    Family("FedAWARE", "fedaware", dense, dense, 1, rows=1),
)


def measure(dim: int = PARAMETERS, turns: int = 15) -> dict[str, float]:
    """Nanoseconds of processor time a parameter: of an upload's admission and fold, of a server step, of a row's
    products with twenty others; medians of interleaved turns on one thread."""
    torch.set_num_threads(1)
    key = hansa.Key(0)
    x = torch.from_numpy(key.child("x").numpy().standard_normal(dim, dtype="float32"))
    rows, total, packet = [x.roll(i) for i in range(8)], torch.zeros_like(x), compress.sign().encode(x, key)
    part, many, block = server.ams(), torch.stack([x.roll(i) for i in range(20)]), torch.stack([x] * BLOCK)
    state, context = part.init(x), RoundContext(0, Population((1,)), (0,))
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: [arithmetic.norm(row) for row in rows] + [arithmetic.weighted_sum(rows, [0.125] * 8)],
        "sign": lambda: [arithmetic.norm(compress.decode(packet)), compress.accumulate(packet, total, 0.1)],
        "step": lambda: part.update(x, state, context),
        "products": lambda: arithmetic.inner_products(block, many),
    }
    share = {"dense": 1 / len(rows), "products": 1 / BLOCK}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:
                taken[name].append((time.process_time() - began) * share.get(name, 1.0))
    found = {name: 1e9 * statistics.median(each) / dim for name, each in taken.items()}
    return {**found, "twice": 2 * found["dense"]}


def amount(size: float) -> str:
    """Bytes in words.

    >>> amount(4_000_024), amount(8e9), amount(8e12)
    ('4.0 MB', '8.0 GB', '8.0 TB')
    """
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}" if size < 100 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} B" if size else "–"


def span(seconds: float) -> str:
    """Seconds in words."""
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.2g} s"


def law_table(d: int = PARAMETERS) -> list[str]:
    """What each family costs a participant, and everybody."""
    lines = ["| | up | down | to neighbours | server's vectors | kept by each client | rows at the server |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for each in FAMILIES:
        cells = [each.up(d), each.down(d), each.peer(d), 4 * d * each.server, 4 * d * each.kept, 4 * d * each.rows]
        lines.append(f"| {each.name} | {' | '.join(map(amount, cells))} |")
    return lines


def scale_table(clients: int, passes: dict[str, float], d: int = PARAMETERS) -> list[str]:
    """What a round costs a population."""
    lines = [
        f"| {clients:,} clients, {clients // SHARE:,} a round | through the server's line | at 10 Gbit/s | "
        "server's memory | kept by all clients | server's disk | server's processor |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    asked = clients // SHARE
    for each in FAMILIES:
        line = asked * (each.up(d) + each.down(d))
        memory = 4.0 * d * each.server + (8.0 * clients**2 if each.rows else 0)
        work = 1e-9 * d * (asked * passes[each.passes] + passes["step"])
        if each.rows:
            work += 1e-9 * d * clients * passes["products"] * asked / 20
        cells = [amount(line), span(line / LINE), amount(memory), amount(4.0 * d * each.kept * clients),
                 amount(4.0 * d * each.rows * clients), span(work)]  # fmt: skip
        lines.append(f"| {each.name} | {' | '.join(cells)} |")
    return lines


def aware_table(passes: dict[str, float], d: int = PARAMETERS) -> list[str]:
    """How far FedAWARE's table of all clients goes, with twenty participants a round."""
    lines = ["| clients seen | rows on disk | as bfloat16 | Gram matrix | streaming the rows | their products |",
             "|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for clients in (100, 2000, 10**4, 10**5, 10**6):
        rows = 4.0 * d * clients
        cells = [amount(rows), amount(rows / 2), amount(8.0 * clients**2), span(rows / DISK),
                 span(1e-9 * d * clients * passes["products"])]  # fmt: skip
        lines.append(f"| {clients:,} | {' | '.join(cells)} |")
    return lines


def rejoin_table(d: int = PARAMETERS) -> list[str]:
    """What two-way FedCAMS sends down by sign to a client that comes every so many rounds."""
    lines = ["| a client comes every | down, both ways | down, one way |", "|---:|---:|---:|"]
    for gap in (1, 10, 31, 32, 100, 1000):
        lines.append(f"| {gap} rounds | {amount(rejoined(d, gap))} | {amount(dense(d))} |")
    return lines


def million_table() -> list[str]:
    """The simulated populations."""
    told = json.loads(MILLION.read_text())
    lines = ["| clients | building them | their memory | a round | whole process | the run's folder |",
             "|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in told["rows"]:
        lines.append(
            f"| {int(row['clients']):,} | {row['build_seconds']:.2f} s | {row['build_megabytes']:.0f} MB | "
            f"{row['milliseconds_a_round']:.0f} ms | {row['peak_megabytes']:.0f} MB | "
            f"{row['folder_megabytes']:.1f} MB |"
        )
    return lines


def tables() -> dict[str, list[str]]:
    """All tables of the page by name."""
    passes = json.loads(PASSES.read_text())
    return {
        "law": law_table(),
        **{f"scale-{clients}": scale_table(clients, passes) for clients in POPULATIONS},
        "rejoin": rejoin_table(),
        "aware": aware_table(passes),
        "million": million_table(),
    }


def written(text: str) -> str:
    """The page with its tables made anew."""
    for name, lines in tables().items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"the page has no table {name}"
        text = pattern.sub(lambda found, lines=lines: found[1] + "\n".join(["", *lines, "", found[2]]), text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.measure:
        PASSES.write_text(json.dumps({name: round(value, 3) for name, value in measure().items()}, indent=1) + "\n")
        return
    if asked.write:
        PAGE.write_text(written(PAGE.read_text()))
    print("\n\n".join("\n".join([name, *lines]) for name, lines in tables().items()))


if __name__ == "__main__":
    main()
