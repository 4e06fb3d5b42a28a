"""Data: sets by name, partitions, federated views, and whatever a user brings."""

from typing import TYPE_CHECKING

from hansa.later import later

if TYPE_CHECKING:
    from hansa.data.arrays import dataset, from_arrays, from_dataset, from_hf
    from hansa.data.downloading import download
    from hansa.data.errors import DataError, MissingError
    from hansa.data.federated import Dataset, FederatedData, partition, with_clients
    from hansa.data.fetched import Collated, Made, by_function, collated
    from hansa.data.generate import synthetic, two_gaussians
    from hansa.data.heterogeneity import SETTINGS, Setting, setting
    from hansa.data.hub import from_hub
    from hansa.data.loading import FileState, check, federate, load, names, present
    from hansa.data.location import data_folder
    from hansa.data.mapped import Mapped, from_mapped
    from hansa.data.own_tests import with_test_clients
    from hansa.data.partitions import Partition, dirichlet, iid, kept, natural, quantity_skew, shards
    from hansa.data.sources import SOURCES, Source, source
    from hansa.data.split import Split, load_split, save_split, saved
    from hansa.data.summary import Summary, label_counts
    from hansa.data.tables import from_csv_folder

__all__ = [
    "SETTINGS",
    "SOURCES",
    "Collated",
    "DataError",
    "Dataset",
    "FederatedData",
    "FileState",
    "Made",
    "Mapped",
    "MissingError",
    "Partition",
    "Setting",
    "Source",
    "Split",
    "Summary",
    "by_function",
    "check",
    "collated",
    "data_folder",
    "dataset",
    "dirichlet",
    "download",
    "federate",
    "from_arrays",
    "from_csv_folder",
    "from_dataset",
    "from_hf",
    "from_hub",
    "from_mapped",
    "iid",
    "kept",
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
    "with_test_clients",
]

HOMES = {
    "Collated": "hansa.data.fetched",
    "Made": "hansa.data.fetched",
    "Mapped": "hansa.data.mapped",
    "by_function": "hansa.data.fetched",
    "collated": "hansa.data.fetched",
    "from_mapped": "hansa.data.mapped",
    "DataError": "hansa.data.errors",
    "Dataset": "hansa.data.federated",
    "FederatedData": "hansa.data.federated",
    "FileState": "hansa.data.loading",
    "MissingError": "hansa.data.errors",
    "Partition": "hansa.data.partitions",
    "SETTINGS": "hansa.data.heterogeneity",
    "SOURCES": "hansa.data.sources",
    "Setting": "hansa.data.heterogeneity",
    "Source": "hansa.data.sources",
    "Split": "hansa.data.split",
    "Summary": "hansa.data.summary",
    "check": "hansa.data.loading",
    "data_folder": "hansa.data.location",
    "dataset": "hansa.data.arrays",
    "dirichlet": "hansa.data.partitions",
    "download": "hansa.data.downloading",
    "federate": "hansa.data.loading",
    "from_arrays": "hansa.data.arrays",
    "from_csv_folder": "hansa.data.tables",
    "from_dataset": "hansa.data.arrays",
    "from_hf": "hansa.data.arrays",
    "from_hub": "hansa.data.hub",
    "iid": "hansa.data.partitions",
    "kept": "hansa.data.partitions",
    "label_counts": "hansa.data.summary",
    "load": "hansa.data.loading",
    "load_split": "hansa.data.split",
    "names": "hansa.data.loading",
    "natural": "hansa.data.partitions",
    "partition": "hansa.data.federated",
    "present": "hansa.data.loading",
    "quantity_skew": "hansa.data.partitions",
    "save_split": "hansa.data.split",
    "saved": "hansa.data.split",
    "setting": "hansa.data.heterogeneity",
    "shards": "hansa.data.partitions",
    "source": "hansa.data.sources",
    "synthetic": "hansa.data.generate",
    "two_gaussians": "hansa.data.generate",
    "with_clients": "hansa.data.federated",
    "with_test_clients": "hansa.data.own_tests",
}
"""The modules that are imported when one of these names is first asked for."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, HOMES)
