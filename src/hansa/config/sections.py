"""The sections and keys of a configuration file. Editors show these docstrings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hansa.aggregate import Aggregator
from hansa.compress import Compressor, Downlink, Uplink
from hansa.config.fields import ComponentField
from hansa.config.yaml_text import BARE_WORD_KEYS
from hansa.core.schedule import Rate
from hansa.data import Partition
from hansa.gossip import Activity, MixingRule, Topology
from hansa.local import Batches, ClientLoop, LocalWork, Solver, blocks
from hansa.pace import Pace, Profile
from hansa.presets import Clusters
from hansa.rounds.faults import faults
from hansa.rounds.ledger import LinkModel
from hansa.sample import Sampler
from hansa.server import ServerTransform
from hansa.training.augment import Augmentation
from hansa.training.losses import Loss

Positive: TypeAlias = Annotated[int, Field(ge=1)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0)]

AUGMENT = ComponentField(Augmentation | Sequence[Augmentation])
FAULTS = ComponentField(faults)
LINKS = ComponentField(LinkModel)
LOSS = ComponentField(Loss)
PARTITION = ComponentField(Partition)
PROFILE = ComponentField(Profile)


class ConfigSection(BaseModel):
    """A section: no unknown keys, frozen, no implicit conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    alternatives: ClassVar[tuple[str, ...]] = ()
    """Keys of which only one may be set."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        keys_set = [key for key in self.alternatives if key in self.model_fields_set and getattr(self, key) is not None]
        if len(keys_set) > 1:
            raise ValueError(f"{' and '.join(self.alternatives)}: expected one of the two.")
        return self


class DataSection(ConfigSection):
    """The data and its partition over clients."""

    alternatives = ("name", "factory")
    name: str = "fashion-mini"
    """A data set: `hansa data list` shows them all."""
    clients: Positive | None = None
    """The number of clients; by default 50, or the data's own."""
    partition: Annotated[Any, PARTITION] = None
    """How samples are assigned to clients; by default Dirichlet(0.3), or the data's own clients."""
    seed: NonNegative | None = None
    """The seed of the partition; by default the run's seed. A number fixes the clients' rows for all seeds."""
    test_clients: Literal["labels"] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """The owners of test rows, for per-client evaluation: `labels` assigns them by the clients' training labels; a
    fraction such as 0.2 holds out that part of each client's rows as the test set; by default the data's own owners."""
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The part of each client's training rows that is taken out to score hyperparameters on, such as 0.1; reported as
    validation/test_accuracy and so on. `hansa sweep` then ranks by it, not by the test rows."""
    noise: Annotated[float, Field(gt=0)] | None = None
    """Gaussian noise on the inputs, of a deviation that grows from 0 at the first client to this at the last."""
    folder: str | None = None
    """The folder of the files; by default HANSA_DATA, or the platform's cache folder."""
    augment: Annotated[Any, AUGMENT] = None
    """Augmentations of training batches, in order: [{kind: crop, padding: 4}, flip], or your MODULE:FUNCTION of
    (batch, generator)."""
    factory: str | None = None
    """Your MODULE:FUNCTION that returns the data, whole or federated, instead of a name. It is declared with
    @hansa.component and imported by the commands that train."""
    options: dict[str, Any] = {}
    """Options of the data set, such as alpha and beta of synthetic; or arguments of the factory."""


class MetricSection(ConfigSection):
    """A metric and its direction."""

    function: str
    """Your MODULE:FUNCTION of all test outputs and targets, or one of Hansa's metrics."""
    better: Literal["lower", "higher"]
    """Whether a smaller or a larger value is better."""


