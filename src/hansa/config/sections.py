"""The shape of a configuration file: sections with few, fixed keys. The docstrings are what editors show."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hansa.config import parts
from hansa.config.text import SHORT

Count: TypeAlias = Annotated[int, Field(ge=1)]
CountOrNone: TypeAlias = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """No unknown keys, no changes after the fact, no quiet conversions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataSection(Section):
    """What is learnt, and who holds which part of it."""

    name: str = "fashion-mini"
    """A data set: `hansa data list` shows them all."""
    clients: Count | None = None
    """How many clients; by default 50, or the data's own."""
    partition: Annotated[Any, parts.PARTITION] = None
    """Who gets which samples; by default Dirichlet(0.3), or the data's own."""
    seed: CountOrNone | None = None
    """Of the partition; by default the run's seed."""
    folder: str | None = None
    """Where the files are; by default HANSA_DATA, or the platform's cache folder."""
    options: dict[str, Any] = {}
    """Of the data set, such as alpha and beta of synthetic."""


class ModelSection(Section):
    """The network: one of Hansa's, or a function of yours."""

    name: str | None = None
    """A model, such as cnn_29k or resnet18; by default one that suits the data."""
    factory: str | None = None
    """MODULE:FUNCTION that makes your nn.Module, in place of a name. Reading such a file runs that module's code."""
    options: dict[str, Any] = {}
    """Arguments of the model."""

    @model_validator(mode="after")
    def _one_of_two(self) -> ModelSection:
        if self.name is not None and self.factory is not None:
            raise ValueError("name and factory: expected one of the two.")
        return self


class AlgorithmSection(BaseModel):
    """A preset and the words of its own; those that presets share are in the sections local, server and gossip."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    preset: str = "fedavg"
    """A method: `hansa presets` shows them all."""

    @property
    def own(self) -> dict[str, Any]:
        """The words of its own that were given."""
        return dict(self.__pydantic_extra__ or {})


class LocalSection(Section):
    """What a client does with a round."""

    lr: Annotated[Any, parts.RATE] = None
    """The local rate, or a schedule of it."""
    steps: Annotated[Any, parts.WORK] = None
    """Gradient steps a round: a number, one a client, or a part."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over a client's data a round, in place of steps."""
    batch_size: Count | Literal["all"] | None = None
    """Samples a step; `all` takes all that a client has."""
    momentum: float | None = None
    """Of the local steps."""
    weight_decay: float | None = None
    """Of the local steps."""
    clip: float | None = None
    """The largest norm of a gradient."""

    @model_validator(mode="after")
    def _one_of_two(self) -> LocalSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs: expected one of the two. steps counts gradient steps, epochs passes.")
        return self


class ServerSection(Section):
    """What the server does with the aggregate."""

    lr: Annotated[Any, parts.RATE] = None
    """The server's rate, or a schedule of it."""
    weights: Literal["uniform", "samples", "clusters"] | list[float] | None = None
    """Of the clients in the aggregate."""
    momentum: float | None = None
    """Of FedAvgM."""
    b1: float | None = None
    """Decay of the first moment."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """What keeps the denominator off zero."""
    v0: float | None = None
    """The second moment at the start."""
    bias_correction: bool | None = None
    """Adam's correction of young moments."""
    eps_inside: bool | None = None
    """eps under the root."""


class GossipSection(Section):
    """Who talks to whom between local steps, for the presets that gossip."""

    topology: Annotated[Any, parts.TOPOLOGY] = None
    """The graph inside a cluster."""
    clusters: Annotated[Any, parts.CLUSTERS] = None
    """Their number, the clients of each, or a rule."""
    reporters: Annotated[Any, parts.REPORTERS] = None
    """How many clients of a cluster report."""
    active: Annotated[Any, parts.ACTIVE] = None
    """Who computes at a step."""
    every: Count | None = None
    """Steps between exchanges."""
    adapted: bool | None = None
    """Only the selected clients train and gossip."""
    compressor: Annotated[Any, parts.COMPRESSOR] = None
    """What neighbours send each other is compressed by it."""


class CompressSection(Section):
    """What travels between clients and server, compressed with error feedback."""

    compressor: Annotated[Any, parts.COMPRESSOR] = None
    """Of the updates: sign, {kind: top_k, ratio: 1/64}, ..."""
    two_way: Annotated[Any, parts.TWO_WAY] = None
    """The model's broadcast is compressed too: true for the same compressor, or another one, or a downlink."""


class EvaluateSection(Section):
    """When and what to measure."""

    every: CountOrNone = 1
    """Rounds between evaluations; 0 evaluates after the last round only."""
    train: bool = False
    """Also measure the global training loss, over all clients' data."""
    compression: bool = False
    """Also measure how much compression loses: q, and the dissimilarity gamma."""
    heterogeneity: bool = False
    """Also measure how far apart the clients' problems are, from full gradients: sigma_l, sigma_g, zeta."""
    target: float | None = None
    """A test accuracy; the summary says after how many rounds it was reached."""


class CheckpointSection(Section):
    """How often a run saves all that it needs to go on exactly."""

    every: CountOrNone = 10
    """Rounds between checkpoints; one more is made at the end. 0 makes none: then the run cannot be resumed."""
    minutes: Annotated[float, Field(gt=0)] | None = 5.0
    """A checkpoint is made earlier when so much time has passed."""
    keep: Count = 3
    """How many of them to keep."""


class Config(Section):
    """One run, whole. Everything has a default: an empty file runs FedAvg on the embedded data."""

    name: str | None = None
    """What the run is called in tables and folders."""
    seed: CountOrNone = 0
    """All randomness is a function of it."""
    rounds: Count = 30
    """Communication rounds."""
    workers: Count | Literal["auto"] = "auto"
    """Workers; the result does not depend on their number. `auto` uses all cores when that pays."""
    quorum: Count = 1
    """Fewer surviving updates leave a round without effect."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of all arithmetic."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    local: LocalSection = LocalSection()
    server: ServerSection = ServerSection()
    sample: Annotated[Any, parts.SAMPLER] = None
    """Who takes part: {participation: 0.1}, {count: 10}, or another sampler."""
    gossip: GossipSection = GossipSection()
    compress: CompressSection = CompressSection()
    uplink: Annotated[Any, parts.UPLINK] = None
    """How updates travel to the server, in place of the preset's way."""
    downlink: Annotated[Any, parts.DOWNLINK] = None
    """How the model travels to the clients, in place of the preset's way."""
    aggregate: Annotated[Any, parts.AGGREGATE] = None
    """What the server makes of the updates, in place of the preset's way."""
    max_norm: Annotated[float, Field(gt=0)] = 1e12
    """Longer updates are refused."""
    faults: Annotated[Any, parts.FAULTS] = None
    """Chances that clients vanish or misbehave: {before: 0.1, nan: 0.01}."""
    links: Annotated[Any, parts.LINKS] = None
    """Speeds of the network, for simulated time."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @field_validator("algorithm", "model", "data", mode="before")
    @classmethod
    def _bare_word(cls, value: Any, info: Any) -> Any:
        return {SHORT[info.field_name]: value} if isinstance(value, str) else value

    @property
    def title(self) -> str:
        """What to call the run: its name, else its preset."""
        return self.name if self.name is not None else self.algorithm.preset
