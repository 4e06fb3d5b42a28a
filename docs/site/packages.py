"""The packages whose public names the reference describes, beside those of `hansa` itself."""

PACKAGES = (
    "presets", "algorithm", "server", "aggregate", "compress", "gossip", "local", "sample", "pace", "data", "training",
    "training.models", "rounds.measures", "study.report", "testing",
)  # fmt: skip