class ModelSection(ConfigSection):
    """The model: one of Hansa's, or your own."""

    alternatives = ("name", "factory")
    name: str | None = None
    """A model, such as cnn_29k or resnet18; by default one that fits the data."""
    factory: str | None = None
    """Your MODULE:NAME, a class of nn.Module or a declared function that returns one (@hansa.component)."""
    options: dict[str, Any] = {}
    """Arguments of the model."""
    loss: str | dict[str, Any] | None = None
    """A loss of (output, target): cross_entropy, mse, l1, huber, bce, nll, or your MODULE:FUNCTION; by default
    cross_entropy for class targets, mse for others. With options: {kind: cross_entropy, class_weights: [1, 5]}."""
    autocast: Literal["bfloat16"] | None = None
    """The dtype of mixed precision (torch.autocast); parameters, the loss and updates stay in float32."""
    execution: Literal["auto", "native", "vmap", "compiled", "eager"] = "auto"
    """How clients are trained: by native code where the model has a native form and by PyTorch otherwise (auto), by one
    of these, many clients in one program (vmap), or by torch.compile. Results differ in their last bits."""
    evaluation_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows per batch in evaluation; by default 500, or fewer if their intermediate results exceed one GiB."""
    metric: str | None = None
    """Your MODULE:FUNCTION of (output, target) that returns one value per row, reported as test_accuracy."""
    metrics: dict[str, str | MetricSection] = {}
    """Metrics by name, each roc_auc, c_index, or a MODULE:FUNCTION of all test outputs and targets, reported as
    test_NAME. A name other than accuracy, auc, f1, c_index, rmse, mae and mse needs {function: MODULE:FUNCTION,
    better: lower}; functions of sklearn.metrics do not."""
    reduction: Literal["mean", "sum", "labels"] | None = None
    """What your own loss is for a batch: a mean over rows, a sum, or a mean over labels; by default it is computed from
    all test outputs at once."""
    ignored: int | None = None
    """A label that does not count in accuracy; by default the ignore_index of the loss."""
    main_metric: str | None = None
    """The metric that runs are ranked by: accuracy, loss, or one of metrics; by default accuracy if there is one, else
    the first of metrics, else the loss."""


class AlgorithmSection(BaseModel):
    """A preset and its own arguments; those that presets share are in the sections local, server and gossip."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    preset: str = "fedavg"
    """A preset: `hansa presets` shows them all. Or your MODULE:FUNCTION, declared with @hansa.component."""

    @property
    def own(self) -> dict[str, Any]:
        """The preset's own arguments that are set."""
        return dict(self.__pydantic_extra__ or {})


class LocalSection(ConfigSection):
    """The local training of a client in a round."""

    alternatives = ("steps", "epochs")
    lr: Annotated[Any, ComponentField(Rate)] = None
    """The local learning rate, or a schedule."""
    steps: Annotated[Any, ComponentField(int | Sequence[int] | LocalWork)] = None
    """Gradient steps per round: a number, a list with one per client, or a component."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Epochs over a client's data per round, instead of steps."""
    batch_size: Positive | Literal["all"] | None = None
    """The batch size; `all` uses all samples of a client."""
    batches: Annotated[Any, ComponentField(Batches)] = None
    """Batches at the end of a pass: full, short (smaller) or drop; continued passes across rounds; or a component."""
    momentum: float | None = None
    """Momentum of the local steps."""
    weight_decay: float | None = None
    """Weight decay of the local steps."""
    max_grad_norm: float | None = None
    """Gradients with a larger norm are clipped to this norm."""
    solver: Annotated[Any, ComponentField(Solver)] = None
    """The local solver, instead of the preset's: sgd, {kind: prox, mu: 0.1}, ..."""
    optimizer: Annotated[Any, ComponentField(ServerTransform)] = None
    """A local optimizer such as adam, instead of plain SGD steps."""
    optimizer_state: Literal["fresh", "kept"] | dict[str, str] | None = None
    """The optimizer's state at the start of a round: fresh, kept by the client, or received: {m: CHANNEL}."""
    decoupled_weight_decay: bool | None = None
    """Whether weight decay bypasses the optimizer (AdamW)."""
    private_blocks: Annotated[Any, ComponentField(blocks)] = None
    """Parameter blocks that stay on their client, by name patterns: [bn*] is FedBN."""
    frozen_blocks: Annotated[Any, ComponentField(blocks)] = None
    """Parameter blocks that are not trained, by name patterns."""
    loop: Annotated[Any, ComponentField(ClientLoop)] = None
    """Training code of your own that replaces the local steps: mine:distill."""


class ServerSection(ConfigSection):
    """The server's step with the aggregate. A bare name stands for the optimizer: `server: adam`."""

    lr: Annotated[Any, ComponentField(Rate)] = None
    """The server's learning rate, or a schedule."""
    weights: Literal["uniform", "samples", "clusters"] | list[float] | None = None
    """The weights of clients in the aggregate."""
    momentum: float | None = None
    """Server momentum, of FedAvgM."""
    b1: float | None = None
    """Decay of the first moment."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """The constant added to the denominator."""
    v0: float | None = None
    """The second moment at the start."""
    bias_correction: bool | None = None
    """Whether Adam's bias correction is applied."""
    eps_inside: bool | None = None
    """Whether eps is added inside the square root."""
    optimizer: Annotated[Any, ComponentField(ServerTransform)] = None
    """The server optimizer, instead of the preset's: adam, or a list of transforms; lr, if set, scales the result.
    Short for channels.model.server."""


