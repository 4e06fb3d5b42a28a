"""Data: sets by name, partitions, federated views, and whatever a user brings."""

from hansa.data.arrays import dataset, from_arrays, from_dataset, from_hf
from hansa.data.download import download
from hansa.data.errors import DataError, MissingError
from hansa.data.federated import Dataset, FederatedData, partition, with_clients
from hansa.data.generate import synthetic, two_gaussians
from hansa.data.heterogeneity import SETTINGS, Setting, setting
from hansa.data.loading import FileState, check, federate, load, names, present
from hansa.data.location import data_folder
from hansa.data.partitions import Partition, dirichlet, iid, natural, quantity_skew, shards
from hansa.data.sources import SOURCES, Source, source
from hansa.data.split import Split, load_split, save_split, saved
from hansa.data.summary import Summary, label_counts

__all__ = [
    "SETTINGS",
    "SOURCES",
    "DataError",
    "Dataset",
    "FederatedData",
    "FileState",
    "MissingError",
    "Partition",
    "Setting",
    "Source",
    "Split",
    "Summary",
    "check",
    "data_folder",
    "dataset",
    "dirichlet",
    "download",
    "federate",
    "from_arrays",
    "from_dataset",
    "from_hf",
    "iid",
    "label_counts",
    "load",
    "load_split",
    "names",
    "natural",
    "partition",
    "present",
    "quantity_skew",
    "save_split",
    "saved",
    "setting",
    "shards",
    "source",
    "synthetic",
    "two_gaussians",
    "with_clients",
]
