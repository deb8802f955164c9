"""Runs the examples in the documentation of `mindspore.mint`, or of other modules, and compares what they print with
what it says."""

import contextlib
import doctest
import functools
import importlib
import inspect
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import mindspore
import numpy as np
from mindspore import mint, nn, ops

from child import environment

MODULES = ("mint", "mint.nn", "mint.nn.functional", "mint.optim", "mint.linalg", "mint.special")
# What these modules import for their own use: they list the names that they mean for others in part alone.
HELPERS = re.compile(
    r"_\w*|\w+_(op|ext|impl|func)|inplace_\w+|jit_\w+|Tensor|Cell|constexpr|cdist_|nllloss",
)
# These names have no examples of their own: they are other words for names that have.
EXAMPLES_OF = {
    "mint.arccos": "mint.acos",
    "mint.arccosh": "mint.acosh",
    "mint.arcsin": "mint.asin",
    "mint.arcsinh": "mint.asinh",
    "mint.arctan": "mint.atan",
    "mint.arctanh": "mint.atanh",
    "mint.clip": "mint.clamp",
    "mint.concat": "mint.cat",
    "mint.divide": "mint.div",
    "mint.fix": "mint.trunc",
    "mint.ge": "mint.greater_equal",
    "mint.lt": "mint.less",
    "mint.negative": "mint.neg",
    "mint.not_equal": "mint.ne",
    "mint.nn.functional.upsample": "mint.nn.functional.interpolate",
}
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
# These examples print something else than they say, whatever runs them.
PRINTING = {
    "mint.multinomial": "the example prints random numbers",
    "mint.nn.Flatten": "it prints other words than it says",
    "mint.nn.UpsamplingNearest2d": "it says 10 where the input has 11",
    "mint.nn.functional.embedding": "it prints numbers that are not set",
    "mint.triangular_solve": "the example prints random numbers",
}
# These examples cannot run.
WRONG = {
    "mint.imag": "the example sets the device to Ascend",
    "mint.nn.Hardtanh": "it uses a variable x that it does not make",
    "mint.nn.SyncBatchNorm": "it needs processes that mpirun or msrun started",
    "mint.nn.UpsamplingBilinear2d": "it has an unclosed bracket",
    "mint.optim.Adam": "it uses a class LeNet5 that it does not make",
    "mint.optim.AdamW": "it uses a class LeNet5 that it does not make",
    "mint.optim.FusedAdamW": "it uses a class LeNet5 that it does not make",
    "mint.optim.SGD": "it uses a class LeNet5 that it does not make",
    "mint.rand_like": "the example moves a tensor to Ascend",
    "mint.randint_like": "the example moves a tensor to Ascend",
    "mint.real": "the example sets the device to Ascend",
}
# The CPU's convolution makes some 3 10^8 products a second.
SLOW = {"mint.nn.Conv2d": "the example takes a quarter of an hour on a CPU"}
SECONDS = 60  # for a name's examples


def left_out(device):
    """Returns {name: why its examples do not tell on a device}."""
    return PRINTING | WRONG | (SLOW if device == "CPU" else {})


def names(modules=MODULES):
    """Returns the paths of the modules' public names, each object once."""
    found = {}
    others = {id(getattr(mint.distributed, name)) for name in mint.distributed.__all__}
    inner = set(mint.nn.__all__).union(mint.optim.__all__)  # mint's list has these, too
    for module in modules:
        values = importlib.import_module(f"mindspore.{module}")
        listed = [name for name in values.__all__ if module != "mint" or name not in inner]
        for name in dict.fromkeys([*listed, *filter(functools.partial(is_public, values), sorted(vars(values)))]):
            value = getattr(values, name, None)
            if value is not None and id(value) not in others:
                found.setdefault(id(value), f"{module}.{name}")
    return list(found.values())


def is_public(module, name):
    """Tells whether a module that does not list a name has it for others."""
    value = getattr(module, name)
    has_classes = module in (mint.nn, mint.optim)
    is_kind = inspect.isclass(value) if has_classes else inspect.isfunction(value)
    return is_kind and value.__module__.startswith("mindspore.") and not HELPERS.fullmatch(name)


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
    module = mindspore.Tensor if folder == "Tensor" else importlib.import_module(f"mindspore.{folder}")
    return module, name, getattr(module, name)


