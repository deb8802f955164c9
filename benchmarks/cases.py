"""What is measured: for each operator and direction the sizes, as plain data.

A table of sizes has `named` ones, which every peer takes part in, a `sweep` from tiny to large, and `ragged` ones, each
with the aligned size beside it, which it should equal but for its bytes.
"""

import math
from typing import NamedTuple

KERNELS = ("add", "sigmoid", "trilinear", "depthwise", "lltm")
OPS = (*KERNELS, "lltm_sequence")
DTYPES = ("float32", "float16")
ROWS = (8, 64, 8, 128)  # steps, batch, inputs, hidden of examples/rows.py


class Case(NamedTuple):
    op: str
    direction: str  # forward or backward
    name: str  # its size, in words
    inputs: list  # shapes of the entry's inputs
    results: list  # shapes of the outputs that are no scratch
    naive: tuple  # the sizes that the naive version takes
    unread: int = 0  # how many of the last inputs matter by their shape alone
    serial: int = 1  # the longest loop of a naive thread
    operations: int = 0  # floating-point operations that the floor counts: multiplication and addition are two
    stride: int = 1
    named: bool = False
    beside: str = ""  # the name of a ragged case's aligned neighbour

    @property
    def elements(self):
        """How many must move: each input read once, each result written once."""
        return sum(map(math.prod, [*self.inputs[: len(self.inputs) - self.unread], *self.results]))


class SequenceCase(NamedTuple):
    size: tuple  # steps, batch, inputs, hidden
    named: bool

    @property
    def name(self):
        return _steps(self.size)

    def operations(self, direction):
        """Those of the products, of which the gradient has two for each one."""
        steps, batch, inputs, hidden = self.size
        if direction.startswith("loop"):
            inputs = 0
        return 2 * steps * batch * 3 * hidden * (inputs + hidden) * (3 if direction == "forward+backward" else 1)


class CellCase(NamedTuple):
    op: str
    name: str
    size: tuple


