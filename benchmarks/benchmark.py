"""Describes an operator to the benchmark: a module of `operators` inherits Benchmark, and adds what only it knows."""

import functools
import math
from typing import NamedTuple

import mindspore
from mindspore import nn

from card import calls_of_specs, input_dtypes, names_of
from msops import Operator

DTYPES = ("float32", "float16")


class Sizes(NamedTuple):
    """Holds sizes of an operator. Each size is a number or a tuple of numbers."""

    named: tuple  # every peer takes part
    sweep: tuple = ()  # from tiny to large
    ragged: dict = {}  # odd size -> a neighbouring aligned size, which should take as long per byte


class Case(NamedTuple):
    """Describes a kernel at one size."""

    benchmark: object
    direction: str  # forward or backward
    name: str  # its size, in words
    size: object  # as it stands in Sizes
    operator: Operator
    inputs: list  # shapes of the entry's inputs
    results: list  # shapes of its outputs without scratch
    naive: tuple  # the sizes that the naive version takes
    formula_inputs: dict = {}  # for a gradient: name -> shape of each input of the forward operator
    formula_results: tuple = ()  # for a gradient: the names of the forward operator's outputs
    unread: int = 0  # how many of the last inputs matter by their shape alone
    serial: int = 1  # the longest loop of a naive thread
    operations: int = 0  # floating-point operations that the floor counts; a multiply-add counts as two
    named: bool = False
    beside: str = ""  # the name of a ragged case's aligned neighbour

    @property
    def op(self):
        return self.benchmark.name


