"""Trains a network of all Cells on its part of each batch, under `msrun --worker_num=2`, and saves the losses.

python data_parallel.py DEVICE MODE FOLDER
"""

import sys

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init

import features
from msops.compat import set_device


def losses(rank, processes):
    """Returns the loss of each training step on every `processes`-th image of the batch."""
    net = features.make_network()
    step = nn.TrainOneStepCell(features.WithLoss(net), nn.Adam(net.trainable_params(), 0.02))
    images, labels = (Tensor(array[rank::processes]) for array in features.make_data(8))
    return np.array([step(images, labels).asnumpy() for _ in range(10)])


if __name__ == "__main__":
    device, mode, folder = sys.argv[1:]
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    set_device(device)
    init()
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    np.save(f"{folder}/{get_rank()}.npy", losses(get_rank(), get_group_size()))
