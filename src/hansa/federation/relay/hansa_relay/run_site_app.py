"""Replaces ``flwr-clientapp`` at a site: runs the installed app and ignores any bundle from the server.

A bundle is never unpacked, imported or run at a site.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.supernode.runtime.run_clientapp as runtime
from flwr.clientapp import ClientApp
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp


def main() -> None:
    """Run the task of the command line with Hansa's app."""
    from hansa_relay.client_app import app

    def load(*bundle: str) -> ClientApp:
        return app

    def loader(**options: Any) -> Callable[..., ClientApp]:
        return load

    def no_folder(*bundle: str) -> Path:
        return Path()

    def no_install(*content: Any, **options: Any) -> None: ...

    runtime.install_from_fab = no_install
    runtime.get_project_dir = no_folder
    runtime.get_load_client_app_fn = loader
    flwr_clientapp()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
