"""A server and four hospitals on this machine, with TLS and keys: `make demo-federation`, or `python demo.py FOLDER`.

It starts the commands that you would type, each in its own process. Each hospital has one CSV file, the server none.
On several machines, run the same commands at each hospital, with its own key folder and file.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent / "hospitals"
SITES = ("cleveland", "hungarian", "switzerland", "va")
HANSA = [sys.executable, "-c", "from hansa_command import main; main()"]


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    keys, tables = folder / "keys", folder / "hospitals"
    subprocess.run([*HANSA, "data", "get", "heart-disease", "--folder", str(tables)], check=True)
    if not keys.exists():
        subprocess.run([*HANSA, "keys", str(keys), "--sites", ",".join(SITES)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    joined = []
    try:
        for site in SITES:
            command = [*HANSA, "join", f"127.0.0.1:{port}", "--site", site, "--keys", str(keys / site)]
            command += ["--data", str(tables / "heart-disease" / f"{site}.csv")]
            command += ["--policy", str(HERE / "policy.yaml"), "--folder", str(folder / "sites" / site)]
            with open(folder / f"{site}.log", "w", encoding="utf-8") as log:
                joined.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        command = [*HANSA, "serve", str(HERE / "fedavg.yaml"), str(HERE / "scaffold.yaml"), "--port", str(port)]
        command += ["--set", f"data.options.schema={tables / 'heart-disease' / 'schema.yaml'}"]
        command += ["--keys", str(keys / "server"), "--out", str(folder / "runs"), "--resume"]
        code = subprocess.run([*command, "--report", str(folder / "report.html")], check=False).returncode
        if code == 0:  # new patients of a hospital: the schema and its statistics come with the model
            command = [*HANSA, "predict", str(folder / "runs" / "fedavg"), str(tables / "heart-disease" / "va.csv")]
            code = subprocess.run([*command, "-o", str(folder / "va-predictions.csv")], check=False).returncode
        return code
    finally:
        for process in joined:
            process.terminate()
        for process in joined:
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/federation")))
