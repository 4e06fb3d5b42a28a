"""The shape of a configuration file: sections with few, fixed keys. The docstrings are what editors show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hansa.aggregate import Aggregator
from hansa.compress import Compressor, Downlink, Uplink
from hansa.config import parts
from hansa.config.registry import slot
from hansa.config.registry.fields import BUILDING
from hansa.config.registry.import_path import is_place
from hansa.config.yaml_text import SHORT
from hansa.gossip import Activity, Topology
from hansa.local import LocalWork, Solver, blocks
from hansa.presets import Clusters
from hansa.sample import Sampler
from hansa.schedule import Rate
from hansa.server import ServerTransform

Count: TypeAlias = Annotated[int, Field(ge=1)]
CountOrNone: TypeAlias = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """No unknown keys, no changes after the fact, no quiet conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
    test_clients: Literal["labels"] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Whose the test rows are, to evaluate every client on its own: labels deals them as the training labels are, a
    share, such as 0.2, of each client's own rows is held out and is the test set; by default the data's own owners."""
    folder: str | None = None
    """Where the files are; by default HANSA_DATA, or the platform's cache folder."""
    augment: Annotated[Any, parts.AUGMENT] = None
    """What training batches go through, in turn: [{kind: crop, padding: 4}, flip], or MODULE:FUNCTION of yours that
    takes (batch, generator)."""
    factory: str | None = None
    """MODULE:FUNCTION that gives your data, whole or federated, in place of a name. Reading such a file runs that
    module's code."""
    options: dict[str, Any] = {}
    """Of the data set, such as alpha and beta of synthetic; arguments of the factory."""

    @model_validator(mode="after")
    def _one_of_two(self) -> DataSection:
        if "name" in self.model_fields_set and self.factory is not None:
            raise ValueError("name and factory: expected one of the two.")
        return self


class ModelSection(Section):
    """The network: one of Hansa's, or a function of yours."""

    name: str | None = None
    """A model, such as cnn_29k or resnet18; by default one that suits the data."""
    factory: str | None = None
    """MODULE:FUNCTION that makes your nn.Module, in place of a name. Reading such a file runs that module's code."""
    options: dict[str, Any] = {}
    """Arguments of the model."""
    loss: str | dict[str, Any] | None = None
    """Of (output, target): cross_entropy, mse, l1, huber, bce, nll, or MODULE:FUNCTION of yours; by default
    cross_entropy on class numbers, mse on others. With options: {kind: cross_entropy, class_weights: [1, 5]}."""
    compile: bool = False
    """Whether a model that is trained eagerly goes through torch.compile; results then differ in their last bits."""
    metric: str | None = None
    """MODULE:FUNCTION of (output, target) to hits, reported as test_accuracy."""
    metrics: dict[str, str] = {}
    """Names to MODULE:FUNCTION of all test outputs and targets, reported as test_NAME."""

    @field_validator("loss")
    @classmethod
    def _loss_of_ours(cls, value: Any, info: ValidationInfo) -> Any:
        building = info.context is None or info.context.get(BUILDING, True)
        if building and isinstance(value, dict) and not is_place(value.get("kind")):
            parts.LOSS.build(value)
        return value

    @model_validator(mode="after")
    def _one_of_two(self) -> ModelSection:
        if self.name is not None and self.factory is not None:
            raise ValueError("name and factory: expected one of the two.")
        return self


class AlgorithmSection(BaseModel):
    """A preset and the words of its own; those that presets share are in the sections local, server and gossip."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    preset: str = "fedavg"
    """A method: `hansa presets` shows them all. Or MODULE:FUNCTION of yours; reading such a file runs that module's
    code."""

    @property
    def own(self) -> dict[str, Any]:
        """The words of its own that were given."""
        return dict(self.__pydantic_extra__ or {})


class LocalSection(Section):
    """What a client does with a round."""

    lr: Annotated[Any, slot(Rate)] = None
    """The local rate, or a schedule of it."""
    steps: Annotated[Any, slot(int | Sequence[int] | LocalWork)] = None
    """Gradient steps a round: a number, one a client, or a part."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over a client's data a round, in place of steps."""
    batch_size: Count | Literal["all"] | None = None
    """Samples a step; `all` takes all that a client has."""
    momentum: float | None = None
    """Of the local steps."""
    weight_decay: float | None = None
    """Of the local steps."""
    max_grad_norm: float | None = None
    """The largest norm of a gradient."""
    solver: Annotated[Any, slot(Solver)] = None
    """How a client steps, in place of the preset's way: sgd, {kind: prox, mu: 0.1}, ..."""
    optimizer: Annotated[Any, slot(ServerTransform)] = None
    """What a client makes of its gradients, such as adam, in place of the plain step."""
    optimizer_state: Literal["fresh", "kept"] | dict[str, str] | None = None
    """Of the optimizer at the start of a round: fresh, kept by the client, or received: {m: CHANNEL}."""
    decoupled_weight_decay: bool | None = None
    """The weight decay apart from the optimizer (AdamW)."""
    private_blocks: Annotated[Any, slot(blocks)] = None
    """Blocks that stay with their client, by patterns of names: [bn*] is FedBN."""
    frozen_blocks: Annotated[Any, slot(blocks)] = None
    """Blocks that nobody trains, by patterns of names."""

    @model_validator(mode="after")
    def _one_of_two(self) -> LocalSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs: expected one of the two. steps counts gradient steps, epochs passes.")
        return self