def document_of(path):
    """Returns the document of a name, or of the name for which it is another word. The examples of mint call the name
    by its path: many call it as another module's, where it is not, or is another function."""
    own, told = find(path)[2], find(EXAMPLES_OF.get(path, path))[2]
    if not path.startswith("mint."):
        return inspect.getdoc(told) or ""
    names = {each.rpartition(".")[2] for each in (path, EXAMPLES_OF.get(path, path))}
    names |= {each.__name__ for each in (own, told) if hasattr(each, "__name__")}
    call = rf"\b(mindspore\.|ms\.)?(mint|ops|nn)(\.\w+)*\.({'|'.join(names)})(_ext)?\("
    return re.sub(call, f"mindspore.{path}(", inspect.getdoc(told) or "")


@contextlib.contextmanager
def watched(files):
    """Adds to a set the files of msops whose functions run, by their paths in the package."""
    import msops

    folder = str(Path(msops.__file__).parent)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            files.add(str(Path(frame.f_code.co_filename).relative_to(folder)))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def watching(function, files):
    @functools.wraps(function)
    def call(*inputs, **settings):
        with watched(files):
            return function(*inputs, **settings)

    return call


def run(path, graph, document, files):
    """Runs a name's examples and returns what is wrong: "" if nothing is, None if there are none. Examples that take
    too long end the process, since what runs in a kernel hears of no exception. PyNative mode adds to `files` those
    of msops that the name needs."""
    module, name, value = find(path)
    examples = doctest.DocTestParser().get_examples(document)
    if not examples:
        return None
    own, cells = value, []
    if not path.startswith("mint."):
        pass
    elif graph and inspect.isfunction(value):
        own = Network(value)
    elif not graph and inspect.isclass(value):
        cells = [(value, "construct", watching(value.construct, files))] if hasattr(value, "construct") else []
    elif not graph:
        own = watching(value, files)
    values = dict(mindspore=mindspore, ms=mindspore, mint=mint, np=np, ops=ops, nn=nn, Tensor=mindspore.Tensor)
    mindspore.set_context(mode=mindspore.GRAPH_MODE if graph else mindspore.PYNATIVE_MODE)
    signal.alarm(SECONDS)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(module, name, own))
            for cell in cells:
                stack.enter_context(replaced(*cell))
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
    """Prints lines of JSON: for each path and mode what `run` returns and the files of msops that it needs, and before
    that null and no file."""
    mindspore.set_device(device)
    documents = {path: document_of(path) for path in paths}  # what replaces a function has none
    if patched:
        import msops

        msops.patch_mindspore()
    for path in paths:
        for graph in (False, True):
            print(json.dumps((path, graph, None, ())), flush=True)
            files, tells = set(), path not in left_out(device)
            # An example of PRINTING still shows what the name needs.
            runs = tells or (path in PRINTING and not graph)
            finding = run(path, graph, documents[path], files) if runs else None
            print(json.dumps((path, graph, finding if tells else None, sorted(files))), flush=True)


def findings(device, patched, paths):
    """Returns {(path, is graph mode): what `run` returns}, and {path: the files of msops that it needs}. A process of
    its own runs the names; one that crashes is followed by another."""
    found, files, rest = {}, {}, list(paths)
    while rest:
        command = [sys.executable, str(Path(__file__).resolve()), device, str(int(patched)), *rest]
        with tempfile.TemporaryDirectory() as folder:  # some examples write files
            process = subprocess.run(
                command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                timeout=1800,
            )  # fmt: skip
        lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]
        for path, graph, finding, needed in lines:
            found[path, graph] = finding
            files[path] = files.get(path, []) + needed
        if process.returncode == 0:
            return found, files
        path, graph, *_ = lines[-1]
        late = process.returncode == -signal.SIGALRM
        found[path, graph] = f"{SECONDS} s were not enough" if late else f"it ends the process ({process.returncode})"
        found.setdefault((path, True), found[path, graph])
        rest = rest[rest.index(path) + 1 :]
    return found, files


if __name__ == "__main__":
    report(sys.argv[1], sys.argv[2] == "1", sys.argv[3:])
