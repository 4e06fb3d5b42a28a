"""Data: sets by name, partitions, federated views, and whatever a user brings."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from hansa.data.arrays import dataset, from_arrays, from_dataset, from_hf
    from hansa.data.client_tests import with_test_clients
    from hansa.data.csv_folder import from_csv_folder
    from hansa.data.download import download
    from hansa.data.errors import DataError, MissingError
    from hansa.data.federated import Dataset, FederatedData, partition, with_clients
    from hansa.data.folder import data_folder
    from hansa.data.hub import from_hub
    from hansa.data.loading import FileState, check, federate, load, names, present
    from hansa.data.memory_mapped import Mapped, from_mapped
    from hansa.data.partitions import Partition, dirichlet, iid, kept, natural, quantity_skew, shards
    from hansa.data.sample_functions import Collated, Made, by_function, collated
    from hansa.data.settings import SETTINGS, Setting, setting
    from hansa.data.sources import SOURCES, Source, source
    from hansa.data.split import Split, load_split, save_split, saved
    from hansa.data.summary import Summary, label_counts
    from hansa.data.synthetic import synthetic, two_gaussians

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
    "Collated": "hansa.data.sample_functions",
    "DataError": "hansa.data.errors",
    "Dataset": "hansa.data.federated",
    "FederatedData": "hansa.data.federated",
    "FileState": "hansa.data.loading",
    "Made": "hansa.data.sample_functions",
    "Mapped": "hansa.data.memory_mapped",
    "MissingError": "hansa.data.errors",
    "Partition": "hansa.data.partitions",
    "SETTINGS": "hansa.data.settings",
    "SOURCES": "hansa.data.sources",
    "Setting": "hansa.data.settings",
    "Source": "hansa.data.sources",
    "Split": "hansa.data.split",
    "Summary": "hansa.data.summary",
    "by_function": "hansa.data.sample_functions",
    "check": "hansa.data.loading",
    "collated": "hansa.data.sample_functions",
    "data_folder": "hansa.data.folder",
    "dataset": "hansa.data.arrays",
    "dirichlet": "hansa.data.partitions",
    "download": "hansa.data.download",
    "federate": "hansa.data.loading",
    "from_arrays": "hansa.data.arrays",
    "from_csv_folder": "hansa.data.csv_folder",
    "from_dataset": "hansa.data.arrays",
    "from_hf": "hansa.data.arrays",
    "from_hub": "hansa.data.hub",
    "from_mapped": "hansa.data.memory_mapped",
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
    "setting": "hansa.data.settings",
    "shards": "hansa.data.partitions",
    "source": "hansa.data.sources",
    "synthetic": "hansa.data.synthetic",
    "two_gaussians": "hansa.data.synthetic",
    "with_clients": "hansa.data.federated",
    "with_test_clients": "hansa.data.client_tests",
}
"""The modules that are imported when one of these names is first asked for."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, HOMES)
