"""The C entries by themselves: what a valid call writes, and that every other call is refused without a trace."""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from child import ROOT, run_python
from msops.library import of_package
from msops.operators.sigmoid import forward as _sigmoid
from msops.testing.entry import Param, Status, call, has_gpu_code, prepare_operator

DTYPES = ("float16", "float32", "float64")
GUARD_BYTES = b"\xa5" * 256  # lie before and after each array
GUARD = len(GUARD_BYTES)


class Case(NamedTuple):
    """A call, its parameters written as "input[shape] ... -> output[shape] ...", with "partial" for scratch.

    No parameter's length can change alone, except the `loose` ones: pairs of a parameter and an axis.
    """

    entry: str
    signature: str
    attributes: dict | tuple = ()
    loose: tuple = (("partial", 0),)

    @property
    def library(self):
        name = re.sub("Forward$|(Backward)+$", "", self.entry)
        return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

    def call(self, **arguments):
        return call(getattr(of_package(self.library), self.entry), **arguments)

    def shapes(self):
        parameters = re.findall(r"(\w+)\[([\d,]*)\]", self.signature)
        return {name: tuple(int(n) for n in shape.split(",") if n) for name, shape in parameters}

    def is_output(self, name):
        return f" {name}[" in self.signature.split("->")[1]

    def takes_any_rank(self, name):
        return self.library in ("add", "sigmoid") and name != "partial"


# Kernels of 3 x 2 taps that reach over 5 x 2 pixels of images, which are padded from 7 x 5 to 9 x 7.
CONV = dict(
    stride_h=2, stride_w=1, dilation_h=2, dilation_w=1, pad_mode=2, pad_top=2, pad_bottom=0, pad_left=0, pad_right=2,
    has_bias=0,
)  # fmt: skip
BIASED = {**CONV, "has_bias": 1}

CASES = [
    Case("AddForward", "x[3,1,4] y[5,1] -> out[3,5,4]"),
    Case("AddBackward", "dout[3,5,4] x[3,1,4] -> dx[3,1,4] partial[1,1]", loose=(("dout", 1),)),
    Case("AddBackward", "dout[3,5,4] x[3,1,4] -> dx[3,1,4] partial[2,12]", loose=(("dout", 1), ("partial", 0))),
    Case("SigmoidForward", "x[3,5] -> y[3,5]"),
    Case("SigmoidBackward", "y[3,5] dy[3,5] -> dx[3,5]"),
    Case("SigmoidBackwardBackward", "y[3,5] dy[3,5] ddx[3,5] -> gradient_y[3,5] gradient_dy[3,5]"),
    Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[8,1,3,2] -> out[2,8,3,6]", CONV, loose=(("x", 2),)),
    Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[8,1,3,2] bias[8] -> out[2,8,3,6]", BIASED, loose=(("x", 2),)),
    Case(
        "DepthwiseConv2dBackward",
        "x[2,4,7,5] weight[8,1,3,2] dout[2,8,3,6] -> dx[2,4,7,5] dweight[8,1,3,2] partial[3,56]",
        CONV,
    ),
    Case(
        "DepthwiseConv2dBackward",
        "x[2,4,7,5] weight[8,1,3,2] dout[2,8,3,6] -> dx[2,4,7,5] dweight[8,1,3,2] dbias[8] partial[3,56]",
        BIASED,
    ),
    Case("LLTMForward", "product[3,15] bias[15] c[3,5] -> new_h[3,5] new_c[3,5]"),
    Case(
        "LLTMBackward",
        "product[3,15] bias[15] c[3,5] dnew_h[3,5] dnew_c[3,5] -> dproduct[3,15] dbias[15] dc[3,5] partial[2,15]",
    ),
    Case(
        "LLTMSequenceForward",
        "product[4,3,15] weight[15,5] bias[15] h[3,5] c[3,5] lengths[3] -> "
        "output[4,3,5] last_h[3,5] last_c[3,5] gates[4,3,15] cells[4,3,5] partial[3072]",
        dict(reverse=0, allow_tf32=0),
        loose=(),
    ),
    Case(
        "LLTMSequenceBackward",
        "weight[15,5] gates[4,3,15] cells[4,3,5] output[4,3,5] h[3,5] lengths[3] doutput[4,3,5] dlast_h[3,5] "
        "dlast_c[3,5] -> dgates[4,3,15] hidden_before[4,3,5] dh[3,5] dc[3,5] partial[3072]",
        dict(reverse=1, allow_tf32=1),
        loose=(),
    ),
    Case("TrilinearInterpolationForward", "feats[3,8,5] points[3,3] -> out[3,5]"),
    Case("TrilinearInterpolationBackward", "feats[3,8,5] points[3,3] dout[3,5] -> dfeats[3,8,5] dpoints[3,3]"),
]

