"""Where the seconds of an exchange between server and sites go, without work: python benchmarks/federation_rounds.py

Server and sites run on this machine, first without TLS, then with TLS and keys. Every site answers each message at once
with as many bytes. It prints the median of each part, and the processor seconds of Flower's programs for an exchange,
which depend little on what else the machine does; those of the tasks that a site's relay forks are not among them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from hansa.federation import certificates
from hansa.federation.certificates import ServerKeys, SiteKeys
from hansa.federation.flower_processes import running_processes
from hansa.federation.superlink import SuperLink
from hansa.federation.supernode import SuperNode
from hansa.federation.transport import Reply, SiteSeconds

SIZE, LIMIT = 1000, 1 << 30
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(homes: list[Path]) -> float:
    """Of all programs of Flower, and of the tasks that they have waited for."""
    total = 0
    for home in homes:
        for process in running_processes(home):
            try:
                numbers = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += sum(map(int, numbers[11:15]))
    return total / TICKS


def exchange(link: SuperLink, sites: tuple[str, ...], ticket: int) -> list[tuple[float, Reply]]:
    """Send each site a message; return the replies with the seconds until each came."""
    began, replies = time.perf_counter(), []
    for place, site in enumerate(sites):
        link.send(site, ticket + place, os.urandom(SIZE), 120.0)
    while len(replies) < len(sites):
        for reply in link.receive(1.0):
            assert not reply.error, reply.error
            replies.append((time.perf_counter() - began, reply))
    return replies


def measure(folder: Path, sites: tuple[str, ...], rounds: int, secure: bool) -> None:
    if secure:
        certificates.make_keys(folder / "keys", sites, ("127.0.0.1",))
    link = SuperLink(sites, ServerKeys(folder / "keys" / "server") if secure else None)
    nodes = []
    try:
        for site in sites:
            keys = SiteKeys(folder / "keys" / site) if secure else None
            nodes.append(SuperNode(site, link.address, keys, bytes, limit=LIMIT))
        while link.online() < set(sites):
            link.receive(0.5)
        exchange(link, sites, 1)
        homes = [part._home / "flwr" for part in (link, *nodes)]
        before, slowest = processor_seconds(homes), []
        for number in range(1, rounds + 1):
            seconds, reply = max(exchange(link, sites, 1 + number * len(sites)), key=lambda each: each[0])
            slowest.append(SiteSeconds().add(seconds, reply.start_seconds, reply.work_seconds))
        cost = (processor_seconds(homes) - before) / rounds / len(sites)
        parts = [statistics.median(getattr(each, name) for each in slowest) for name in NAMES]
        print(f"{'TLS and keys' if secure else 'no TLS':<14}", *(f"{part:10.2f}" for part in parts), f"{cost:12.2f}")
    finally:
        for node in nodes:
            node.close()
        link.close()


NAMES = ("seconds", "start_seconds", "transport_seconds", "work_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sites", type=int, default=2)
    options = parser.parse_args()
    sites = tuple(f"site{number}" for number in range(options.sites))
    print(f"{options.sites} sites, {options.rounds} exchanges of {SIZE} bytes, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<14}", *(f"{name:>10}" for name in ("seconds", "start", "transport", "answer")), "CPU of a site")
    for secure in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), sites, options.rounds, secure)


if __name__ == "__main__":
    main()
