"""The shape of a configuration file: sections with few, fixed keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hansa.config import slots
from hansa.config.text import SHORT


class Section(BaseModel):
    """No unknown keys, no changes after the fact, no quiet conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataSection(Section):
    """What is learnt, and who holds which part of it."""

    name: str = Field("fashion-mini", description="A data set: `hansa data list` shows them all.")
    clients: int | None = Field(None, ge=1, description="How many clients; by default 50, or the natural owners.")
    partition: Annotated[Any, slots.PARTITION] = Field(None, description="Who gets which samples.")
    seed: int | None = Field(None, ge=0, description="Of the partition; by default the run's seed.")
    folder: str | None = Field(None, description="Where the files are; by default HANSA_DATA or the cache folder.")
    options: dict[str, Any] = Field(default_factory=dict, description="Of the data set, such as alpha of synthetic.")


class ModelSection(Section):
    """The network: one of Hansa's, or a function of yours."""

    name: str | None = Field(None, description="A model: cnn_29k, resnet18, ...; by default one that suits the data.")
    factory: str | None = Field(None, description="MODULE:FUNCTION that makes your nn.Module; this imports your code.")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the model.")

    @model_validator(mode="after")
    def _one_of_two(self) -> ModelSection:
        if self.name is not None and self.factory is not None:
            raise ValueError("name and factory: expected one of the two.")
        return self


class AlgorithmSection(BaseModel):
    """A preset and the words of its own; those of all presets are in the sections local, server, sample and gossip."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    preset: str = Field("fedavg", description="A method: `hansa presets` shows them all.")

    @property
    def own(self) -> dict[str, Any]:
        """The words of its own that were given."""
        return dict(self.__pydantic_extra__ or {})


class LocalSection(Section):
    """What a client does with a round."""

    lr: Annotated[Any, slots.RATE] = Field(None, description="The local rate, or a schedule of it.")
    steps: Annotated[Any, slots.WORK] = Field(None, description="Local steps a round: a number, one a client, a part.")
    epochs: float | None = Field(None, gt=0, description="Passes over a client's data a round, in place of steps.")
    batch_size: int | Literal["all"] | None = Field(None, description="Samples a step; `all` takes a client's all.")
    momentum: float | None = Field(None, description="Of the local steps.")
    weight_decay: float | None = Field(None, description="Of the local steps.")
    clip: float | None = Field(None, description="The largest norm of a gradient.")

    @model_validator(mode="after")
    def _one_of_two(self) -> LocalSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs: expected one of the two. steps counts gradient steps, epochs passes.")
        return self


class ServerSection(Section):
    """What the server does with the aggregate."""

    lr: Annotated[Any, slots.RATE] = Field(None, description="The server's rate, or a schedule of it.")
    weights: Literal["uniform", "samples"] | list[float] | None = Field(None, description="Of the clients.")
    momentum: float | None = Field(None, description="Of FedAvgM.")
    b1: float | None = Field(None, description="Decay of the first moment.")
    b2: float | None = Field(None, description="Decay of the second moment.")
    eps: float | None = Field(None, description="What keeps the denominator off zero.")
    v0: float | None = Field(None, description="The second moment at the start.")
    bias_correction: bool | None = Field(None, description="Adam's correction of young moments.")
    eps_inside: bool | None = Field(None, description="eps under the root.")


class GossipSection(Section):
    """Who talks to whom between local steps, in the presets that gossip."""

    topology: Annotated[Any, slots.TOPOLOGY] = Field(None, description="The graph inside a cluster.")
    clusters: Annotated[Any, slots.CLUSTERS] = Field(None, description="Their number, or the clients of each.")
    reporters: Annotated[Any, slots.REPORTERS] = Field(None, description="Clients of a cluster that report.")
    active: Annotated[Any, slots.ACTIVE] = Field(None, description="Who computes at a step.")
    every: int | None = Field(None, ge=1, description="Steps between exchanges.")
    adapted: bool | None = Field(None, description="Only the selected train and gossip.")


class EvaluateSection(Section):
    """When and what to measure."""

    every: int = Field(1, ge=0, description="Rounds between evaluations; 0 evaluates after the last round only.")
    train: bool = Field(False, description="Also measure the global training loss, over all clients' data.")
    target: float | None = Field(None, description="A test accuracy whose first round is reported.")


class CheckpointSection(Section):
    """How often a run saves all that it needs to go on exactly."""

    every: int = Field(1, ge=0, description="Rounds between checkpoints; 0 saves none.")
    keep: int = Field(3, ge=1, description="How many of them to keep.")


class Config(Section):
    """One run, whole. Everything has a default: an empty file runs FedAvg on the embedded data."""

    name: str | None = Field(None, description="What the run is called in tables and folders.")
    seed: int = Field(0, ge=0, description="All randomness is a function of it.")
    rounds: int = Field(30, ge=1, description="Communication rounds.")
    workers: int = Field(1, ge=1, description="Processes; results do not depend on their number.")
    quorum: int = Field(1, ge=1, description="Fewer surviving updates leave a round without effect.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Of all arithmetic.")
    data: DataSection = Field(default_factory=lambda: DataSection())
    model: ModelSection = Field(default_factory=lambda: ModelSection())
    algorithm: AlgorithmSection = Field(default_factory=lambda: AlgorithmSection())
    local: LocalSection = Field(default_factory=lambda: LocalSection())
    server: ServerSection = Field(default_factory=lambda: ServerSection())
    sample: Annotated[Any, slots.SAMPLER] = Field(None, description="Who takes part: {participation: 0.1}, ...")
    gossip: GossipSection = Field(default_factory=lambda: GossipSection())
    uplink: Annotated[Any, slots.UPLINK] = Field(None, description="How updates travel to the server.")
    downlink: Annotated[Any, slots.DOWNLINK] = Field(None, description="How the model travels to the clients.")
    aggregate: Annotated[Any, slots.AGGREGATE] = Field(None, description="What is made of the updates.")
    links: Annotated[Any, slots.LINKS] = Field(None, description="Speeds of the network, for simulated time.")
    evaluate: EvaluateSection = Field(default_factory=lambda: EvaluateSection())
    checkpoint: CheckpointSection = Field(default_factory=lambda: CheckpointSection())

    @field_validator("algorithm", "model", "data", mode="before")
    @classmethod
    def _bare_word(cls, value: Any, info: Any) -> Any:
        return {SHORT[info.field_name]: value} if isinstance(value, str) else value