class ChannelSection(ConfigSection):
    """Components of a channel, instead of the preset's."""

    downlink: Annotated[Any, ComponentField(Downlink)] = None
    """The downlink from the server to the clients."""
    uplink: Annotated[Any, ComponentField(Uplink)] = None
    """The uplink from the clients to the server."""
    aggregate: Annotated[Any, ComponentField(Aggregator)] = None
    """The aggregator of the clients' vectors."""
    server: Annotated[Any, ComponentField(ServerTransform)] = None
    """The server's transform of the aggregate, or a list of transforms."""
    follows: str | None = None
    """Another channel whose aggregate this channel's server uses; this one is broadcast only (FedCM)."""


class GossipSection(ConfigSection):
    """Gossip between local steps. A preset without gossip of its own uses a ring by default."""

    topology: Annotated[Any, ComponentField(Topology)] = None
    """The communication graph inside a cluster, or a list with one for each cluster."""
    clusters: Annotated[Any, ComponentField(Clusters)] = None
    """The number of clusters, the clients of each, or a clustering."""
    reporters: Annotated[Any, ComponentField(int | float | Sampler)] = None
    """How many clients of a cluster report to the server."""
    active: Annotated[Any, ComponentField(float | Activity)] = None
    """Which clients compute at a step."""
    gossip_every: Positive | None = None
    """Local steps between gossip exchanges."""
    reporters_only: bool | None = None
    """Whether only the reporters train and gossip."""
    keep_local_models: bool | None = None
    """Whether every client keeps its own model from round to round; there is then no server traffic."""
    average_every: Positive | None = None
    """Steps between exact averages instead of gossip (Gossip-PGA)."""
    order: Literal["adapt-then-combine", "combine-then-adapt"] | None = None
    """Whether models are mixed after the local step or before it."""
    compressor: Annotated[Any, ComponentField(Compressor)] = None
    """The compressor of messages between neighbours."""
    consensus_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """The step size towards the neighbours' models, with a compressor."""
    robust: Annotated[Any, ComponentField(MixingRule)] = None
    """The rule against malicious neighbours: {kind: clipped, radius: 1.0} or {kind: trimmed, count: 1}."""


class CompressSection(ConfigSection):
    """Compression with error feedback between clients and server."""

    compressor: Annotated[Any, ComponentField(Compressor)] = None
    """The compressor of updates: sign, {kind: top_k, ratio: 1/64}, ..."""
    two_way: Annotated[Any, ComponentField(bool | Compressor | Downlink)] = None
    """Compression of the broadcast: true for the same compressor, or another compressor or downlink."""


class EngineSection(ConfigSection):
    """The engine that runs the clients' work; results do not depend on it."""

    kind: Literal["pool", "serial", "loopback", "ray", "flower"] = "pool"
    """A pool of processes on this machine; actors of a Ray cluster (pip install 'hansa[ray]'); or sites with their own
    data, over Flower (pip install 'hansa[flower]', `hansa serve`)."""
    address: str | None = None
    """The address of the Ray cluster; by default one is started on this machine."""
    gpus: Annotated[float, Field(gt=0, le=1)] | None = None
    """The fraction of a GPU that every Ray actor reserves and trains on, such as 0.25; by default actors use CPUs."""
    sites: dict[str, Positive | list[NonNegative]] = {}
    """The sites of a federation: names, each with the number of its clients, or a list of them."""
    deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a site has to answer in a round; then the round continues without it."""
    enough: Positive | None = None
    """The number of sites whose answers are enough to close a round; by default all."""


class PersonaliseSection(ConfigSection):
    """Steps of SGD on its own training rows that a client takes before an evaluation; they do not affect the run."""

    steps: Positive = 5
    """The number of steps."""
    lr: Annotated[float, Field(ge=0)] = 0.01
    """The learning rate."""
    batch_size: Positive | Literal["all"] = 32
    """The batch size; `all` uses all samples of a client."""


class EvaluateSection(ConfigSection):
    """When and what to evaluate."""

    every: NonNegative = 1
    """Rounds between evaluations; 0 evaluates after the last round only."""
    where: Literal["server", "sites", "both"] = "server"
    """On the server's test rows; in a federation also on those of the sites, which return sums; or on both."""
    train: bool = False
    """Also measure the global training loss, over all clients' data."""
    local_mean: bool = False
    """Also measure the training loss at the mean of all local models after a round."""
    compression: bool = False
    """Also measure the compression error q and the dissimilarity gamma."""
    heterogeneity: bool = False
    """Also measure heterogeneity from full gradients: sigma_l, sigma_g, zeta."""
    per_client: bool | Positive | None = None
    """Also evaluate every client on its own test rows: with each evaluation, or every N rounds; by default with each
    evaluation if test rows have owners (data.test_clients)."""
    personalise: PersonaliseSection | None = None
    """Evaluate every client also after steps on its own training rows: {steps: 5, lr: 0.01}."""
    keep_best: str | None = None
    """A metric, such as validation/test_accuracy: the saved model is that of the round in which it was best."""
    target: float | None = None
    """A target test accuracy; the summary has the number of rounds to reach it."""