GPU = dict(
    elements=dict(
        named=(2**20, 2**28),
        sweep=(2**10, 2**14, 2**17, 2**22, 2**24, 2**26),
        ragged={2**14 + 1: 2**14, 2**20 + 1: 2**20, 2**24 + 1: 2**24, 2**28 + 1: 2**28},
    ),
    rows=dict(named=((2**18, 1000),), sweep=((64, 1000),), ragged={(2**18, 1001): (2**18, 1000)}),
    trilinear=dict(  # points, features
        named=((65536, 256), (2**20, 16), (2**22, 2)),
        sweep=((64, 16), (2**10, 16), (2**14, 16), (2**17, 16), (2**22, 16)),
        ragged={
            (65537, 256): (65536, 256),
            (65536, 257): (65536, 256),
            (2**20 + 1, 16): (2**20, 16),
            (2**20, 17): (2**20, 16),
            (2**22, 3): (2**22, 2),
        },
    ),
    depthwise=dict(  # N, C, H, W, kernel, stride
        named=(
            (32, 144, 56, 56, 3, 1),
            (128, 384, 14, 14, 3, 1),
            (32, 96, 112, 112, 3, 2),
            (64, 96, 56, 56, 5, 1),
            (64, 96, 56, 56, 7, 1),
            (32, 128, 56, 56, 31, 1),
        ),
        sweep=((1, 32, 7, 7, 3, 1), (1, 96, 28, 28, 3, 1), (8, 96, 56, 56, 3, 1), (128, 144, 112, 112, 3, 1)),
        ragged={
            (32, 144, 57, 57, 3, 1): (32, 144, 56, 56, 3, 1),
            (32, 96, 113, 113, 3, 2): (32, 96, 112, 112, 3, 2),
            (64, 96, 57, 57, 7, 1): (64, 96, 56, 56, 7, 1),
        },
    ),
    lltm=dict(  # batch, hidden
        named=((16, 128), (64, 1024), (2**16, 1024)),
        sweep=((64, 128), (256, 1024), (2**10, 1024), (2**12, 1024), (2**14, 1024)),
        ragged={(2**16 + 1, 1024): (2**16, 1024), (2**16, 1023): (2**16, 1024), (2**10, 1025): (2**10, 1024)},
    ),
    lltm_cells=dict(named=((16, 32, 128), (64, 1024, 1024), (4096, 1024, 1024))),  # batch, inputs, hidden
    sequences=dict(  # steps, batch, inputs, hidden
        named=((128, 16, 32, 128), (128, 64, 1024, 1024), (128, 256, 2048, 2048)),
        sweep=(
            *((128, batch, 512, 512) for batch in (1, 8, 64, 512)),
            *((128, 64, hidden, hidden) for hidden in (32, 64, 128, 129, 256, 1025, 1536, 2048)),
            *((4096, 16, hidden, hidden) for hidden in (128, 512)),
        ),
    ),
    sequence_cells=dict(named=((32, 16, 32, 128), (32, 64, 1024, 1024), ROWS)),
)
CPU = dict(
    elements=dict(named=(2**20, 2**24), sweep=(2**10, 2**14, 2**17, 2**22), ragged={2**20 + 1: 2**20}),
    rows=dict(named=((2**12, 1000),), sweep=((64, 1000),), ragged={(2**12, 1001): (2**12, 1000)}),
    trilinear=dict(
        named=((4096, 256), (2**16, 16), (2**18, 2)),
        sweep=((64, 16), (2**10, 16), (2**13, 16)),
        ragged={(4096, 257): (4096, 256), (2**16, 17): (2**16, 16)},
    ),
    depthwise=dict(
        named=(
            (2, 144, 56, 56, 3, 1),
            (8, 384, 14, 14, 3, 1),
            (2, 96, 112, 112, 3, 2),
            (2, 96, 56, 56, 5, 1),
            (2, 96, 56, 56, 7, 1),
            (1, 32, 56, 56, 31, 1),
        ),
        sweep=((1, 32, 7, 7, 3, 1), (1, 96, 28, 28, 3, 1)),
        ragged={(2, 144, 57, 57, 3, 1): (2, 144, 56, 56, 3, 1)},
    ),
    lltm=dict(
        named=((16, 128), (64, 1024), (1024, 1024)),
        sweep=((64, 128), (256, 1024)),
        ragged={(1024, 1023): (1024, 1024)},
    ),
    lltm_cells=dict(named=((16, 32, 128), (64, 256, 256), (256, 1024, 1024))),
    sequences=dict(named=((32, 16, 32, 128), (32, 64, 256, 256), (32, 1, 512, 512)), sweep=()),
    sequence_cells=dict(named=((32, 16, 32, 128), (32, 64, 256, 256), ROWS)),
)


def kernel_cases(device, ops=KERNELS, quick=False):
    """The Cases of some operators on GPU or CPU; quick: a size or two of each."""
    tables = GPU if device == "GPU" else CPU
    generators = dict(
        add=(("elements", _add), ("rows", _rows)),
        sigmoid=(("elements", _sigmoid),),
        trilinear=(("trilinear", _trilinear),),
        depthwise=(("depthwise", _depthwise),),
        lltm=(("lltm", _lltm),),
    )
    cases = []
    for op in ops:
        for table, generate in generators.get(op, ()):
            for size, named, beside in _sizes(tables[table], quick):
                names = [case.name for case in generate(beside)] if beside else ()
                for i, case in enumerate(generate(size)):
                    cases.append(case._replace(named=named, beside=names[i] if beside else ""))
    return cases


def sequence_cases(device, ops=OPS, quick=False):
    """The SequenceCases, likewise: one of them if quick."""
    table = (GPU if device == "GPU" else CPU)["sequences"]
    cases = [SequenceCase(size, kind == "named") for kind, sizes in table.items() for size in sizes]
    return (cases[:1] if quick else cases) if "lltm_sequence" in ops else []


def precisions(device, dtypes):
    """Of the products of sequences: GPUs take float32 rounded to TF32, too."""
    both = ("float32", "tf32") if device == "GPU" else ("float32",)
    return [precision for dtype in dtypes for precision in (both if dtype == "float32" else (dtype,))]