# Valid, too: arrays without axes or without elements.
EDGE_CASES = [
    Case("AddForward", "x[] y[3] -> out[3]"),
    Case("AddForward", "x[] y[] -> out[]"),
    Case("AddForward", "x[0,1] y[3] -> out[0,3]"),
    Case("AddBackward", "dout[3] x[] -> dx[] partial[1,1]"),
    Case("AddBackward", "dout[0,3] x[3] -> dx[3] partial[1,1]"),
    Case("AddBackward", "dout[0,3] x[3] -> dx[3] partial[2,3]"),
    Case("SigmoidForward", "x[] -> y[]"),
    Case("SigmoidForward", "x[3,0] -> y[3,0]"),
    Case("SigmoidBackward", "y[] dy[] -> dx[]"),
    Case("SigmoidBackward", "y[3,0] dy[3,0] -> dx[3,0]"),
    Case("DepthwiseConv2dForward", "x[0,4,7,5] weight[8,1,3,2] bias[8] -> out[0,8,3,6]", BIASED),
    Case(
        "DepthwiseConv2dBackward",
        "x[0,4,7,5] weight[8,1,3,2] dout[0,8,3,6] -> dx[0,4,7,5] dweight[8,1,3,2] dbias[8] partial[3,56]",
        BIASED,
    ),
    Case(  # as many rows as the padding is high, but no columns
        "DepthwiseConv2dBackward",
        "x[1,1,4,1] weight[1,1,1,9] dout[1,1,2147483651,0] -> dx[1,1,4,1] dweight[1,1,1,9] partial[1,10]",
        {**CONV, "stride_h": 1, "pad_top": 2**31 - 1, "pad_right": 0},
    ),
    Case(  # nothing but padding
        "DepthwiseConv2dBackward",
        "x[2,3,0,2] weight[3,1,1,2] dout[2,3,2,1] -> dx[2,3,0,2] dweight[3,1,1,2] dbias[3] partial[2,9]",
        {**BIASED, "stride_h": 1, "dilation_h": 1, "dilation_w": 1, "pad_right": 0},
    ),
    Case("LLTMForward", "product[0,15] bias[15] c[0,5] -> new_h[0,5] new_c[0,5]"),
    Case(
        "LLTMBackward",
        "product[0,15] bias[15] c[0,5] dnew_h[0,5] dnew_c[0,5] -> dproduct[0,15] dbias[15] dc[0,5] partial[2,15]",
    ),
    Case(
        "LLTMSequenceForward",
        "product[0,3,15] weight[15,5] bias[15] h[3,5] c[3,5] lengths[3] -> "
        "output[0,3,5] last_h[3,5] last_c[3,5] gates[0,3,15] cells[0,3,5] partial[3072]",
        dict(reverse=1, allow_tf32=0),
    ),
    Case(
        "LLTMSequenceBackward",
        "weight[0,0] gates[4,3,0] cells[4,3,0] output[4,3,0] h[3,0] lengths[3] doutput[4,3,0] dlast_h[3,0] "
        "dlast_c[3,0] -> dgates[4,3,0] hidden_before[4,3,0] dh[3,0] dc[3,0] partial[1024]",
        dict(reverse=0, allow_tf32=0),
    ),
    Case("TrilinearInterpolationForward", "feats[0,8,5] points[0,3] -> out[0,5]"),
    Case("TrilinearInterpolationBackward", "feats[3,8,0] points[3,3] dout[3,0] -> dfeats[3,8,0] dpoints[3,3]"),
]

