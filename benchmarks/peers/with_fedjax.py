"""FedJAX: ``for_each_client`` with its compiled backend, the client's training loop of its FedAvg, in-memory data.

Its ready-made FedAvg weighs updates by a client's samples; here they count equally, so the few lines of the server are
written out, as its own examples of custom algorithms do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from job import Array, Arrays, Clock, Job, finish, start

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 was written for a JAX that had these names
    jax.tree_map = jax.tree_util.tree_map
    jax.tree_leaves = jax.tree_util.tree_leaves

import fedjax
from fedjax.algorithms.fed_avg import create_train_for_each_client

Params = dict[str, Any]


def mlp(params: Params, inputs: Any) -> Any:
    hidden = jax.nn.relu(inputs.reshape(len(inputs), -1) @ params["1.weight"] + params["1.bias"])
    return hidden @ params["3.weight"] + params["3.bias"]


def cnn_29k(params: Params, inputs: Any) -> Any:
    x = _pool(_convolve(params, "0", inputs))
    x = _pool(_convolve(params, "3", x))
    return x.reshape(len(x), -1) @ params["7.weight"] + params["7.bias"]


def _convolve(params: Params, layer: str, x: Any) -> Any:
    """Images lie [n, h, w, c], the layout that XLA likes best."""
    x = jax.lax.conv_general_dilated(
        x, params[f"{layer}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x + params[f"{layer}.bias"])


def _pool(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


NETWORKS = {"mlp": mlp, "cnn_29k": cnn_29k}
FLATTENED = {("cnn_29k", "7.weight"): (32, 7, 7)}  # images before a layer


def inwards(model: str, weights: dict[str, Array]) -> Params:
    """PyTorch's weights in JAX's order: [in, out], [h, w, in, out], and the flattened image as [h, w, c]."""
    return {name: jnp.asarray(_turn(model, name, value, _IN)) for name, value in weights.items()}


def outwards(model: str, params: Params) -> dict[str, Array]:
    """The way back."""
    return {name: _turn(model, name, np.asarray(value), _OUT) for name, value in params.items()}


_IN, _OUT = True, False


def _turn(model: str, name: str, value: Array, inward: bool) -> Array:
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0) if inward else value.transpose(3, 2, 0, 1)
    if (image := FLATTENED.get((model, name))) is not None:
        channels, height, width = image
        if inward:
            return value.reshape(-1, *image).transpose(2, 3, 1, 0).reshape(value.shape[1], -1)
        outputs = value.shape[1]
        return value.reshape(height, width, channels, outputs).transpose(3, 2, 0, 1).reshape(outputs, -1)
    return value.T if value.ndim == 2 else value


def main() -> None:
    job = Job.given()
    arrays = Arrays(job)
    images = np.ascontiguousarray(arrays.inputs.transpose(0, 2, 3, 1))
    labels = arrays.targets.astype(np.int32)
    datasets = [
        fedjax.ClientDataset({"x": images[rows], "y": labels[rows]}) for rows in map(arrays.rows, range(job.clients))
    ]
    network = NETWORKS[job.model]

    def loss(params: Params, batch: dict[str, Any], rng: Any) -> Any:
        chances = jax.nn.log_softmax(network(params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(chances, batch["y"][:, None], axis=1))

    train = create_train_for_each_client(jax.grad(loss), fedjax.optimizers.sgd(job.lr))
    draw = np.random.default_rng(job.seed)
    key = jax.random.PRNGKey(job.seed)
    params = inwards(job.model, start(job))
    clock = Clock()
    for _ in range(job.rounds):
        key, *keys = jax.random.split(key, job.cohort + 1)
        chosen = draw.choice(job.clients, job.cohort, replace=False)
        work = fedjax.ShuffleRepeatBatchHParams(
            batch_size=job.batch, num_steps=job.steps, num_epochs=None, seed=int(draw.integers(2**31))
        )
        clients = [
            (int(client), datasets[client].shuffle_repeat_batch(work), one)
            for client, one in zip(chosen, keys, strict=True)
        ]
        total = fedjax.tree_util.tree_zeros_like(params)
        for _, delta in train(params, clients):
            total = fedjax.tree_util.tree_add(total, delta)
        mean = fedjax.tree_util.tree_inverse_weight(total, job.cohort)
        params = jax.tree_util.tree_map(lambda x, d: x - d, params, mean)
        jax.block_until_ready(params)
        clock.tick()
    finish(job, clock, outwards(job.model, params))


if __name__ == "__main__":
    main()