class OfFunction(nn.Cell):
    """Calls a function of MindSpore's operators as a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


class Benchmark:
    """Defines an operator's sizes, peers and targets. The defaults fit a function of each element of one tensor."""

    card = None  # the operator's card in tests/operators, with its operators and formulas
    sizes = {}  # device -> list of Sizes
    cell_sizes = {}  # device -> sizes of whole Cells, if they differ from the kernels' named sizes
    cells = ()  # a Cell of msops, and a function of MindSpore's operators that computes the same
    channels_last = False  # whether torch is also measured with images in channels-last format
    trains = True  # whether whole Cells are also measured with their gradients
    compiled = True  # whether torch.compile is measured, too, which would take hours for a long loop
    line = ""  # describes which cases a line of roof.png connects; if empty, it connects all
    targets = {}  # device -> list of Target
    headline = ()  # (case, dtype) of the kernels that the main README shows
    sequence_sizes = {}  # device -> Sizes; with them, the methods that sequences.py calls

    @property
    def name(self):
        return type(self).__module__.rpartition(".")[2]

    def describe(self, size):
        """Returns the size in words, which is the case in a row of times.csv."""
        return by(size) if isinstance(size, tuple) else power(size)

    def inputs(self, size):
        """Returns the shapes of the forward operator's inputs."""
        return [(size,)]

    def index_below(self, size):
        """Returns what inputs that are indices must be below."""
        raise NotImplementedError

    def contents(self, name, size):
        """Returns the contents of an input of the entries, if these must not be random."""
        return

    def settings(self, size):
        """Returns the operator's settings."""
        return {}

    def cases(self, size):
        """Returns the Cases of a size: the forward operator and its gradient, if it has one."""
        shapes = self.inputs(size)
        operators = self.card.operators(shapes, **self.settings(size))[:2]
        forward, *_ = calls = calls_of_specs(operators, shapes)
        names = names_of(forward.operator)
        formula = dict(formula_inputs=dict(zip(names.inputs, shapes)), formula_results=tuple(names.results))
        for direction, call in zip(("forward", "backward"), calls):
            inputs, results = ([spec.shape for spec in specs] for specs in (call.inputs, call.results))
            yield self.case(direction, size, call.operator, inputs, results, **({} if call is forward else formula))

    def case(self, direction, size, operator, inputs, results, **rest):
        sizes = size if isinstance(size, tuple) else (size,)
        return Case(self, direction, self.describe(size), size, operator, inputs, results, sizes, **rest)

    def bytes(self, case, dtype):
        """Returns how many bytes must move: each input is read once, and each result is written once. Codes have a byte
        each, and all else counts as numbers of the dtype."""
        kinds = [kind in (mindspore.int8, mindspore.uint8) for kind in input_dtypes(case.operator, mindspore.float32)]
        read = list(zip(case.inputs, kinds))[: len(case.inputs) - case.unread]
        written = [
            (spec, tensor.dtype == "int8") for spec, tensor in zip(case.results, case.operator.signature.outputs)
        ]
        wide = 2 if dtype == "float16" else 4
        return sum(math.prod(shape) * (1 if is_code else wide) for shape, is_code in (*read, *written))

    def numpy_formula(self, case):
        """Returns the formula as a NumPy function of the entry's inputs."""
        formula = self.card.formulas[("forward", "backward").index(case.direction)]
        return functools.partial(formula, **self.settings(case.size))

    def torch_formula(self, case):
        """Returns the formula as a torch function of the forward entry's inputs. The method itself imports torch, since
        torch crashes in MindSpore's GPU process."""
        raise NotImplementedError

    def torch_formulas(self, case, dtype):
        """Returns {name of a peer in PyTorch: its formula}; torch.compile takes the one that is named torch."""
        formula = self.torch_formula(case)
        return {} if formula is None else {"torch": formula}

    def prepared_peers(self, case, like):
        """Returns {name of a peer: a function of the entry's inputs that brings them into the layout of the peer, and
        returns the call that is timed}, for a case whose inputs have the dtype and device of the tensor `like`."""
        return {}

    def library_formulas(self, case):
        """Returns {name of a library in libraries.py: the formula as a function of the library's module and the forward
        entry's inputs}. A call must leave the inputs as they are, since calls are repeated."""
        return {}

    def on_line(self, case):
        """Tells whether a line of roof.png connects the case of this name with others."""
        return True

    def flops(self, case, direction):
        """Returns the floating-point operations of a case, if the field tells this operator's speed in TFLOP/s."""
        return

    def size_of(self, case):
        """Returns the size that `describe` calls so."""
        every = [each for of_device in self.sizes.values() for each in of_device]
        sizes = [size for each in every for size in (*each.named, *each.sweep, *each.ragged)]
        return next(size for size in sizes if self.describe(size) == case)

    def describe_cell(self, size):
        return self.describe(size)

    def cell_inputs(self, size):
        """Returns the shapes of the networks' inputs."""
        return self.inputs(size)

    def cell_dtypes(self, size, dtype):
        """Returns the dtypes of the networks' inputs."""
        return [dtype] * len(self.cell_inputs(size))

    def networks(self, size, dtype, device):
        """Returns Cells: {"msops": ours, "MindSpore": an equal one of MindSpore's operators, perhaps others}."""
        ours, theirs = self.cells
        return {"msops": ours(), "MindSpore": OfFunction(theirs)}


def power(n):
    """Writes 1048576 as 2^20, the next number as 2^20 + 1, and small numbers as they are."""
    exponent = n.bit_length() - 1
    rest = n - 2**exponent
    if exponent < 10 or rest > 1:
        return str(n)
    return f"2^{exponent}" + (f" + {rest}" if rest else "")


def by(sizes):
    return " x ".join(f"({power(n)})" if " " in power(n) else power(n) for n in sizes)


ELEMENTS = {  # sizes of operators that are a formula for each element
    "GPU": [
        Sizes(
            named=(2**20, 2**28),
            sweep=(2**10, 2**14, 2**17, 2**22, 2**24, 2**26),
            ragged={2**14 + 1: 2**14, 2**20 + 1: 2**20, 2**24 + 1: 2**24, 2**28 + 1: 2**28},
        )
    ],
    "CPU": [Sizes(named=(2**20, 2**24), sweep=(2**10, 2**14, 2**17, 2**22), ragged={2**20 + 1: 2**20})],
}

GATED = {  # sizes (rows, columns) of gated activations
    "GPU": [
        Sizes(
            named=((16384, 14336), (4096, 11008)),
            sweep=((1, 14336), (64, 14336)),
            ragged={(4096, 11007): (4096, 11008)},
        )
    ],
    "CPU": [Sizes(named=((512, 2048), (64, 14336)), sweep=((1, 14336),), ragged={(511, 2047): (512, 2048)})],
}
