"""Runs models of mindone and mindformers by `msops.cuda_graph`, forward and in training, with inputs that change, and
compares each bit of losses and Parameters with those of usual calls.

python tests/library_graphs.py [--device GPU] [MODEL ...]     all models that are installed, or some, such as Llama FLUX

On the CPU, where there are no graphs, it shows that two models run, or those that are named. It needs the environment
of tests/libraries.py without PyTorch. Weights are random. Each model gets a line.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.model_libraries import HIDDEN
from libraries import is_installed, llama_of_mindformers, loss_of, prepare
from library_models import MODELS, TEXT

STEPS, TIMED = 6, 5  # calls that are compared, of which the third is recorded, and calls that are timed


def of_mindone(model):
    """Returns a model, a function of arrays that returns the loss, and the arrays."""
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    library = importlib.import_module("mindone.transformers" if model.config else "mindone.diffusers")
    if model.config:
        config = getattr(importlib.import_module("transformers"), model.config)
        net = getattr(library, model.name)(config(**model.settings))
    else:
        net = getattr(library, model.name)(**model.settings)
    arrays = {name: x for name, x in model.inputs.items() if isinstance(x, np.ndarray)}
    target = None if model.has_loss else 1

    def forward(*tensors):
        return loss_of(net, {**model.inputs, **dict(zip(arrays, tensors))}, target, mindspore.Tensor)

    return net, forward, list(arrays.values())


def of_mindformers(model):
    net, _ = llama_of_mindformers(model)
    return net, net, [TEXT]


MAKERS = {"mindone": of_mindone, "mindformers": of_mindformers}


def training_step(net, forward):
    import mindspore
    from mindspore import nn

    parameters = net.trainable_params()
    optimizer = nn.AdamWeightDecay(parameters, 1e-3)
    gradient = mindspore.value_and_grad(forward, None, parameters)

    def step(*tensors):
        loss, gradients = gradient(*tensors)
        optimizer(gradients)
        return loss

    return step


def changed(arrays, step):
    """Returns the Tensors of a step: other numbers, and tokens in another order. Masks stay."""
    import mindspore

    def of_step(array):
        if array.dtype == np.float32:
            return array + np.float32(0.01 * step)
        return np.roll(array, step, -1) if array.max() > 1 else array

    return [mindspore.Tensor(of_step(array)) for array in arrays]


def try_model(model, device):
    """Returns words about the model, and raises an AssertionError if a bit differs."""
    import mindspore

    import msops

    net, forward, arrays = MAKERS[model.library](model)
    net.set_train()
    rng = np.random.default_rng(0)
    start = {}
    for p in net.get_parameters():
        start[p] = p.asnumpy().copy()
        if p.ndim == 1 and p.requires_grad:  # so that no parameter is 0 or 1 throughout, which would hide mistakes
            start[p] += 0.1 * rng.standard_normal(p.shape).astype(start[p].dtype)
    words = []
    for kind in ("forward", "training"):

        def outcome(wrap, kind=kind):
            """Returns the bits of the losses and of the Parameters in the end, and the milliseconds of a call."""
            for p, value in start.items():
                p.set_data(mindspore.Tensor(value))
            run = wrap(forward if kind == "forward" else training_step(net, forward))
            losses = [run(*changed(arrays, step)).asnumpy().tobytes() for step in range(STEPS)]
            values = {p.name: p.asnumpy().tobytes() for p in start}
            inputs, begin = changed(arrays, 0), time.perf_counter()
            for _ in range(TIMED):
                loss = run(*inputs)
            loss.asnumpy()
            return losses, values, 1000 * (time.perf_counter() - begin) / TIMED

        losses, values, ms = outcome(lambda function: function)
        if device == "CPU":
            words.append(f"{kind} runs, {ms:.1f} ms")
            continue
        assert len(set(losses)) > 1, f"{kind}: the losses do not change"
        *found, replay_ms = outcome(msops.cuda_graph)
        if found != [losses, values]:
            usual = outcome(lambda function: function)[:2] == (losses, values)
            calls = [step for step in range(STEPS) if losses[step] != found[0][step]]
            names = [name for name in values if values[name] != found[1][name]]
            others = "those of usual calls do not" if usual else "those of usual calls do, too"
            raise AssertionError(f"{kind}: losses of calls {calls} and {len(names)} Parameters differ, {others}")
        words.append(f"{kind} ok, {ms:.1f} ms by usual calls, {replay_ms:.2f} by a graph")
    return "; ".join(words)


def main(device, names):
    sys.modules.update(dict.fromkeys(HIDDEN))
    prepare(device)
    import mindspore

    import msops

    msops.patch_mindspore()
    installed = [name for name, each in MODELS.items() if each.library in MAKERS and is_installed(each.library)]
    chosen = names or (installed if device == "GPU" else ["Llama", "FLUX"])
    failed = []
    for name in chosen:
        begin = time.perf_counter()
        try:
            words = try_model(MODELS[name], device)
        except Exception as error:  # noqa: BLE001 (the other models are tried, too)
            failed.append(name)
            lines = [line for line in str(error).splitlines() if line.strip("- ")] or [""]
            words = f"FAILED, {type(error).__name__}: {lines[0]}"
            if not isinstance(error, AssertionError) and "cuda_graph:" not in words:
                traceback.print_exc()
            mindspore.common.api._pynative_executor.clear_res()  # else the next gradient is one of second order
        print(f"{name}: {words} ({time.perf_counter() - begin:.0f} s)", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("names", nargs="*", metavar="MODEL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where MindSpore writes files of its own
        main(options.device, options.names)
