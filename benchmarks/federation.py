"""What Flower costs a federation: seconds a round without any work, and bytes on the wire beside those that are sent.

    sudo python benchmarks/federation.py

Server and sites are put into two networks of their own, with a virtual cable between them whose counters the operating
system keeps; three SuperNodes answer each message with as many bytes. Linux, and root for the cable.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hansa.sites import certificates
from hansa.sites.certificates import ServerKeys, SiteKeys
from hansa.sites.superlink import SuperLink
from hansa.sites.supernode import SuperNode

SITES = ("north", "east", "south")
SERVER, OTHER = "10.77.0.1", "10.77.0.2"
PORT, LIMIT = 9443, 1 << 30
SIZES = {"1 kB": 1_000, "100 kB": 100_000, "1 MB": 1_000_000, "10 MB": 10_000_000}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def at_the_sites(keys: Path) -> None:
    """The other end of the cable: three nodes that send back what they got, until nobody listens any more."""
    ip("link", "set", "lo", "up")
    while "cable1:" not in Path("/proc/net/dev").read_text():
        time.sleep(0.1)
    ip("addr", "add", f"{OTHER}/24", "dev", "cable1")
    ip("link", "set", "cable1", "up")
    nodes = [SuperNode(site, f"{SERVER}:{PORT}", SiteKeys(keys / site), bytes, limit=LIMIT) for site in SITES]
    sys.stdin.read()
    for node in nodes:
        node.close()


HEADERS = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps: of every segment that the system counts


def counters() -> tuple[int, int, int, int]:
    """Bytes that went down to the sites, and came up, with all headers; then the segments."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if "cable0:" in line)
    numbers = line.partition(":")[2].split()
    return int(numbers[8]), int(numbers[0]), int(numbers[9]), int(numbers[1])


def one_round(link: SuperLink, size: int, ticket: int) -> float:
    began = time.perf_counter()
    for place, site in enumerate(SITES):
        link.send(site, ticket + place, os.urandom(size), 120.0)
    waiting = set(SITES)
    while waiting:
        for arrival in link.receive(1.0):
            assert not arrival.error, arrival.error
            assert len(arrival.data) == size
            waiting.discard(arrival.site)
    return time.perf_counter() - began


def at_the_server(rounds: int, folder: Path) -> None:
    ip("link", "set", "lo", "up")
    certificates.make(folder / "keys", SITES, (SERVER,))
    cable(folder)
    link = SuperLink(SITES, ServerKeys(folder / "keys" / "server"), host=SERVER, port=PORT)
    try:
        while link.online() < set(SITES):
            link.receive(0.5)
        print(
            f"{len(SITES)} sites, TLS, {rounds} rounds a size, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        print(
            f"{'message':>8} {'median s':>9} {'least':>6} {'most':>6} {'down, wire/sent':>16} {'up, wire/sent':>14} "
            "without headers of segments"
        )
        ticket = 1
        for name, size in SIZES.items():
            before = counters()
            took = []
            for _ in range(rounds):
                took.append(one_round(link, size, ticket))
                ticket += len(SITES)
            down, up, *segments = (now - then for now, then in zip(counters(), before, strict=True))
            bare = [(wire - HEADERS * count) for wire, count in zip((down, up), segments, strict=True)]
            sent = rounds * len(SITES) * size
            print(
                f"{name:>8} {statistics.median(took):9.2f} {min(took):6.2f} {max(took):6.2f} {down / sent:16.4f} "
                f"{up / sent:14.4f} {bare[0] / sent:8.4f} {bare[1] / sent:8.4f}",
                flush=True,
            )
    finally:
        link.close()


_others: list[subprocess.Popen[bytes]] = []


def cable(folder: Path) -> None:
    """The sites in a network of their own, and the cable to it."""
    command = ["unshare", "-n", sys.executable, __file__, "--sites", str(folder / "keys")]
    _others.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    time.sleep(1.0)  # until it is in its own network
    ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
    ip("link", "set", "cable1", "netns", str(_others[0].pid))
    ip("addr", "add", f"{SERVER}/24", "dev", "cable0")
    ip("link", "set", "cable0", "up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each size")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sites", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.sites is not None:
        at_the_sites(asked.sites)
    elif not asked.inside:
        os.execvp("unshare", ["unshare", "-n", sys.executable, __file__, "--inside", "--rounds", str(asked.rounds)])
    else:
        with tempfile.TemporaryDirectory() as folder:
            try:
                at_the_server(asked.rounds, Path(folder))
            finally:
                for other in _others:
                    other.communicate(timeout=60)


if __name__ == "__main__":
    main()
