"""Trains a network on its part of each batch by `cuda_graph` and `average_gradients`, and saves what came out.

python data_parallel_graph.py DEVICE FOLDER
"""

import sys

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init

import msops
from msops.compat import set_device

STEPS, ROWS, WIDTH = 8, 16, 64


def make():
    rng = np.random.default_rng(0)
    net = nn.SequentialCell(nn.Dense(WIDTH, 3 * WIDTH), msops.GELU(), msops.RMSNorm(3 * WIDTH), nn.Dense(3 * WIDTH, 1))
    for p in net.get_parameters():
        p.set_data(Tensor(0.1 * rng.standard_normal(p.shape), mindspore.float32))
    return net


def train(rank, processes):
    """Returns the loss of each step on every `processes`-th row of the batch, and the Parameters after the last."""
    net = make()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    scaled = mindspore.value_and_grad(lambda x: (net(x) ** 2).mean() * 8.0, None, net.trainable_params())

    @msops.cuda_graph
    def step(x):
        loss, gradients = scaled(x)
        optimizer(msops.average_gradients(gradients, scale=1 / 8, bucket_bytes=4 * 3 * WIDTH + 1000))
        return loss / 8.0

    rng = np.random.default_rng(1)
    batches = rng.standard_normal((STEPS, ROWS, WIDTH)).astype(np.float32)
    losses = np.array([step(Tensor(batch[rank::processes])).asnumpy() for batch in batches])
    return losses, [p.asnumpy() for p in net.get_parameters()]


if __name__ == "__main__":
    device, folder = sys.argv[1:]
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    set_device(device)
    init()
    losses, parameters = train(get_rank(), get_group_size())
    np.savez(f"{folder}/{get_rank()}.npz", losses, *parameters)
