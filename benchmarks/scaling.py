"""Measures how training scales: images or tokens per second of one process, and of several in data parallelism under
msrun.

python benchmarks/scaling.py                      measures one GPU and two, and writes results/scaling.csv
python benchmarks/scaling.py --network language   does so for a language model: results/scaling-language.csv

Images train a network in graph mode. Texts of 2048 tokens train a Llama of SmolLM2-135M's sizes in PyNative mode: each
step, with its sums over the processes, is one CUDA graph. Each process has a GPU, or a share of the CPU. In weak
scaling each process has the batch of the single process; in strong scaling they share it.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msops  # noqa: E402
from benchmarks.report import about, write  # noqa: E402

ROUNDS = 5
BATCH = {"images": 512, "language": 8}
RATE = {"images": "images_s", "language": "tokens_s"}


class Block(nn.Cell):
    """Computes the block of examples/digits.py, except for its normalization."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = msops.DepthwiseConv2d(channels, 3)
        self.gate = nn.Conv2d(channels, channels, 1, has_bias=True)
        self.sigmoid = msops.Sigmoid()
        self.pointwise = nn.Conv2d(channels, channels, 1)
        self.add = msops.Add()

    def construct(self, x):
        y = self.depthwise(x)
        return self.add(x, self.pointwise(y * self.sigmoid(self.gate(y))))


class Classifier(nn.Cell):
    """Maps images (N, 1, S, S) to scores (N, 10)."""

    def __init__(self, channels, blocks):
        super().__init__()
        self.features = nn.SequentialCell(nn.Conv2d(1, channels, 3), *(Block(channels) for _ in range(blocks)))
        self.classifier = nn.Dense(channels, 10)

    def construct(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


def images_step(options, batch):
    """Returns what trains on a batch of images, and returns the loss, and how many images it has."""
    mindspore.set_seed(0)
    net = nn.WithLossCell(Classifier(options.channels, options.blocks), nn.CrossEntropyLoss())
    step = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 1e-3, 0.9))
    step.set_train()
    images = Tensor(np.random.default_rng(0).random((batch, 1, options.size, options.size), np.float32))
    labels = Tensor(np.arange(batch) % 10, mindspore.int32)
    return lambda: step(images, labels), batch


def language_step(options, batch):
    """Does as images_step, with the next tokens of texts."""
    on_gpu = options.device_target == "GPU"
    from benchmarks.llm import SMOLLM2, TINY, Job
    from benchmarks.llm.of_mindspore import NextTokenLoss, network

    dtype, sizes, length = ("float16", SMOLLM2, 2048) if on_gpu else ("float32", TINY, 16)
    net = network(Job("training", batch, length, "msops", options.device_target, dtype, sizes))
    loss_of, scale = NextTokenLoss(msops), 1024.0 if on_gpu else 1.0
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-4)
    scaled = mindspore.value_and_grad(
        lambda tokens: loss_of(net(tokens[:, :-1]), tokens[:, 1:]) * scale, None, net.trainable_params()
    )

    @msops.cuda_graph
    def step(tokens):
        loss, gradients = scaled(tokens)
        optimizer(msops.average_gradients(gradients, scale=1 / scale))
        return loss / scale

    rank = get_rank() if "MS_ROLE" in os.environ else 0
    tokens = np.random.default_rng(rank).integers(0, sizes["vocabulary"], (batch, length + 1), np.int32)
    tokens = Tensor(tokens)
    return lambda: step(tokens), batch * length


def speeds_of(options, batch):
    """Returns the images or tokens per second of this process in each round."""
    step, things = (language_step if options.network == "language" else images_step)(options, batch)
    for _ in range(3):  # a CUDA graph is recorded in the third
        loss = step()
    loss.asnumpy()
    speeds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        loss.asnumpy()
        speeds.append(options.steps * things / (time.perf_counter() - start))
    return speeds


def work(options):
    """Measures the speeds in each process. The first process writes its own."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE if options.network == "language" else mindspore.GRAPH_MODE)
    mindspore.set_device(options.device_target)
    parallel = "MS_ROLE" in os.environ
    if parallel:
        init()
        if options.network == "images":
            mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    speeds = [speeds_of(options, batch) for batch in options.batches]
    if not parallel or get_rank() == 0:
        np.save(options.speeds, speeds)


def run_processes(count, device_target, *script, cwd, environment=os.environ, blocking=True):
    """Runs a Python script in `count` processes, by msrun if there are several, and returns the finished process with
    what it printed."""
    folder = Path(sys.executable).parent  # msrun starts the first python on the PATH
    variables = dict(environment, PATH=os.pathsep.join([str(folder), environment["PATH"]]))
    launch = [sys.executable]
    if count > 1:
        if device_target == "GPU" and blocking:
            variables["CUDA_LAUNCH_BLOCKING"] = (
                "1"  # graph mode of MindSpore 2.10 sums gradients wrong: docs/versions.md
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = [folder / "msrun", f"--worker_num={count}", f"--local_worker_num={count}"]
        launch += [f"--master_port={port}", "--join=True"]
    command = [*map(str, (*launch, *script))]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=900)


def measure(options, processes, batches):
    """Returns the images or tokens per second of all processes, in each round, for each batch of a process."""
    with tempfile.TemporaryDirectory() as folder:  # msrun leaves logs here
        own = [f"--speeds={folder}/speeds.npy", "--batches", *batches]
        blocking = options.network == "images"
        done = run_processes(
            processes, options.device_target, __file__, *sys.argv[1:], *own, cwd=folder, blocking=blocking
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return processes * np.load(f"{folder}/speeds.npy")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="GPU")
    parser.add_argument("--network", choices=BATCH, default="images")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, help="images or texts in a step of one process; default: 512 or 8")
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--size", type=int, default=32, help="of images")
    parser.add_argument("--steps", type=int, default=10, help=f"in each of {ROUNDS} rounds")
    parser.add_argument("--output", type=Path, help="default: results/scaling.csv or results/scaling-language.csv")
    parser.add_argument("--speeds", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.batch or BATCH[options.network]
    if options.speeds:
        work(options)
        return
    batch, count = options.batch, options.processes
    (one,) = measure(options, 1, [batch])
    weak, strong = measure(options, count, [batch, batch // count])
    net = "a Llama of SmolLM2-135M's sizes, float16, texts of 2048 tokens"
    columns = ("scaling", "processes", "batch", RATE[options.network], "lowest", "highest", "times_one")
    if options.network == "images":
        size = f"{options.size} x {options.size}"
        net = f"{options.blocks} blocks of {options.channels} channels, float32, images of {size}"
    rows = []
    for scaling, processes, images, speeds in (
        ("", 1, batch, one),
        ("weak", count, count * batch, weak),
        ("strong", count, batch, strong),
    ):
        speed = statistics.median(speeds)
        figures = speed, min(speeds), max(speeds), speed / statistics.median(one)
        rows.append(dict(zip(columns, (scaling, processes, images, *figures))))
    name = "scaling.csv" if options.network == "images" else "scaling-language.csv"
    output = options.output or Path(__file__).with_name("results") / name
    write(output, rows, dict(about(options.device_target), net=net), columns)
    print(output.read_text(), end="")


if __name__ == "__main__":
    main()
