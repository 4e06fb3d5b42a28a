"""A file's setting for another method than its own: what that method understands is kept, the rest is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hansa.config.arguments import Preset
    from hansa.config.yaml_text import Document

COMPOSED = ("uplink", "downlink", "aggregate", "channels")
"""What exchanges parts of one method."""
LOCAL = ("solver", "optimizer", "optimizer_state", "decoupled_weight_decay", "private_blocks")


def put_method(document: Document, method: str) -> list[str]:
    """Make a document one of this preset; returns the keys that were left out for it.

    The file's own preset keeps all that the file says. Another one keeps what it has words for: of gossip and
    compression, and of the server, if both servers are adaptive or neither is, since a rate that suits the one is
    nonsense for the other. Parts exchanged in the file's own method, and words of its own, are left out.
    """
    from hansa.config.arguments import find_preset
    from hansa.config.registry import plain

    data = document.data
    data.pop("name", None)
    said = data.get("algorithm", "fedavg")
    own = said.get("preset", "fedavg") if isinstance(said, dict) else said
    if isinstance(own, str) and plain(own) == plain(method):
        return []
    dropped = [f"algorithm.{word}" for word in said if word != "preset"] if isinstance(said, dict) else []
    for section, key in list(_foreign(data, find_preset(method), own)):
        dropped.append(section if key is None else f"{section}.{key}")
        if key is None:
            del data[section]
        else:
            del data[section][key]
    data.pop("algorithm", None)
    document.put(("algorithm", "preset"), method, f"preset {method}")
    return dropped


def _foreign(data: dict[str, Any], preset: Preset, own: Any) -> Iterator[tuple[str, str | None]]:
    """What a file says that another preset does not understand, as section and key."""
    from hansa.config.arguments import TABLES, find_preset, words

    known = words(preset)
    alike = isinstance(own, str) and ("eps" in words(find_preset(own))) == ("eps" in known)
    for section in ("server", "gossip", "compress"):
        for key in data[section] if isinstance(data.get(section), dict) else ():
            word = TABLES[section].get(key)
            understood = word in known if word is not None else key != "chain"  # a slip of the pen is told by the check
            if not understood or (section == "server" and key != "weights" and not alike):
                yield section, key
    yield from (("local", key) for key in LOCAL if isinstance(data.get("local"), dict) and key in data["local"])
    yield from ((section, None) for section in COMPOSED if data.get(section) is not None)
