"""The federation protocol, and a server and sites that speak it over Flower.

A round has one frame to each site and one reply. A site owns the data and the memory of its clients; neither leaves
it. An order names the version of a client's memory that it starts from (the round, and the digest of the upload made
with it), so duplicates, lost replies and restarts on either side do not change the result: it equals that of the serial
engine bit for bit.
"""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.federation.messages import (
        MemoryVersion,
        Refusals,
        RoundOrders,
        RoundReports,
        SiteEvaluationReply,
        SiteEvaluationRequest,
    )
    from hansa.federation.policy import Policy
    from hansa.federation.server import Federation, Server, Where
    from hansa.federation.site import Agent, MemoryStore, Site
    from hansa.federation.transport import EnrollingTransport, SiteConnections, Transport

__all__ = [
    "Agent",
    "EnrollingTransport",
    "Federation",
    "MemoryStore",
    "MemoryVersion",
    "Policy",
    "Refusals",
    "RoundOrders",
    "RoundReports",
    "Server",
    "Site",
    "SiteConnections",
    "SiteEvaluationReply",
    "SiteEvaluationRequest",
    "Transport",
    "Where",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
