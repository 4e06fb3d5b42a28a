"""What belongs to a run: the driver, its folder, checkpoints, metrics, the ledger of bytes, trackers."""
