"""One server and three sites on this machine, with TLS and keys: `make demo-federation`, or `python demo.py FOLDER`.

It starts the commands that you would type, each in its own process. On several machines, run the same commands at each
site, with the key folder of that site.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITES = ("north", "east", "south")
HANSA = [sys.executable, "-c", "from hansa_command import main; main()"]


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    keys = folder / "keys"
    if not keys.exists():
        subprocess.run([*HANSA, "keys", str(keys), "--sites", ",".join(SITES)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    joined = []
    try:
        for site in SITES:
            command = [
                *HANSA,
                "join",
                f"127.0.0.1:{port}",
                "--site",
                site,
                "--keys",
                str(keys / site),
                "--data",
                "config",
            ]
            command += ["--policy", str(HERE / "policy.yaml"), "--folder", str(folder / "sites" / site)]
            with open(folder / f"{site}.log", "w", encoding="utf-8") as log:
                joined.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        command = [*HANSA, "serve", str(HERE / "fedcams.yaml"), str(HERE / "cafga.yaml"), "--port", str(port)]
        command += ["--keys", str(keys / "server"), "--out", str(folder / "runs"), "--resume"]
        return subprocess.run([*command, "--report", str(folder / "report.html")], check=False).returncode
    finally:
        for process in joined:
            process.terminate()
        for process in joined:
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/federation")))
