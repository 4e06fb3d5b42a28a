"""The federation protocol, and a server and sites that speak it over Flower.

A round has one frame to each site and one reply. A site owns the data and the memory of its clients; neither leaves
it. An order names the version of a client's memory that it starts from (the round, and the digest of the upload made
with it), so duplicates, lost replies and restarts on either side do not change the result: it equals that of the serial
engine bit for bit.
"""
