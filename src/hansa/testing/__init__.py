"""The contracts of all protocols, for parts of one's own: each check raises an AssertionError that names the promise.

>>> from hansa import compress, testing
>>> testing.check_compressor(compress.sign())

Hansa's own parts go through the same checks in its test suite.
"""

from hansa.testing.gossip_contracts import check_activity, check_clustering, check_topology
from hansa.testing.local_contracts import check_solver, check_work
from hansa.testing.promises import ContractError
from hansa.testing.server_contracts import check_aggregator, check_sampler, check_server
from hansa.testing.wire_contracts import check_compressor, check_downlink, check_uplink

__all__ = [
    "ContractError",
    "check_activity",
    "check_aggregator",
    "check_clustering",
    "check_compressor",
    "check_downlink",
    "check_sampler",
    "check_server",
    "check_solver",
    "check_topology",
    "check_uplink",
    "check_work",
]