def cell_cases(device, ops=OPS, quick=False):
    """The CellCases of some operators, likewise: the kernels' named sizes, but LLTM's Cells have inputs, too."""
    tables = GPU if device == "GPU" else CPU
    named = {name: table["named"] for name, table in tables.items()}
    named["lltm"] = named["lltm_cells"]
    cases = []
    for op in ops:
        if op in ("add", "sigmoid"):
            cases += [CellCase(op, power(n), (n,)) for n in named["elements"]]
        if op == "add":
            cases += [CellCase(op, f"{_by(size)} + row", size) for size in named["rows"]]
        if op == "depthwise":
            cases += [CellCase(op, _convolution(size), size) for size in named["depthwise"]]
        if op in ("trilinear", "lltm"):
            cases += [CellCase(op, _by(size), size) for size in named[op]]
        if op == "lltm_sequence":
            cases += [CellCase(op, _steps(size), size) for size in named["sequence_cells"]]
    return [case for i, case in enumerate(cases) if not quick or case.op not in [c.op for c in cases[:i]]]


def power(n):
    """2^20 for 1048576, 2^20 + 1 for the next; small numbers as they are."""
    exponent = n.bit_length() - 1
    rest = n - 2**exponent
    if exponent < 10 or rest > 1:
        return str(n)
    return f"2^{exponent}" + (f" + {rest}" if rest else "")


def _sizes(table, quick):
    few = 1 if quick else None
    yield from ((size, True, None) for size in table["named"][:few])
    yield from ((size, False, None) for size in table["sweep"][:few])
    if not quick:
        yield from ((size, False, beside) for size, beside in table["ragged"].items())


def _by(sizes):
    return " x ".join(f"({power(n)})" if " " in power(n) else power(n) for n in sizes)


def _steps(size):
    return f"{size[0]} steps of {_by(size[1:])}"


def _convolution(size):
    *image, kernel, stride = size
    return f"{'x'.join(map(str, image))} k{kernel} s{stride}"


def _add(n):
    yield Case("add", "forward", power(n), [(n,), (n,)], [(n,)], (n, n))


def _rows(size):
    rows, columns = size
    name = _by(size)
    yield Case("add", "forward", f"{name} + row", [size, (columns,)], [size], (rows * columns, columns))
    for what, shape, sizes in (
        ("row", (columns,), (rows, columns, 1)),
        ("column", (rows, 1), (1, rows, columns)),
        ("scalar", (), (1, 1, rows * columns)),
    ):
        serial = sizes[0] * sizes[2]
        yield Case("add", "backward", f"{name} to {what}", [size, shape], [shape], sizes, unread=1, serial=serial)


def _sigmoid(n):
    yield Case("sigmoid", "forward", power(n), [(n,)], [(n,)], (n,))
    yield Case("sigmoid", "backward", power(n), [(n,), (n,)], [(n,)], (n,))


def _trilinear(size):
    n, f = size
    inputs, out = [(n, 8, f), (n, 3)], (n, f)
    yield Case("trilinear", "forward", _by(size), inputs, [out], size)
    yield Case("trilinear", "backward", _by(size), [*inputs, out], inputs, size, serial=8 * f)


def _depthwise(size):
    n, channels, height, width, kernel, stride = size
    image, weight, bias = (n, channels, height, width), (channels, 1, kernel, kernel), (channels,)
    padding = kernel // 2
    out = (n, channels, *((length + 2 * padding - kernel) // stride + 1 for length in (height, width)))
    sizes = (*size, padding)
    operations = 2 * kernel**2 * math.prod(out)
    rest = dict(stride=stride, operations=operations)
    yield Case("depthwise", "forward", _convolution(size), [image, weight, bias], [out], sizes, **rest)
    rest = dict(stride=stride, operations=2 * operations, serial=math.prod(out) // channels)
    name = _convolution(size)
    yield Case("depthwise", "backward", name, [image, weight, out], [image, weight, bias], sizes, **rest)


def _lltm(size):
    batch, hidden = size
    inputs = [(batch, 3 * hidden), (3 * hidden,), size]
    yield Case("lltm", "forward", _by(size), inputs, [size, size], size)
    yield Case("lltm", "backward", _by(size), [*inputs, size, size], inputs, size, serial=batch)
