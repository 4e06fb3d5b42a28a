"""x"""
from hansa.gossip.topology import *
from hansa.gossip.spectral import *
