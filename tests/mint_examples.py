"""Runs the examples in the documentation of `mindspore.mint`, and compares what they print with what it says."""

import contextlib
import doctest
import importlib
import inspect
import io
import json
import re
import signal
import subprocess
import sys

import mindspore
import numpy as np
from mindspore import mint, nn, ops

MODULES = ("mint", "mint.nn", "mint.nn.functional", "mint.optim", "mint.linalg", "mint.special")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
# These examples cannot run, or print something else than they say, whatever runs them.
WRONG = {
    "mint.count_nonzero": "the example calls `mindspore.ops.count_nonzero`, which names its argument `x`",
    "mint.multinomial": "the example prints random numbers",
    "mint.nn.Flatten": "it prints other words than it says",
    "mint.nn.Hardtanh": "it uses a variable x that it does not make",
    "mint.nn.KLDivLoss": "it makes mindspore.nn.KLDivLoss, which takes no log_target",
    "mint.nn.SyncBatchNorm": "it needs processes that mpirun or msrun started",
    "mint.nn.UpsamplingBilinear2d": "it has an unclosed bracket",
    "mint.nn.UpsamplingNearest2d": "it says 10 where the input has 11",
    "mint.nn.functional.embedding": "it prints numbers that are not set",
    "mint.nn.functional.leaky_relu": "it calls ops.extend.leaky_relu_ext, which does not exist",
    "mint.optim.Adam": "it uses a class LeNet5 that it does not make",
    "mint.optim.AdamW": "it uses a class LeNet5 that it does not make",
    "mint.optim.FusedAdamW": "it uses a class LeNet5 that it does not make",
    "mint.optim.SGD": "it uses a class LeNet5 that it does not make",
    "mint.rand_like": "the example moves a tensor to Ascend",
    "mint.randint_like": "the example moves a tensor to Ascend",
    "mint.triangular_solve": "the example prints random numbers",
}
# The CPU's convolution makes some 3 10^8 products a second.
SLOW = {"mint.nn.Conv2d": "the example takes a quarter of an hour on a CPU"}
SECONDS = 60  # for a name's examples


def left_out(device):
    """Returns {name: why its examples are not run on a device}."""
    return WRONG | SLOW if device == "CPU" else WRONG


def names():
    """Returns the paths of mint's public names, each object once."""
    found = {}
    own = set(mint.distributed.__all__).union(mint.nn.__all__, mint.optim.__all__)  # mint's list has these, too
    for module in MODULES:
        values = importlib.import_module(f"mindspore.{module}")
        for name in dict.fromkeys(values.__all__):
            if (module != "mint" or name not in own) and hasattr(values, name):
                found.setdefault(id(getattr(values, name)), f"{module}.{name}")
    return list(found.values())


class Network(nn.Cell):
    """Calls a function, so that graph mode compiles the call."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs, **settings):
        return self.function(*inputs, **settings)


@contextlib.contextmanager
def replaced(module, name, value):
    own = getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own) if own is not None else delattr(module, name)


def differs(want, got):
    """Tells whether a text differs from what was printed by more than roundings, spaces, commas and points."""
    if not want.strip() or "".join(want.split()) == "".join(got.split()):
        return False
    numbers = [np.array([float(each) for each in NUMBER.findall(text)]) for text in (want, got)]
    words = [re.sub(r"<BLANKLINE>|[\s.,]", "", NUMBER.sub("", text)) for text in (want, got)]
    same = numbers[0].shape == numbers[1].shape and np.allclose(*numbers, rtol=1e-3, atol=1e-4)
    return not same or words[0] != words[1]


def find(path):
    """Returns the module of a path, its name there, and what the name stands for."""
    folder, name = path.rpartition(".")[::2]
    module = importlib.import_module(f"mindspore.{folder}")
    return module, name, getattr(module, name)


def run(path, graph, document):
    """Runs a name's examples and returns what is wrong: "" if nothing is, None if there are none. Examples that take
    too long end the process, since what runs in a kernel hears of no exception."""
    module, name, value = find(path)
    examples = doctest.DocTestParser().get_examples(document or "")
    if not examples:
        return None
    own = Network(value) if graph and inspect.isfunction(value) else value
    source = "".join(example.source for example in examples)
    # Some examples call the name as another module's, in which it is not.
    strays = {(ops, found) for found in re.findall(r"\bops\.(\w+)", source) if not hasattr(ops, found)}
    strays |= {(nn, found) for found in re.findall(r"(?<!mint\.)\bnn\.(\w+)", source) if not hasattr(nn, found)}
    values = dict(mindspore=mindspore, ms=mindspore, mint=mint, np=np, ops=ops, nn=nn, Tensor=mindspore.Tensor)
    mindspore.set_context(mode=mindspore.GRAPH_MODE if graph else mindspore.PYNATIVE_MODE)
    signal.alarm(SECONDS)
    try:
        with contextlib.ExitStack() as stack:
            for place in ((module, name), *strays):
                stack.enter_context(replaced(*place, own))
            for example in examples:
                with contextlib.redirect_stdout(io.StringIO()) as got:
                    exec(compile(example.source, f"<{path}>", "single"), values)  # noqa: S102 (it is MindSpore's own)
                    mindspore.runtime.synchronize()  # errors appear here
                if differs(example.want, got.getvalue()):
                    return f"{example.source.strip()}: expected {example.want.strip()}, got {got.getvalue().strip()}"
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        signal.alarm(0)
    return ""


def report(device, patched, paths):
    """Prints lines of JSON: for each path and mode what `run` returns, and before that null."""
    mindspore.set_device(device)
    documents = {path: inspect.getdoc(find(path)[2]) for path in paths}  # what replaces a function has none
    if patched:
        import msops

        msops.patch_mindspore()
    for path in paths:
        for graph in (False, True):
            print(json.dumps((path, graph, None)), flush=True)
            finding = None if path in left_out(device) else run(path, graph, documents[path])
            print(json.dumps((path, graph, finding)), flush=True)


def findings(device, patched, paths):
    """Returns {(path, is graph mode): what `run` returns}. A process of its own runs the names; one that crashes is
    followed by another."""
    found, rest = {}, list(paths)
    while rest:
        command = [sys.executable, __file__, device, str(int(patched)), *rest]
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=1800)
        lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]
        for path, graph, finding in lines:
            found[path, graph] = finding
        if process.returncode == 0:
            return found
        path, graph, _ = lines[-1]
        late = process.returncode == -signal.SIGALRM
        found[path, graph] = f"{SECONDS} s were not enough" if late else f"it ends the process ({process.returncode})"
        found.setdefault((path, True), found[path, graph])
        rest = rest[rest.index(path) + 1 :]
    return found


if __name__ == "__main__":
    report(sys.argv[1], sys.argv[2] == "1", sys.argv[3:])
