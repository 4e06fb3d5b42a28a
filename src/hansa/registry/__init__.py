"""The registry of parts: kinds, what each has by name, and how a file's words become a part.

>>> from hansa.registry import slot
>>> from hansa.compress import Uplink
>>> slot(Uplink).build({"kind": "error_feedback", "compressor": {"kind": "top_k", "ratio": "1/64"}})
error_feedback(compressor=top_k(ratio=0.015625, values='float32'))
"""

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