class ServerSection(Section):
    """What the server does with the aggregate."""

    lr: Annotated[Any, slot(Rate)] = None
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
    chain: Annotated[Any, slot(ServerTransform)] = None
    """Server transforms in place of the preset's server: adam, or a list of them; lr, if given, scales what comes out.
    Short for channels.model.server."""


class ChannelSection(Section):
    """Parts of a channel, in place of the preset's."""

    downlink: Annotated[Any, slot(Downlink)] = None
    """How the server's vector travels to the clients."""
    uplink: Annotated[Any, slot(Uplink)] = None
    """How the clients' vectors travel to the server."""
    aggregate: Annotated[Any, slot(Aggregator)] = None
    """What the server makes of them."""
    server: Annotated[Any, slot(ServerTransform)] = None
    """What the server does with that: a transform, or a list of them."""
    follows: str | None = None
    """Another channel, of whose aggregate this one's server makes its vector: it is broadcast only (FedCM)."""


class GossipSection(Section):
    """Who talks to whom between local steps; a preset that does not gossip by itself does so on a ring, if not said."""

    topology: Annotated[Any, slot(Topology)] = None
    """The graph inside a cluster."""
    clusters: Annotated[Any, slot(Clusters)] = None
    """Their number, the clients of each, or a rule."""
    reporters: Annotated[Any, slot(int | float | Sampler)] = None
    """How many clients of a cluster report."""
    active: Annotated[Any, slot(float | Activity)] = None
    """Who computes at a step."""
    gossip_every: Count | None = None
    """Steps between exchanges."""
    reporters_only: bool | None = None
    """Only the selected clients train and gossip."""
    keep_local_models: bool | None = None
    """Every client keeps its own model from round to round; there is no server traffic."""
    average_every: Count | None = None
    """Steps between exact averages in place of gossip (Gossip-PGA)."""
    order: Literal["adapt-then-combine", "combine-then-adapt"] | None = None
    """Whether models are mixed after the local step or before it."""
    compressor: Annotated[Any, slot(Compressor)] = None
    """What neighbours send each other is compressed by it."""
    consensus_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """How far a client moves towards what it heard, where that is compressed."""


class CompressSection(Section):
    """What travels between clients and server, compressed with error feedback."""

    compressor: Annotated[Any, slot(Compressor)] = None
    """Of the updates: sign, {kind: top_k, ratio: 1/64}, ..."""
    two_way: Annotated[Any, slot(bool | Compressor | Downlink)] = None
    """The model's broadcast is compressed too: true for the same compressor, or another one, or a downlink."""