class CheckpointSection(ConfigSection):
    """How often a run saves what it needs to resume exactly."""

    every: NonNegative = 10
    """Rounds between checkpoints; one more is made at the end. With 0 there are none and the run cannot be resumed."""
    minutes: Annotated[float, Field(gt=0)] | None = 5.0
    """A checkpoint is made earlier when this much time has passed."""
    keep: Positive = 3
    """The number of checkpoints to keep."""


class PythonSection(ConfigSection):
    """The composition of a run started in Python; `hansa.resume` with the same algorithm and task resumes it."""

    algorithm: str
    """The repr of the algorithm."""
    task: str
    """The name of the task."""
    options: dict[str, str] = {}
    """The repr of other options that results depend on."""
    cites: list[str] = []
    """Citation keys of all components."""


class Config(ConfigSection):
    """The configuration of a run. Every key has a default: an empty file runs FedAvg on the embedded data."""

    name: str | None = None
    """The name of the run in tables and folders."""
    seed: NonNegative = 0
    """The seed of all randomness."""
    seeds: Positive | Annotated[list[NonNegative], Field(min_length=1)] | None = None
    """Several runs as one result: the number of seeds, counted from `seed`, or a list."""
    rounds: Positive = 30
    """Communication rounds."""
    engine: EngineSection = EngineSection()
    workers: Positive | Literal["auto"] = "auto"
    """The number of workers; results do not depend on it. `auto` uses all cores when that is faster."""
    quorum: Positive = 1
    """The smallest number of accepted updates with which a round changes the model."""
    device: str | Annotated[list[str], Field(min_length=1)] = "cpu"
    """The device of local training: cpu, cuda, cuda:1, ..., or a list of which each worker takes one in turn."""
    deterministic: bool = True
    """Whether accelerators use deterministic algorithms only; an operation without one is an error. CPUs always do."""
    server_device: str = "cpu"
    """The device of aggregation and of the server's optimizer, for large models: cpu, cuda, cuda:1, ..."""
    dtype: Literal["float32", "float64"] = "float32"
    """The dtype of all arithmetic."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    local: LocalSection = LocalSection()
    server: ServerSection = ServerSection()
    sample: Annotated[Any, ComponentField(Sampler)] = None
    """The sampler of participants: {participation: 0.1}, {count: 10}, or another one."""
    pace: Annotated[Any, ComponentField(Pace)] = None
    """Which updates a server step waits for: {kind: deadline, seconds: 60}, {kind: overselect, factor: 1.3},
    {kind: buffered, size: 10, concurrency: 100}; by default that of the preset."""
    profile: Annotated[Any, PROFILE] = None
    """Speeds and availability of the clients' devices, for the virtual clock: {step_seconds: 0.1, up_bandwidth: 1e6},
    each a number or a distribution; {kind: tiers, ...}; or {kind: device_table, path: devices.csv}."""
    gossip: GossipSection = GossipSection()
    compress: CompressSection = CompressSection()
    uplink: Annotated[Any, ComponentField(Uplink)] = None
    """The uplink, instead of the preset's. Short for channels.model.uplink."""
    downlink: Annotated[Any, ComponentField(Downlink)] = None
    """The downlink, instead of the preset's. Short for channels.model.downlink."""
    aggregate: Annotated[Any, ComponentField(Aggregator)] = None
    """The aggregator, instead of the preset's. Short for channels.model.aggregate."""
    channels: dict[str, ChannelSection] = {}
    """Components replaced on channels, by channel: model, or another that the solver reports on, such as control."""
    max_norm: Annotated[float, Field(gt=0)] = 1e12
    """Updates with a larger norm are refused."""
    faults: Annotated[Any, FAULTS] = None
    """Probabilities that clients drop out or misbehave: {before: 0.1, nan: 0.01}."""
    links: Annotated[Any, LINKS] = None
    """Speeds of the network, for simulated time."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    python: PythonSection | None = None
    """Written by runs started in Python, instead of data, model and algorithm."""

    @field_validator(*BARE_WORD_KEYS, mode="before")
    @classmethod
    def _bare_word(cls, value: Any, info: Any) -> Any:
        is_bare = isinstance(value, str) or (info.field_name == "server" and isinstance(value, list))
        return {BARE_WORD_KEYS[info.field_name]: value} if is_bare else value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: Any) -> Any:
        if isinstance(value, list) and len(set(value)) != len(value):
            raise ValueError("a seed is listed twice: equal seeds give equal runs.")
        return value

    @property
    def title(self) -> str:
        """The name of the run, or else of its preset."""
        if self.name is None and self.python is not None:
            return self.python.task
        return self.name if self.name is not None else self.algorithm.preset
