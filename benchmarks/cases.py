"""Lists what is measured: the cases of the operators' sizes on a device."""

from typing import NamedTuple

from .benchmark import Benchmark
from .operators import BENCHMARKS


class SequenceCase(NamedTuple):
    benchmark: Benchmark
    size: tuple
    named: bool

    @property
    def name(self):
        return self.benchmark.describe_cell(self.size)


class CellCase(NamedTuple):
    benchmark: Benchmark
    size: object

    @property
    def name(self):
        return self.benchmark.describe_cell(self.size)


def kernel_cases(device, ops=tuple(BENCHMARKS), quick=False):
    """Returns the Cases of some operators on GPU or CPU; if quick, those of one or two sizes of each operator."""
    cases = []
    for op in ops:
        benchmark = BENCHMARKS[op]
        for sizes in benchmark.sizes.get(device, ()):
            few = 1 if quick else None
            cases += [case._replace(named=True) for size in sizes.named[:few] for case in benchmark.cases(size)]
            cases += [case for size in sizes.sweep[:few] for case in benchmark.cases(size)]
            for size, aligned in ({} if quick else sizes.ragged).items():
                pairs = zip(benchmark.cases(size), benchmark.cases(aligned))
                cases += [case._replace(beside=neighbour.name) for case, neighbour in pairs]
    return cases


def sequence_cases(device, ops=tuple(BENCHMARKS), quick=False):
    """Returns the SequenceCases of some operators; if quick, one of each operator."""
    cases = []
    for op in ops:
        if sizes := BENCHMARKS[op].sequence_sizes.get(device):
            of_op = [SequenceCase(BENCHMARKS[op], size, True) for size in sizes.named]
            of_op += [SequenceCase(BENCHMARKS[op], size, False) for size in sizes.sweep]
            cases += of_op[:1] if quick else of_op
    return cases


def precisions(device, dtypes):
    """Returns the precisions of sequences' products. GPUs also take float32 rounded to TF32."""
    both = ("float32", "tf32") if device == "GPU" else ("float32",)
    return [precision for dtype in dtypes for precision in (both if dtype == "float32" else (dtype,))]


def cell_cases(device, ops=tuple(BENCHMARKS), quick=False):
    """Returns the CellCases of some operators. Their sizes are the named ones of the kernels, unless an operator has
    others for its Cells."""
    cases = []
    for op in ops:
        benchmark = BENCHMARKS[op]
        named = [size for sizes in benchmark.sizes.get(device, ()) for size in sizes.named]
        sizes = benchmark.cell_sizes.get(device, named)
        cases += [CellCase(benchmark, size) for size in sizes[: 1 if quick else None]]
    return cases
