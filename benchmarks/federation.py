"""The overhead of Flower in a federation: seconds per round without work, and bytes on the wire against bytes sent.

    sudo python benchmarks/federation.py

Server and sites run in two network namespaces, joined by a virtual cable whose bytes the operating system counts. Three
SuperNodes answer each message with as many bytes. Then FedAvg with a 10 MB model runs over such a cable, and its byte
counts are compared with the system's. Requires Linux, and root for the cable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hansa.config import from_yaml
from hansa.federation import Server, certificates
from hansa.federation.certificates import ServerKeys, SiteKeys
from hansa.federation.superlink import SuperLink
from hansa.federation.supernode import SuperNode

SITES = ("north", "east", "south")
SERVER, OTHER = "10.77.0.1", "10.77.0.2"
PORT, LIMIT = 9443, 1 << 30
RATE = ("tbf", "rate", "1gbit", "burst", "1mb", "limit", "100mb")
SIZES = {"1 kB": 1_000, "100 kB": 100_000, "1 MB": 1_000_000, "10 MB": 10_000_000}
RUN = """
name: ledger
data: {name: fashion-mini, clients: 3, partition: iid}
model: {name: mlp, options: {hidden: 3145}}
algorithm: fedavg
local: {lr: 0.1, steps: 2, batch_size: 8}
evaluate: {every: 0}
checkpoint: {every: 0}
engine: {kind: flower, sites: {north: 1, east: 1, south: 1}, deadline: 240}
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def at_the_sites(keys: Path, ledger: bool) -> None:
    """The other end of the cable: three nodes that send back what they got, or train, until nobody listens any more."""
    ip("link", "set", "lo", "up")
    while "cable1:" not in Path("/proc/net/dev").read_text():
        time.sleep(0.1)
    ip("addr", "add", f"{OTHER}/24", "dev", "cable1")
    ip("link", "set", "cable1", "up")
    if ledger:
        join(keys)
        return
    nodes = [SuperNode(site, f"{SERVER}:{PORT}", SiteKeys(keys / site), bytes, limit=LIMIT) for site in SITES]
    sys.stdin.read()
    for node in nodes:
        node.close()


def join(keys: Path) -> None:
    """Sites as their owners start them, until nobody listens any more."""
    joined = []
    for site in SITES:
        command = [sys.executable, "-c", "from hansa_command import main; main()", "join", f"{SERVER}:{PORT}"]
        command += ["--site", site, "--data", "config", "--keys", str(keys / site)]
        joined.append(subprocess.Popen([*command, "--folder", str(keys.parent / site)], stdin=subprocess.DEVNULL))
    sys.stdin.read()
    for process in joined:
        process.terminate()
    for process in joined:
        process.wait(60)


HEADERS = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps: of every segment that the system counts


def counters() -> tuple[int, int, int, int, int]:
    """Bytes that went down to the sites, and came up, with all headers; the segments; and how many were sent again."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if "cable0:" in line)
    numbers = line.partition(":")[2].split()
    tcp = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
    again = int(tcp[1][tcp[0].index("RetransSegs")])
    return int(numbers[8]), int(numbers[0]), int(numbers[9]), int(numbers[1]), again


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


def at_the_server(rounds: int, folder: Path, ledger: bool) -> None:
    ip("link", "set", "lo", "up")
    certificates.make_keys(folder / "keys", SITES, (SERVER,))
    cable(folder, ledger)
    link = SuperLink(SITES, ServerKeys(folder / "keys" / "server"), host=SERVER, port=PORT)
    try:
        while link.online() < set(SITES):
            link.receive(0.5)
        (of_a_run if ledger else of_messages)(link, rounds, folder)
    finally:
        link.close()


def of_messages(link: SuperLink, rounds: int, folder: Path) -> None:
    """Seconds a round, and bytes, by the size of a message."""
    print(f"{len(SITES)} sites, TLS, {rounds} rounds a size, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'message':>8} {'median s':>9} {'least':>6} {'most':>6}   {HEAD}")
    ticket = 1
    for name, size in SIZES.items():
        before, took = counters(), []
        for _ in range(rounds):
            took.append(one_round(link, size, ticket))
            ticket += len(SITES)
        sent = rounds * len(SITES) * size
        times = f"{statistics.median(took):9.2f} {min(took):6.2f} {max(took):6.2f}"
        print(f"{name:>8} {times}   {beside(before, sent, sent)}", flush=True)


def of_a_run(link: SuperLink, rounds: int, folder: Path) -> None:
    """What a run's ledger says beside what the system counted from its first round to its last."""
    experiment = Server(from_yaml(RUN, [f"rounds={rounds}"]), link).new(folder / "run")
    before = counters()
    experiment.execute([])
    ledger = experiment.run.ledger
    down, up = (sum(site[kind] for site in ledger.sites.values()) for kind in ("down_bytes", "up_bytes"))
    print(f"a run of {rounds} rounds; ledger: {down:,} bytes of frames down, {up:,} up;")
    print(f"of them packets: {ledger.down_bytes:,} down, {ledger.up_bytes:,} up")
    print(f"{'':8} {'':9} {'':6} {'':6}   {HEAD}")
    print(f"{'ledger':>8} {'':9} {'':6} {'':6}   {beside(before, down, up)}", flush=True)


HEAD = "wire/sent: down      up   without headers of segments: down      up   segments sent again"


def beside(before: tuple[int, ...], sent_down: int, sent_up: int) -> str:
    """What the system has counted since, in parts of what was sent."""
    down, up, below, above, again = (now - then for now, then in zip(counters(), before, strict=True))
    bare = (down - HEADERS * below) / sent_down, (up - HEADERS * above) / sent_up
    return f"{down / sent_down:15.4f} {up / sent_up:7.4f} {bare[0]:34.4f} {bare[1]:7.4f} {again:21d}"


_others: list[subprocess.Popen[bytes]] = []


def cable(folder: Path, ledger: bool) -> None:
    """The sites in a network of their own, and the cable to it."""
    command = ["unshare", "-n", sys.executable, __file__, "--sites", str(folder / "keys")]
    command += ["--ledger"] if ledger else []
    _others.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    time.sleep(1.0)  # until it is in its own network
    ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
    ip("link", "set", "cable1", "netns", str(_others[0].pid))
    ip("addr", "add", f"{SERVER}/24", "dev", "cable0")
    ip("link", "set", "cable0", "up")
    if tc := shutil.which("tc"):  # a link of a gigabit with a queue: without one the cable drops what comes in bursts
        subprocess.run([tc, "qdisc", "add", "dev", "cable0", "root", *RATE], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each size")
    parser.add_argument("--ledger", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sites", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.sites is not None:
        at_the_sites(asked.sites, asked.ledger)
    elif not asked.inside:
        command = ["unshare", "-n", sys.executable, __file__, "--inside", "--rounds", str(asked.rounds)]
        for part in ([], ["--ledger"]):
            subprocess.run([*command, *part], check=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            try:
                at_the_server(asked.rounds, Path(folder), asked.ledger)
            finally:
                for other in _others:
                    other.communicate(timeout=60)


if __name__ == "__main__":
    main()
