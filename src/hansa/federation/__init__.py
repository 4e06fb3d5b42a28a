"""The federation protocol, free of transport: what a server and its sites say to each other, and what a site keeps.

One message a site and round each way. A site owns the data and the memory of its clients; neither ever travels. It
names a version of a client's memory by a stamp, (round, digest of the upload made with it), and the server's order says
upon which stamp a client builds. So duplicates, lost replies and restarts on either side all come out right: the result
is that of the serial engine, bit for bit.
"""

from hansa.federation.exchange import Exam, Marks, Refusals, RoundOrders, RoundReports, Stamp
from hansa.federation.memory import DiskVersions, RamVersions, Versions
from hansa.federation.server import Federation, Transport, Where
from hansa.federation.site import Site

__all__ = [
    "DiskVersions",
    "Exam",
    "Federation",
    "Marks",
    "RamVersions",
    "Refusals",
    "RoundOrders",
    "RoundReports",
    "Site",
    "Stamp",
    "Transport",
    "Versions",
    "Where",
]
