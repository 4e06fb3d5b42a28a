"""The federation protocol, free of transport: what a server and its sites say to each other, and what a site keeps.

One message a site and round each way. A site owns the data and the memory of its clients; neither ever travels. It
names a version of a client's memory by a stamp, (round, digest of the upload made with it), and the server's order says
upon which stamp a client builds. So duplicates, lost replies and restarts on either side all come out right: the result
is that of the serial engine, bit for bit.
"""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from hansa.federation.agent import Agent
    from hansa.federation.client_memory import DiskVersions, RamVersions, Versions
    from hansa.federation.flower_transport import Charged, Post
    from hansa.federation.messages import Exam, Marks, Refusals, RoundOrders, RoundReports, Stamp
    from hansa.federation.policy import Policy
    from hansa.federation.serve import Server
    from hansa.federation.server import Federation, Transport, Where
    from hansa.federation.site import Site

__all__ = [
    "Agent",
    "Charged",
    "DiskVersions",
    "Exam",
    "Federation",
    "Marks",
    "Policy",
    "Post",
    "RamVersions",
    "Refusals",
    "RoundOrders",
    "RoundReports",
    "Server",
    "Site",
    "Stamp",
    "Transport",
    "Versions",
    "Where",
]

HOMES = {
    "Agent": "hansa.federation.agent",
    "Charged": "hansa.federation.flower_transport",
    "DiskVersions": "hansa.federation.client_memory",
    "Exam": "hansa.federation.messages",
    "Federation": "hansa.federation.server",
    "Marks": "hansa.federation.messages",
    "Policy": "hansa.federation.policy",
    "Post": "hansa.federation.flower_transport",
    "RamVersions": "hansa.federation.client_memory",
    "Refusals": "hansa.federation.messages",
    "RoundOrders": "hansa.federation.messages",
    "RoundReports": "hansa.federation.messages",
    "Server": "hansa.federation.serve",
    "Site": "hansa.federation.site",
    "Stamp": "hansa.federation.messages",
    "Transport": "hansa.federation.server",
    "Versions": "hansa.federation.client_memory",
    "Where": "hansa.federation.server",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, HOMES)
