"""Federations of real Flower processes whose processes are killed or stopped at random: `make e2e N=60 SEED=0`.

Each federation has a server and two sites, which are started again whenever they fail, as by systemd or Kubernetes;
with or without TLS, and one of several methods. At random moments, from before the first round to the last, processes
are killed (SIGKILL), or stopped (SIGSTOP) and continued after some seconds; the SuperLink also for ever. The run must
end by itself with the model, the history and the ledger of the simulation, no lost update, no process and no temporary
file left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
sys.path.append(str(HERE))

from real_sites import COMMAND, POLICY, history, rounds  # noqa: E402
from real_sites import TEXT as SHORT_DEADLINE  # noqa: E402

TEXT = SHORT_DEADLINE.replace("deadline: 240", "deadline: 600")
SITES = ("north", "south")
GROUPS = "gossip.clusters=[[0, 1, 2, 3], [4, 5, 6, 7]]"
METHODS = {
    "fedavg": ["sample.participation=0.6"],
    "two-way fedcams": ["algorithm=fedcams", "compress.two_way=true", "sample.participation=0.6"],
    "scaffold": ["algorithm=scaffold", "sample.participation=0.6"],
    "cafga": ["algorithm=cafga", GROUPS],
    "fedaware": ["algorithm=fedaware", "sample.participation=0.6"],
    "feddyn": ["algorithm=feddyn", "sample.participation=0.6"],
    "hafed": ["algorithm=ha_fed", GROUPS],
}
KINDS = {  # a word of the command line of each kind, and whose processes they are
    "server": ("serve", "server"),
    "superlink": ("flower-superlink", "server"),
    "site": ("join", "site"),
}
OWNER = "HANSA_E2E_OF"  # the variable that names the command which a process belongs to
ACTIONS = ("kill", "stop", "stop for ever")
"""A supervisor does not see a process that stands still: only the server sees its SuperLink."""
MAX_SECONDS = 1200.0
SITE_SECONDS = 30.0  # for a site to end after the server


@dataclass
class Strike:
    """Something that happens to a process: when (after that many rounds, and seconds later), to which, and what."""

    after: int
    delay: float
    kind: str
    site: str
    action: str
    seconds: float
    struck: bool = False

    def __str__(self) -> str:
        where = f" of {self.site}" if KINDS[self.kind][1] == "site" else ""
        what = f"{self.action} {self.seconds:.0f} s" if self.action == "stop" else self.action
        return f"{self.kind}{where}: {what} after round {self.after} + {self.delay:.1f} s"


@dataclass
class Outcome:
    """What became of a federation."""

    index: int
    method: str
    tls: bool
    strikes: list[Strike]
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    folder: Path | None = None


def plan(seed: int, index: int, rounds: int) -> tuple[str, bool, list[Strike]]:
    """The method, whether with TLS, and the strikes of a federation; a function of seed and number."""
    draw = random.Random(f"{seed}/{index}")
    method = list(METHODS)[index % len(METHODS)]
    kinds = list(KINDS)
    first = kinds[(index * 5 + seed) % len(kinds)]  # every kind equally often
    chosen = [first, *draw.choices(kinds, k=draw.choice((0, 1, 1, 2)))]
    strikes = [
        Strike(
            draw.randrange(rounds), draw.uniform(0.0, 4.0), kind, draw.choice(SITES),
            draw.choices(ACTIONS, (3, 1, kind == "superlink"))[0], draw.uniform(2.0, 12.0),
        )
        for kind in chosen
    ]  # fmt: skip
    return method, draw.random() < 0.5, sorted(strikes, key=lambda strike: (strike.after, strike.delay))


def processes(marker: str) -> dict[int, list[str]]:
    """The processes with this temporary directory, with their command lines."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"TMPDIR={marker}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    table[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return table


class Supervised(Thread):
    """A command that is started again until it ends with code 0, or is asked to end."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        super().__init__(daemon=True)
        self.begin, self.process, self.code = start, start(), None
        self.stopping = False
        self.start()

    def run(self) -> None:
        while (code := self.process.wait()) != 0 and not self.stopping:
            time.sleep(1.0)
            self.process = self.begin()
        self.code = code

    def end(self) -> None:
        self.stopping = True
        self.process.terminate()


class Trial:
    """One federation in its own folder and temporary directory."""

    def __init__(self, seed: int, index: int, rounds: int) -> None:
        method, tls, strikes = plan(seed, index, rounds)
        self.index, self.rounds, self.words = index, rounds, [*METHODS[method], f"seed={index}", f"rounds={rounds}"]
        self.outcome = Outcome(index, method, tls, strikes)
        self.folder = Path(tempfile.mkdtemp(prefix=f"he{index}-"))
        self.temporary = self.folder / "t"
        self.temporary.mkdir()
        self.commands: dict[str, Supervised] = {}

    def run(self) -> Outcome:
        start = time.monotonic()
        try:
            self._start()
            self._strike_all(start)
            self.commands["server"].join(max(1.0, start + MAX_SECONDS - time.monotonic()))
            if self.commands["server"].code != 0:
                self.outcome.problems.append(f"not finished after {MAX_SECONDS:.0f} s")
        except Exception as error:  # the other federations go on
            self.outcome.problems.append(f"{type(error).__name__}: {error}")
        self.outcome.seconds = time.monotonic() - start
        self._end()
        return self.outcome

    def _start(self) -> None:
        from hansa.federation.flower import free_port

        (self.folder / "config.yaml").write_text(TEXT)
        (self.folder / "policy.yaml").write_text(POLICY)
        port = free_port()
        if self.outcome.tls:
            from hansa.federation import certificates

            certificates.make_keys(self.folder / "keys", list(SITES))
        sets = [word for pair in self.words for word in ("--set", pair)]
        place = ["--port", str(port), "-o", "run", "--resume"]
        self._command("server", "serve", "config.yaml", *self._trust("server"), *place, *sets)
        for site in SITES:
            own = ["--site", site, "--data", "config", "--policy", "policy.yaml", "--folder", f"sites/{site}"]
            self._command(site, "join", f"127.0.0.1:{port}", *own, *self._trust(site))

    def _trust(self, name: str) -> list[str]:
        return ["--keys", f"keys/{name}"] if self.outcome.tls else ["--insecure"]

    def _command(self, name: str, *words: str) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(HERE)])
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": paths,
            "TMPDIR": str(self.temporary),
            OWNER: name,
        }

        def start() -> subprocess.Popen[bytes]:
            with open(self.folder / f"{name}.log", "ab") as output:
                return subprocess.Popen(
                    [*COMMAND, *words], cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=output, start_new_session=True,
                )  # fmt: skip

        self.commands[name] = Supervised(start)

    def _strike_all(self, start: float) -> None:
        """Wait for the moment of each strike. It misses if its round never comes, or its process is not there."""
        continued: list[tuple[float, int]] = []
        for strike in self.outcome.strikes:
            while rounds(self.folder / "run") < strike.after and self._running(start):
                time.sleep(0.2)
            moment = time.monotonic() + strike.delay
            while time.monotonic() < moment and self._running(start):
                time.sleep(0.1)
            patience = time.monotonic() + 60.0
            while self._running(start) and time.monotonic() < patience:
                pid = self._find(strike)
                if pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if strike.action == "kill" else signal.SIGSTOP)
                        strike.struck = True
                    if strike.action == "stop":
                        continued.append((time.monotonic() + strike.seconds, pid))
                    break
                time.sleep(0.25)
            continued = self._continue(continued)
        while continued and self._running(start):
            time.sleep(0.1)
            continued = self._continue(continued)

    def _continue(self, stopped: list[tuple[float, int]]) -> list[tuple[float, int]]:
        later = []
        for moment, pid in stopped:
            if time.monotonic() < moment:
                later.append((moment, pid))
            else:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        return later

    def _running(self, start: float) -> bool:
        return self.commands["server"].is_alive() and time.monotonic() - start < MAX_SECONDS

    def _find(self, strike: Strike) -> int | None:
        word, owner = KINDS[strike.kind]
        name = "server" if owner == "server" else strike.site
        for pid, words in processes(str(self.temporary)).items():
            if word not in {Path(each).name for each in words}:
                continue
            with suppress(OSError):
                if f"{OWNER}={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        return None

    def _end(self) -> None:
        """Wait for the sites, which end with the run, and look for what is left."""
        end = time.monotonic() + (SITE_SECONDS if not self.outcome.problems else 0.0)
        for name, command in self.commands.items():
            command.join(max(0.1, end - time.monotonic()))
            if command.is_alive():  # it was not there when the server said that the run is over
                command.end()
                command.join(60)
            if command.is_alive():
                self.outcome.problems.append(f"{name} does not end")
                command.process.kill()
        end = time.monotonic() + 10.0
        while (left := processes(str(self.temporary))) and time.monotonic() < end:
            time.sleep(0.1)
        if left:
            self.outcome.problems.append(f"left processes: {[' '.join(words)[:80] for words in left.values()]}")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if files := [path.name for path in self.temporary.iterdir()]:
            self.outcome.problems.append(f"left files: {files}")

    def compare(self) -> None:
        """Compare model, history and ledger with the simulation; keep the folder of a failure."""
        if not self.outcome.problems:
            try:
                self.outcome.problems += self._differences()
            except Exception as error:
                self.outcome.problems.append(f"{type(error).__name__}: {error}")
        if self.outcome.problems:
            self.outcome.folder = self.folder
        else:
            shutil.rmtree(self.folder)

    def _differences(self) -> list[str]:
        import torch

        from hansa.config import allow_code, build, from_yaml
        from hansa.engine import Serial
        from hansa.runs.experiment import build_run
        from hansa.runs.folder import RunFolder

        config = from_yaml(TEXT, [*self.words, "engine=pool"])
        with allow_code():
            expected = build_run(config, build.load_data(config), engine=Serial).advance(config.rounds)
        state = RunFolder(self.folder / "run").load_checkpoint().state
        vectors = state["server"]["vectors"]
        problems = [
            f"{name} differs"
            for name, vector in expected.state.vectors.items()
            if not torch.equal(vectors[name], vector)
        ]
        found = history(self.folder / "run")
        if len(found) != len(expected.history):
            return [*problems, f"{len(found)} rounds, expected {len(expected.history)}"]
        for ours, theirs in zip(found, expected.history, strict=True):
            for key in ("clients", "up_bytes", "peer_bytes", "loss"):
                if ours.get(key) != theirs.get(key):
                    problems.append(f"round {ours['round']}: {key} {ours.get(key)}, expected {theirs.get(key)}")
        lost = json.loads((self.folder / "run" / "summary.json").read_text()).get("lost")
        return [*problems, f"{lost} lost updates"] if lost else problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=60, help="number of federations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="federations at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of single federations")
    options = parser.parse_args()
    start, lock, outcomes = time.monotonic(), Lock(), []

    def one(index: int) -> None:
        trial = Trial(options.seed, index, options.rounds)
        outcome = trial.run()
        with lock:
            trial.compare()
            outcomes.append(outcome)
            show(outcome)

    numbers = options.only or range(options.count)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, numbers))
    struck = Counter((strike.kind, strike.action) for each in outcomes for strike in each.strikes if strike.struck)
    print(f"\nseed {options.seed}: {sum(struck.values())} processes struck")
    for kind in KINDS:
        print(f"  {kind}: " + ", ".join(f"{action} {struck[kind, action]}" for action in ACTIONS))
    failed = [outcome for outcome in outcomes if outcome.problems]
    seconds = sorted(outcome.seconds for outcome in outcomes)
    methods, total = len({each.method for each in outcomes}), time.monotonic() - start
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} federations equal to the simulation; {methods} methods")
    print(f"{total:.0f} s in all, median {seconds[len(seconds) // 2]:.0f} s, longest {seconds[-1]:.0f} s")
    return len(failed)


def show(outcome: Outcome) -> None:
    """Print one line about a federation, and more about a failed one."""
    strikes = "; ".join(f"{strike}{'' if strike.struck else ' (missed)'}" for strike in outcome.strikes)
    verdict = "FAILED" if outcome.problems else "equal"
    kind = "TLS" if outcome.tls else "insecure"
    print(f"{outcome.index:3} {verdict} {outcome.seconds:4.0f} s  {outcome.method}, {kind}: {strikes}", flush=True)
    for problem in outcome.problems:
        print(f"      {problem}", flush=True)
    if outcome.folder is not None:
        print(f"      {outcome.folder}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