class EngineSection(Section):
    """What carries clients' work; the result does not depend on it."""

    kind: Literal["pool", "ray", "flower"] = "pool"
    """The pool of this machine; actors of a Ray cluster (pip install 'hansa[ray]'); or sites that hold their own data,
    over Flower (pip install 'hansa[flower]', `hansa serve`)."""
    address: str | None = None
    """Of the Ray cluster; by default one is started here for the run."""
    sites: dict[str, Count | list[CountOrNone]] = {}
    """Of a federation: names, each with how many clients are there, or which."""
    deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a site has to answer in a round; then the round goes on without it."""
    enough: Count | None = None
    """Sites whose answers suffice to close a round; by default all are waited for."""


class PersonaliseSection(Section):
    """What a client does before it is tested, and the run never hears of: steps of SGD on its own training rows."""

    steps: Count = 5
    """How many."""
    lr: Annotated[float, Field(ge=0)] = 0.01
    """Their rate."""
    batch_size: Count | Literal["all"] = 32
    """Samples a step; `all` takes all that a client has."""


class EvaluateSection(Section):
    """When and what to measure."""

    every: CountOrNone = 1
    """Rounds between evaluations; 0 evaluates after the last round only."""
    where: Literal["server", "sites", "both"] = "server"
    """On the server's test rows; in a federation also on those of the sites, of which sums come back; or on both."""
    train: bool = False
    """Also measure the global training loss, over all clients' data."""
    local_mean: bool = False
    """Also measure the training loss at the mean of all local models after a round."""
    compression: bool = False
    """Also measure how much compression loses: q, and the dissimilarity gamma."""
    heterogeneity: bool = False
    """Also measure how far apart the clients' problems are, from full gradients: sigma_l, sigma_g, zeta."""
    per_client: bool | Count | None = None
    """Also evaluate every client on its own test rows: with each evaluation, or every so many rounds; by default with
    each evaluation if test rows have owners (data.test_clients)."""
    personalise: PersonaliseSection | None = None
    """Evaluate every client also after some steps on its own training rows: {steps: 5, lr: 0.01}."""
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


class PythonSection(Section):
    """What a run was made of that was begun in Python: `hansa.resume` with that algorithm and task goes on with it."""

    algorithm: str
    """The composition, as it prints."""
    task: str
    """What was learnt, by its name."""
    options: dict[str, str] = {}
    """What else the results depend on, as it prints."""
    cites: list[str] = []
    """Keys of the citations of all parts in use."""


class Config(Section):
    """One run, whole. Everything has a default: an empty file runs FedAvg on the embedded data."""

    name: str | None = None
    """What the run is called in tables and folders."""
    seed: CountOrNone = 0
    """All randomness is a function of it."""
    seeds: Count | Annotated[list[CountOrNone], Field(min_length=1)] | None = None
    """Several runs as one result: how many seeds, from `seed` on, or a list of them."""
    rounds: Count = 30
    """Communication rounds."""
    engine: EngineSection = EngineSection()
    workers: Count | Literal["auto"] = "auto"
    """Workers; the result does not depend on their number. `auto` uses all cores when that pays."""
    quorum: Count = 1
    """Fewer surviving updates leave a round without effect."""
    device: str | Annotated[list[str], Field(min_length=1)] = "cpu"
    """Where clients train: cpu, cuda, cuda:1, ..., or a list of which each worker takes one in turn."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of all arithmetic."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    local: LocalSection = LocalSection()
    server: ServerSection = ServerSection()
    sample: Annotated[Any, slot(Sampler)] = None
    """Who takes part: {participation: 0.1}, {count: 10}, or another sampler."""
    gossip: GossipSection = GossipSection()
    compress: CompressSection = CompressSection()
    uplink: Annotated[Any, slot(Uplink)] = None
    """How updates travel to the server, in place of the preset's way. Short for channels.model.uplink."""
    downlink: Annotated[Any, slot(Downlink)] = None
    """How the model travels to the clients, in place of the preset's way. Short for channels.model.downlink."""
    aggregate: Annotated[Any, slot(Aggregator)] = None
    """What the server makes of the updates, in place of the preset's way. Short for channels.model.aggregate."""
    channels: dict[str, ChannelSection] = {}
    """Parts exchanged on a channel, by its name: model, or what the solver reports besides, such as control."""
    max_norm: Annotated[float, Field(gt=0)] = 1e12
    """Longer updates are refused."""
    faults: Annotated[Any, parts.FAULTS] = None
    """Chances that clients vanish or misbehave: {before: 0.1, nan: 0.01}."""
    links: Annotated[Any, parts.LINKS] = None
    """Speeds of the network, for simulated time."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    python: PythonSection | None = None
    """Written by runs that were begun in Python, in place of data, model and algorithm."""

    @field_validator("algorithm", "model", "data", "engine", mode="before")
    @classmethod
    def _bare_word(cls, value: Any, info: Any) -> Any:
        return {SHORT[info.field_name]: value} if isinstance(value, str) else value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: Any) -> Any:
        if isinstance(value, list) and len(set(value)) != len(value):
            raise ValueError("a seed stands twice: equal seeds give equal runs.")
        return value

    @property
    def title(self) -> str:
        """What to call the run: its name, else its preset."""
        if self.name is None and self.python is not None:
            return self.python.task
        return self.name if self.name is not None else self.algorithm.preset
