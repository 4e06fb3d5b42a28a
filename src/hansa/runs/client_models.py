"""The models that clients have after a run, where they are not the server's."""

from __future__ import annotations

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.runs.store import ClientStore
from hansa.training.client_evaluation import own_model


def own_vectors(algorithm: Algorithm, vectors: Vectors, store: ClientStore, client: int) -> Vectors:
    """A client's model and buffers. A client that never took part has the server's."""
    check_client(client)
    if not keeps_own(algorithm):
        raise HansaError(
            f"{algorithm.name}: no client has a model of its own: all have the server's. Private blocks "
            "(local.private_blocks) and methods without a server (dsgd, choco_sgd, ...) keep them."
        )
    model, buffers = own_model(algorithm.local, vectors, store.read(client))
    return {MODEL: model} if buffers is None else {MODEL: model, BUFFERS: buffers}


def keeps_own(algorithm: Algorithm) -> bool:
    """Whether clients have models that differ."""
    mixing = algorithm.local.mixing
    return algorithm.local.private_blocks is not None or (mixing is not None and mixing.keep_local_models)


def check_client(client: int, population: int | None = None) -> None:
    """Refuse what is not the number of a client."""
    most = "" if population is None else f" to {population - 1}"
    if isinstance(client, bool) or not isinstance(client, int) or client < 0 or client >= (population or client + 1):
        raise invalid_argument("load_model", "client", client, f"a client's number, from 0{most}")
