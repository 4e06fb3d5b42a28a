"""Data sets by name, partitions over clients, and federated data from custom arrays, files and datasets."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.data.arrays import (
        CollatedData,
        GeneratedData,
        MemmapArray,
        dataset,
        from_arrays,
        from_dataset,
        from_function,
        from_hf,
        from_items,
        from_memmap,
    )
    from hansa.data.csv_folder import from_csv_folder, infer_schema
    from hansa.data.federated import (
        Dataset,
        FederatedData,
        Summary,
        apply_split,
        label_counts,
        partition_dataset,
        with_feature_noise,
        with_test_clients,
        with_validation,
    )
    from hansa.data.loading import FileStatus, check_files, dataset_names, download, federate, is_present, load
    from hansa.data.partitions import (
        Partition,
        Split,
        dirichlet,
        iid,
        labels_per_client,
        load_split,
        natural,
        quantity_skew,
        save_split,
        saved_split,
        shards,
        subsample,
    )
    from hansa.data.schema import Schema, SchemaMisfitError, SplitColumn, TableColumn, TableEncoding
    from hansa.data.sources import DATASETS, DataError, DatasetInfo, MissingFileError, data_folder, dataset_info
    from hansa.data.synthetic_data import synthetic, two_gaussians

__all__ = [
    "DATASETS",
    "CollatedData",
    "DataError",
    "Dataset",
    "DatasetInfo",
    "FederatedData",
    "FileStatus",
    "GeneratedData",
    "MemmapArray",
    "MissingFileError",
    "Partition",
    "Schema",
    "SchemaMisfitError",
    "Split",
    "SplitColumn",
    "Summary",
    "TableColumn",
    "TableEncoding",
    "apply_split",
    "check_files",
    "data_folder",
    "dataset",
    "dataset_info",
    "dataset_names",
    "dirichlet",
    "download",
    "federate",
    "from_arrays",
    "from_csv_folder",
    "from_dataset",
    "from_function",
    "from_hf",
    "from_items",
    "from_memmap",
    "iid",
    "infer_schema",
    "is_present",
    "label_counts",
    "labels_per_client",
    "load",
    "load_split",
    "natural",
    "partition_dataset",
    "quantity_skew",
    "save_split",
    "saved_split",
    "shards",
    "subsample",
    "synthetic",
    "two_gaussians",
    "with_feature_noise",
    "with_test_clients",
    "with_validation",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
