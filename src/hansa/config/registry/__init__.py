"""The registry of parts: kinds, what each has by name, and how a file's words become a part.

>>> from hansa.config.registry import slot
>>> from hansa.compress import Uplink
>>> slot(Uplink).build({"kind": "error_feedback", "compressor": {"kind": "top_k", "ratio": "1/64"}})
error_feedback(compressor=top_k(ratio=0.015625, values='float32'))
"""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from hansa.config.registry.components import KINDS, Factory, Keys, Kind, Misfit, add, strays
    from hansa.config.registry.fields import Slot, signature_of, slot, slot_of
    from hansa.config.registry.plugins import Plugin, plain
    from hansa.config.registry.python_expression import Expression, Writer, expression
    from hansa.config.registry.signatures import Argument, Signature

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
    "Argument": "hansa.config.registry.signatures",
    "Expression": "hansa.config.registry.python_expression",
    "Factory": "hansa.config.registry.components",
    "KINDS": "hansa.config.registry.components",
    "Keys": "hansa.config.registry.components",
    "Kind": "hansa.config.registry.components",
    "Misfit": "hansa.config.registry.components",
    "Plugin": "hansa.config.registry.plugins",
    "Signature": "hansa.config.registry.signatures",
    "Slot": "hansa.config.registry.fields",
    "Writer": "hansa.config.registry.python_expression",
    "add": "hansa.config.registry.components",
    "expression": "hansa.config.registry.python_expression",
    "plain": "hansa.config.registry.plugins",
    "signature_of": "hansa.config.registry.fields",
    "slot": "hansa.config.registry.fields",
    "slot_of": "hansa.config.registry.fields",
    "strays": "hansa.config.registry.components",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, HOMES)
