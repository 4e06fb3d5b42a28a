"""The rooms whose public names the reference describes, beside those of the package itself."""

ROOMS = (
    "presets", "algorithm", "server", "aggregate", "compress", "gossip", "local", "sample", "data", "tasks", "models",
    "measures", "report", "testing",
)  # fmt: skip
