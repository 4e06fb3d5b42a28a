"""What a site runs in place of ``flwr-clientapp``: the same, with the app that is installed here, whatever bundle the
server sends. A bundle is never unpacked, imported or run at a site."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.supernode.runtime.run_clientapp as runtime
from flwr.clientapp import ClientApp
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp


def main() -> None:
    """Take the task that the command line names, and do it with our own app."""
    from hansa_relay.siteside import app

    def load(*bundle: str) -> ClientApp:
        return app

    def loader(**options: Any) -> Callable[..., ClientApp]:
        return load

    def nowhere(*bundle: str) -> Path:
        return Path()

    def not_unpacked(*content: Any, **options: Any) -> None: ...

    runtime.install_from_fab = not_unpacked
    runtime.get_project_dir = nowhere
    runtime.get_load_client_app_fn = loader
    flwr_clientapp()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
