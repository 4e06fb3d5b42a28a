"""Three real sites over Flower, one slowed tenfold: asynchronous steps do not wait for it, also when the server and a
site are killed, and `hansa replay` gives the same bits."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from e2e.real_sites import Process, history, rounds, until

sys.path.append(os.path.dirname(__file__))  # where flower_slow is, which the configuration names

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("flwr") is None or os.environ.get("HANSA_E2E") != "1", reason="exercised by make e2e"
    ),
]

TEXT = """
name: live
data: {factory: flower_slow:data}
model: {factory: flower_slow:Net}
local: {steps: 5, batch_size: 4}
sample: {participation: 1.0}
checkpoint: {every: 1}
evaluate: {every: 0}
engine: {kind: flower, sites: {north: 1, south: 1, west: 1}, deadline: 600}
"""
POLICY = "factories: ['flower_slow:data', 'flower_slow:Net']\nrounds: 100\nmessage: 200000000\nmin_rows: 1\n"
SITES = {"north": "0.2", "south": "0.2", "west": "2.0"}
"""The sites, and the seconds of a step."""


class Trial:
    """A server and three sites as processes of their own."""

    def __init__(self, folder: Path, *words: str) -> None:
        from hansa.federation import certificates
        from hansa.federation.flower import free_port

        self.folder, self.port, self.run = folder, free_port(), folder / "run"
        self.sets = [word for pair in words for word in ("--set", pair)]
        certificates.make_keys(folder / "keys", list(SITES))
        (folder / "config.yaml").write_text(TEXT)
        (folder / "policy.yaml").write_text(POLICY)
        self.living = {"server": self.serve(), **{site: self.join(site) for site in SITES}}

    def serve(self) -> Process:
        keys = ["--keys", str(self.folder / "keys" / "server"), "--port", str(self.port)]
        return Process(self.folder, "server", "serve", "config.yaml", *keys, *self.sets, "-o", "run", "--resume")

    def join(self, site: str) -> Process:
        os.environ["SLOW_SECONDS"] = SITES[site]
        rules = ["--policy", "policy.yaml", "--folder", str(self.folder / "sites" / site), "--data", "config"]
        keys = ["--keys", str(self.folder / "keys" / site)]
        process = Process(self.folder, site, "join", f"127.0.0.1:{self.port}", "--site", site, *rules, *keys)
        del os.environ["SLOW_SECONDS"]
        return process

    def wait(self, steps: int, seconds: float = 900.0) -> None:
        until(lambda: rounds(self.run) >= steps, seconds, *self.living.values())

    def finish(self, seconds: float = 900.0) -> None:
        server = self.living["server"]
        until(lambda: server.process.poll() is not None, seconds, *self.living.values())
        assert server.process.returncode == 0, server.told

    def stop(self) -> None:
        for process in self.living.values():
            process.stop()


def test_killed_sites_and_servers_leave_a_run_that_replays_to_the_bit(tmp_path):
    trial = Trial(tmp_path, "algorithm={preset: fedbuff}", "pace={size: 1}", "rounds=12", "compress.compressor=sign")
    try:
        trial.wait(3)
        trial.living["north"].kill()
        trial.living["north"] = trial.join("north")
        trial.wait(6)
        trial.living["server"].kill()
        trial.living["server"] = trial.serve()
        trial.finish()
    finally:
        trial.stop()
    records = history(trial.run)
    assert [record["round"] for record in records] == list(range(1, 13))
    arrived = [client for record in records for client, *_ in record["arrivals"]]
    assert arrived.count(2) < arrived.count(0) + arrived.count(1)
    replayed = Process(tmp_path, "replay", "replay", str(trial.run))
    until(lambda: replayed.process.poll() is not None, 300, replayed)
    assert "equal to the bit" in replayed.told, replayed.told