# Invalid in more than one length.
AXES = ",".join("1" * 17)
REFUSED_CASES = [
    (Case("AddForward", f"x[{AXES}] y[{AXES}] -> out[{AXES}]"), Status.BAD_RANK),
    (Case("AddForward", "x[2,3] y[3] -> out[3]"), Status.BAD_SHAPE),
    (Case("AddForward", "x[3] y[2,3] -> out[3]"), Status.BAD_SHAPE),
    (Case("AddBackward", f"dout[{AXES}] x[{AXES}] -> dx[{AXES}] partial[1,1]"), Status.BAD_RANK),
    (Case("AddBackward", "dout[3] x[2,3] -> dx[2,3] partial[1,1]"), Status.BAD_SHAPE),
    (Case("AddBackward", "dout[2,3] x[3] -> dx[3] partial[0,3]"), Status.BAD_SHAPE),
    (Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[6,1,3,2] -> out[2,6,3,6]", CONV), Status.BAD_SHAPE),
    (Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[0,1,3,2] -> out[2,0,3,6]", CONV), Status.BAD_SHAPE),
    (
        Case(
            "DepthwiseConv2dBackward",
            "x[2,4,7,5] weight[0,1,3,2] dout[2,0,3,6] -> dx[2,4,7,5] dweight[0,1,3,2] partial[3,0]",
            CONV,
        ),
        Status.BAD_SHAPE,
    ),
    (Case("DepthwiseConv2dForward", "x[2,0,7,5] weight[8,1,3,2] -> out[2,8,3,6]", CONV), Status.BAD_SHAPE),
    (Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[8,1,0,2] -> out[2,8,6,6]", CONV), Status.BAD_SHAPE),
    (Case("DepthwiseConv2dForward", "x[2,4,2,5] weight[8,1,3,2] -> out[2,8,1,6]", CONV), Status.BAD_SHAPE),
    (Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[8,1,3,2] bias[8] -> out[2,8,3,6]", CONV), Status.BAD_RANK),
    (Case("DepthwiseConv2dForward", "x[2,4,7,5] weight[8,1,3,2] -> out[2,8,3,6]", BIASED), Status.BAD_RANK),
]


class Attempt:
    """A case's call, to be made as it is or changed. All arrays lie amid guard bytes: inputs random, outputs NaN."""

    def __init__(self, case, dtype, capfd):
        self.case, self.capfd = case, capfd
        self.memory, self.arrays, self.params = {}, {}, {}
        random = np.random.default_rng(0)
        for name, shape in case.shapes().items():
            own_dtype = "float32" if name == "partial" and dtype == "float16" else dtype
            own_dtype = "int32" if name == "lengths" else own_dtype
            size = math.prod(shape) * np.dtype(own_dtype).itemsize
            memory = np.frombuffer(bytearray(GUARD_BYTES + bytes(size) + GUARD_BYTES), np.uint8)
            array = memory[GUARD : GUARD + size].view(own_dtype).reshape(shape)
            array[...] = np.nan if case.is_output(name) else _values(random, shape, own_dtype)
            self.memory[name], self.arrays[name] = memory, array
            self.params[name] = Param.of(array) if size else Param(None, shape, own_dtype)

    def bytes(self):
        """All that the arrays and their surroundings hold."""
        return {name: memory.tobytes() for name, memory in self.memory.items()}

    def call(self, **changed):
        """Calls the entry, with some arguments of `entry.call` changed. Returns the status and the lines on stderr."""
        arguments = dict(arrays=list(self.params.values()), attributes=self.case.attributes)
        status = self.case.call(**{**arguments, **changed})
        return status, self.capfd.readouterr().err.splitlines()

    def refused(self, expected, **changed):
        """Calls the entry with some arguments changed, which must fail with a status, say why, and write nothing."""
        before = self.bytes()
        status, errors = self.call(**changed)
        assert status == expected, changed
        assert len(errors) == 1, changed
        assert errors[0].startswith(f"msops: {self.case.entry}: "), changed
        assert self.bytes() == before, changed

    def refused_with(self, expected, name, **fields):
        """The same, for a change to one parameter's fields."""
        params = {**self.params, name: self.params[name]._replace(**fields)}
        self.refused(expected, arrays=list(params.values()))


def _values(random, shape, dtype):
    return random.integers(0, 5, shape) if dtype == "int32" else random.normal(size=shape)


def parametrize_cases(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.entry)


@pytest.fixture(params=CASES, ids=lambda case: case.entry)
def case(request):
    return request.param


@pytest.fixture
def dtype():
    return "float32"


@pytest.fixture
def attempt(case, dtype, capfd):
    return Attempt(case, dtype, capfd)


@pytest.mark.parametrize("dtype", DTYPES)
@parametrize_cases(CASES + EDGE_CASES)
def test_valid_call_writes_its_outputs_and_nothing_else(attempt):
    before = attempt.bytes()
    assert attempt.call() == (Status.OK, [])
    after = attempt.bytes()
    for name, array in attempt.arrays.items():
        if not attempt.case.is_output(name):
            assert after[name] == before[name], name
            continue
        assert after[name][:GUARD] == after[name][-GUARD:] == GUARD_BYTES, name
        assert name == "partial" or np.isfinite(array).all(), name


def test_parameter_count(attempt):
    params = list(attempt.params.values())
    for wrong in (params[:-1], params + params[-1:], []):
        attempt.refused(Status.BAD_PARAMETER_COUNT, arrays=wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(attempt):
    for name, param in attempt.params.items():
        for wrong in {"int32", "bfloat16", "", None, *DTYPES} - {param.dtype}:
            attempt.refused_with(Status.BAD_DTYPE, name, dtype=wrong)
    for wrong in ("int32", "complex64", "float"):  # formulas take bfloat16
        attempt.refused(Status.BAD_DTYPE, arrays=[p._replace(dtype=wrong) for p in attempt.params.values()])


def test_ranks(attempt):
    for name, param in attempt.params.items():
        expected = Status.BAD_SHAPE if attempt.case.takes_any_rank(name) else Status.BAD_RANK
        attempt.refused_with(expected, name, shape=(*param.shape, 1))
        attempt.refused_with(expected, name, shape=param.shape[:-1])
        attempt.refused_with(Status.BAD_RANK, name, rank=-1)


def test_lengths(attempt):
    for name, param in attempt.params.items():
        for axis, length in enumerate(param.shape):
            wrongs = [-1, -(2**63), 2**62, 2**63 - 1]
            if (name, axis) not in attempt.case.loose:
                wrongs += [length + 1, length - 1, length + 2**31, length + 2**32]
            for wrong in wrongs:
                shape = (*param.shape[:axis], wrong, *param.shape[axis + 1 :])
                attempt.refused_with(Status.BAD_SHAPE, name, shape=shape)


def test_null_pointers(attempt):
    for name, param in attempt.params.items():
        attempt.refused_with(Status.NULL_POINTER, name, pointer=None)
        attempt.refused_with(Status.NULL_POINTER, name, shape=None, rank=len(param.shape))


@parametrize_cases([case for case in CASES if case.attributes])
def test_attributes(attempt):
    attributes = attempt.case.attributes
    attempt.refused(Status.BAD_ATTRIBUTE, attributes=None)
    for name in attributes:
        attempt.refused(Status.BAD_ATTRIBUTE, attributes={key: n for key, n in attributes.items() if key != name})
        for wrong in (-1, 2**40):
            attempt.refused(Status.BAD_ATTRIBUTE, attributes={**attributes, name: wrong})


def test_prepared_operator():
    x, y = np.array([0, 1000], np.float32), np.empty(2, np.float32)
    prepare_operator(_sigmoid, [x, y])()
    np.testing.assert_array_equal(y, [0.5, 1])


def test_strided_array():
    with pytest.raises(ValueError, match=r"^an entry takes contiguous arrays only$"):
        Param.of(np.zeros((2, 3)).T)


def test_stream_without_gpu_code(attempt):
    if has_gpu_code(attempt.case.library):
        pytest.skip("this library has GPU code, which would run")
    attempt.refused(Status.NO_GPU_CODE, stream=1)


@pytest.mark.parametrize(("case", "status"), REFUSED_CASES, ids=lambda value: getattr(value, "entry", None))
def test_refused_cases(attempt, status):
    attempt.refused(status)


@parametrize_cases([case for case in CASES if len(case.shapes().get("partial", ())) == 2])
def test_scratch_rows(attempt):
    columns = attempt.params["partial"].shape[1]
    attempt.refused_with(Status.BAD_SHAPE, "partial", shape=(0, columns))
    if attempt.case.library == "depthwise_conv2d":  # where rows are blocks of a grid's y axis
        attempt.refused_with(Status.BAD_SHAPE, "partial", shape=(65536, columns))


def test_scratch_whose_size_overflows(capfd):
    batch, arrays = 2**58, []
    shapes = dict(product=(0, batch, 3), weight=(3, 1), bias=(3,), h=(batch, 1), c=(batch, 1), lengths=(batch,))
    outputs = dict(output=(0, batch, 1), last_h=(batch, 1), last_c=(batch, 1), gates=(0, batch, 3), cells=(0, batch, 1))
    for name, shape in {**shapes, **outputs, "partial": (1024,)}.items():  # 2^66 + 1024, as far as 64 bits can tell
        arrays.append(Param(16, shape, "int32" if name == "lengths" else "float32"))
    entry = of_package("lltm_sequence").LLTMSequenceForward
    assert call(entry, arrays, attributes=dict(reverse=0, allow_tf32=0)) == Status.BAD_SHAPE
    assert "no memory can hold" in capfd.readouterr().err


def test_all_entries_are_fuzzed():
    sources = [*ROOT.glob("aot_kernels/*.cu"), *ROOT.glob("examples/*/*.cu")]
    entries = re.findall(r"^MSOPS_\w+\((\w+)[,)]", "".join(source.read_text() for source in sources), re.MULTILINE)
    assert "SigmoidForward" in entries
    fuzzed = re.findall(r"ENTRY\((\w+)\), ", (ROOT / "tests" / "fuzz_entries.cc").read_text())
    assert sorted(fuzzed) == sorted(entries)


# Large enough for threads, and of lengths that no number of threads divides.
LARGE_CASES = [
    Case("AddForward", "x[997,509] y[509] -> out[997,509]"),
    Case("AddBackward", "dout[997,509] x[509] -> dx[509] partial[1,1]"),
    Case("AddBackward", "dout[997,509] x[997,1] -> dx[997,1] partial[3,997]"),
    Case("SigmoidForward", "x[500009] -> y[500009]"),
    Case("DepthwiseConv2dForward", "x[3,7,100,101] weight[14,1,3,2] bias[14] -> out[3,14,49,102]", BIASED),
    Case(
        "DepthwiseConv2dBackward",
        "x[3,7,100,101] weight[14,1,3,2] dout[3,14,49,102] -> "
        "dx[3,7,100,101] dweight[14,1,3,2] dbias[14] partial[3,98]",
        BIASED,
    ),
    Case("LLTMForward", "product[61,1539] bias[1539] c[61,513] -> new_h[61,513] new_c[61,513]"),
    Case(
        "LLTMBackward",
        "product[61,1539] bias[1539] c[61,513] dnew_h[61,513] dnew_c[61,513] -> "
        "dproduct[61,1539] dbias[1539] dc[61,513] partial[7,1539]",
    ),
    Case(
        "LLTMSequenceForward",
        "product[9,61,309] weight[309,103] bias[309] h[61,103] c[61,103] lengths[61] -> output[9,61,103] "
        "last_h[61,103] last_c[61,103] gates[9,61,309] cells[9,61,103] partial[66560]",
        dict(reverse=0, allow_tf32=0),
    ),
    Case(
        "LLTMSequenceBackward",  # of few samples: threads share the units
        "weight[1539,513] gates[9,3,1539] cells[9,3,513] output[9,3,513] h[3,513] lengths[3] doutput[9,3,513] "
        "dlast_h[3,513] dlast_c[3,513] -> dgates[9,3,1539] hidden_before[9,3,513] dh[3,513] dc[3,513] partial[35840]",
        dict(reverse=0, allow_tf32=0),
    ),
    Case("TrilinearInterpolationForward", "feats[1009,8,65] points[1009,3] -> out[1009,65]"),
    Case(
        "TrilinearInterpolationBackward",
        "feats[1009,8,65] points[1009,3] dout[1009,65] -> dfeats[1009,8,65] dpoints[1009,3]",
    ),
]


def print_results():
    """A number for each of the large cases, from all bits of its outputs."""
    for case in LARGE_CASES:
        attempt = Attempt(case, "float32", None)
        assert case.call(arrays=list(attempt.params.values()), attributes=case.attributes) == Status.OK
        print(case.entry, [zlib.crc32(array) for array in attempt.arrays.values()])


def test_results_do_not_depend_on_the_number_of_threads():
    printed = set()
    for threads in (1, 2, 5):
        code = "import test_entries; test_entries.print_results()"
        done = run_python("-c", code, cwd=Path(__file__).parent, OMP_NUM_THREADS=str(threads))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == len(LARGE_CASES)
        printed.add(done.stdout)
    assert len(printed) == 1
