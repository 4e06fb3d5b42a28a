"""The registry of parts: kinds, what each has by name, and how a file's words become a part.

>>> from hansa.registry import slot
>>> from hansa.compress import Uplink
>>> slot(Uplink).build({"kind": "error_feedback", "compressor": {"kind": "top_k", "ratio": "1/64"}})
error_feedback(compressor=top_k(ratio=0.015625, values='float32'))
"""

from typing import TYPE_CHECKING

from hansa.later import later

if TYPE_CHECKING:
    from hansa.registry.kinds import KINDS, Factory, Keys, Kind, Misfit, add, strays
    from hansa.registry.plugins import Plugin, plain
    from hansa.registry.python import Expression, Writer, expression
    from hansa.registry.signatures import Argument, Signature
    from hansa.registry.slots import Slot, signature_of, slot, slot_of

__all__ = [
    "KINDS",
    "Argument",
    "Expression",
    "Factory",
    "Keys",
    "Kind",
    "Misfit",
    "Plugin",
    "Signature",
    "Slot",
    "Writer",
    "add",
    "expression",
    "plain",
    "signature_of",
    "slot",
    "slot_of",
    "strays",
]

HOMES = {
    "Argument": "hansa.registry.signatures",
    "Expression": "hansa.registry.python",
    "Factory": "hansa.registry.kinds",
    "KINDS": "hansa.registry.kinds",
    "Keys": "hansa.registry.kinds",
    "Kind": "hansa.registry.kinds",
    "Misfit": "hansa.registry.kinds",
    "Plugin": "hansa.registry.plugins",
    "Signature": "hansa.registry.signatures",
    "Slot": "hansa.registry.slots",
    "Writer": "hansa.registry.python",
    "add": "hansa.registry.kinds",
    "expression": "hansa.registry.python",
    "plain": "hansa.registry.plugins",
    "signature_of": "hansa.registry.slots",
    "slot": "hansa.registry.slots",
    "slot_of": "hansa.registry.slots",
    "strays": "hansa.registry.kinds",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, HOMES)
