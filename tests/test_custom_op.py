"""Tests msops.custom_op, once and broadcast through MindSpore, in both modes."""

import copy
import ctypes
import gc
import re
import resource
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from child import run_python
from msops import Spec, compat, custom_op
from msops.core import primitive
from msops.core.open_sizes import sizes_of_outputs
from msops.core.primitive import Primitive
from operator_test import Gradient, Net, check_training, load_kernels, run, wide_in_graph_mode

X = np.array([1, 2, 3], np.float32)


@pytest.fixture(scope="module")
def library():
    return load_kernels("custom_op")


def make_cube(library, derivatives=1):
    """Makes an operator that has `derivatives` derivatives."""
    second = custom_op(library.CubeBackwardBackward, "x, dy, ddx -> dx, ddy")
    first = custom_op(library.CubeBackward, "x, dy -> dx", gradient=second if derivatives > 1 else None)
    return custom_op(library.Cube, "x -> y", gradient=first)


def filled(library, n, value=1.0):
    """Returns an operator whose rule is a closure over n."""

    def infer(x, value):
        return Spec((n,), x.dtype)

    return custom_op(library.Filled, "x -> out", infer=infer, value=value)


def scaled(library, factor):
    """Returns an operator whose gradient is a closure over a factor."""

    def gradient(x, y, dy):
        return (factor * dy,)

    return custom_op(library.Cube, "x -> y", gradient=gradient)


def gradient_of(op, x, dy=None):
    return Gradient(Net(op), 1)(Tensor(x), Tensor(np.ones_like(x) if dy is None else dy)).asnumpy()


def test_any_shape(mode, library):
    op = make_cube(library)
    for shape in ((), (0,), (1,), (2, 3, 4)):
        for dtype in (np.float16, np.float32, np.float64):
            (y,) = run(Net(op), np.full(shape, 2, dtype))
            np.testing.assert_array_equal(y, np.full(shape, 8))
            assert (y.dtype, y.shape) == (dtype, shape)


def test_several_outputs(mode, library):
    backward = custom_op(library.BothBackward, "x, y, dsum, dproduct -> dx, dy")
    op = custom_op(library.Both, "x(*S), y(*S) -> sum(*S), product(*S)", gradient=backward)
    total, product = run(Net(op), X, 2 * X)
    np.testing.assert_array_equal(total, 3 * X)
    np.testing.assert_array_equal(product, 2 * X * X)
    ones = Tensor(np.ones_like(X))
    dx, dy = Gradient(Net(op), 2)(Tensor(X), Tensor(2 * X), ones, 10 * ones)
    np.testing.assert_array_equal(dx.asnumpy(), 1 + 20 * X)
    np.testing.assert_array_equal(dy.asnumpy(), 1 + 10 * X)


def test_gradient_of_some_inputs(mode, library):
    """Inputs that the gradient's operator leaves out get zeros."""
    backward = custom_op(library.CubeBackward, "y, dsum -> dy")
    op = custom_op(library.Both, "x, y -> sum, product", gradient=backward)
    ones = Tensor(np.ones_like(X))
    dx, dy = Gradient(Net(op), 2)(Tensor(X), Tensor(2 * X), ones, ones)
    np.testing.assert_array_equal(dx.asnumpy(), 0 * X)
    np.testing.assert_array_equal(dy.asnumpy(), 12 * X * X)


def test_expressions_of_sizes_and_attributes(mode, library):
    op = custom_op(library.Filled, "x(*S, K) -> out(2 * K, *S, more)", value=3.0, more=2)
    (out,) = run(Net(op), np.zeros((2, 3, 5), np.float32))
    np.testing.assert_array_equal(out, np.full((10, 2, 3, 2), 3))


def test_input_of_another_dtype(mode, library):
    op = custom_op(library.Take, "x(N), index(M, dtype=int32) -> out(M)")
    index = np.array([2, 0, 2, 1], np.int32)
    for dtype in (np.float16, np.float64):
        (out,) = run(Net(op), X.astype(dtype), index)
        np.testing.assert_array_equal(out, X[index])
    with pytest.raises(TypeError, match="custom_op_test: index must be int32, got float32"):
        run(Net(op), X, X)


def test_error_of_the_c_entry(mode, library, device_target, capfd):
    """MindSpore's error tells the operator and the reason on the CPU; on a GPU, stderr does."""
    name = "a label of more than 8 characters, one of them beyond 127: é"
    op = custom_op(library.Take, "x(N), index(M, dtype=int64) -> out(M)", name=name)
    words = f"{name}: index is int64, expected int32 (Take)"
    with pytest.raises(RuntimeError, match="AOT" if device_target == "GPU" else re.escape(words)):
        run(Net(op), X, np.zeros(3, np.int64))
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("msops: ")
    ]  # MindSpore may say more
    assert said == [f"msops: {words}"] * (device_target == "GPU")


@pytest.mark.parametrize(
    "bits", [0x7FF0DEADBEEF0001, -(2**63), 1, 0x000FFFFFFFFFFFFF, 0x3D719799812DEA11, 0xFFF0 << 48]
)
def test_float_attributes_are_exact(mode, library, bits):
    """Attributes keep every bit of NaN with a payload, -0, subnormal numbers, 1e-12 and -infinity."""
    (value,) = struct.unpack("d", struct.pack("Q", bits % 2**64))
    op = custom_op(library.Attributes, "x -> bits(1, dtype=int64), number(1, dtype=int64)", value=value, count=1)
    got, _ = run(Net(op), X)
    assert got.astype(np.uint64)[0] == bits % 2**64


def test_float_attributes_that_are_nearly_equal(mode, library):
    for value in (0.0, -0.0, 1e-12, np.nextafter(1e-12, 1)):
        (out,) = run(Net(filled(library, 1, float(value))), X.astype(np.float64))
        assert out.tobytes() == np.float64(value).tobytes()


@pytest.mark.parametrize("count", [0, -1, 2**63 - 1, -(2**63), True, False])
def test_integer_attributes_are_exact(mode, library, count):
    op = custom_op(library.Attributes, "x -> bits(1, dtype=int64), number(1, dtype=int64)", value=0.0, count=count)
    assert run(Net(op), X)[1][0] == count


def test_equal_arguments_give_the_same_operator(library):
    def infer(x, **attributes):
        return x

    def gradient(x, y, dy):
        return (dy,)

    class Rules:
        def infer(self, x, value):
            return x

    rules = Rules()

    def make(signature="x -> y", rule=infer, gradient=gradient, **others):
        return custom_op(library.Cube, signature, infer=rule, gradient=gradient, **others)

    assert make() is make()
    assert make(value=1.0) is make(value=1.0)
    assert make(value=float("nan")) is make(value=float("nan"))
    methods = make(rule=rules.infer, value=1.0), make(rule=rules.infer, value=1.0)
    assert methods[0] is methods[1]
    assert custom_op(load_kernels("custom_op").Cube, "x -> y") is custom_op(library.Cube, "x -> y")
    different = [
        *(
            make(),
            make("x -> z"),
            make(rule=None),
            make(gradient=None),
            make(name="name"),
            make(value=1),
            make(value=1.0),
        ),
        *(make(value=0.0), make(value=-0.0), make(other=1), make(dtypes=(mindspore.float32,)), methods[0]),
        make(rule=Rules().infer, value=1.0),
    ]
    assert len({op.number for op in different}) == len(different)


def test_threads_get_the_same_operator(library):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for n in range(50):
                made = list(pool.map(lambda _, n=n: custom_op(library.Cube, "x -> y", n=n), range(8)))
                assert len(set(map(id, made))) == 1
    finally:
        sys.setswitchinterval(interval)


class Sum(nn.Cell):
    def __init__(self, op, other):
        super().__init__()
        self.op, self.other = op, other

    def construct(self, x):
        return self.op(x) + 10 * self.other(x)


def shapes_of_closures(library):
    return [run(Net(filled(library, n)), X)[0].shape for n in (3, 5, 2)]


def gradient_of_closures(library):
    return gradient_of(Sum(scaled(library, 3), scaled(library, 5)), X)[0]


def test_rules_that_are_closures(mode, library):
    """MindSpore caches the results of a rule under the primitive's attributes, which closures must not share."""
    assert shapes_of_closures(library) == [(3,), (5,), (2,)]


def test_gradients_that_are_closures(mode, library):
    """MindSpore caches gradients under the primitive's attributes, too."""
    assert gradient_of_closures(library) == 53


def test_operators_need_their_numbers(library, monkeypatch):
    """Without their numbers, MindSpore takes one operator for another, and the two tests above fail."""
    add = Primitive.add_prim_attr
    monkeypatch.setattr(
        Primitive, "add_prim_attr", lambda op, key, value: op if key == "msops_operator" else add(op, key, value)
    )
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    assert shapes_of_closures(library) == [(3,), (3,), (3,)]
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    assert gradient_of_closures(library) != 53


def resident():
    """Returns how many bytes this process has in memory, MindSpore's included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def opened():
    """Returns the number of open files, and that of the mapped parts of the test's libraries."""
    return len([*Path("/proc/self/fd").iterdir()]), Path("/proc/self/maps").read_text().count("custom_op_test")


@pytest.mark.wide  # sys.monitoring, by which coverage may be measured, keeps the code of all functions
def test_many_operators(library):
    """Making one operator 1,200 times takes no memory and opens nothing; 600 different ones leave nothing behind."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    op = make_cube(library)

    def make(count):
        for i in range(count):
            assert make_cube(library) is op
            if i % 4 == 0:
                filled(library, i), scaled(library, i)
            if i % 100 == 0:
                op(Tensor(X))
        gc.collect()

    def growth(count):
        before = sys.getallocatedblocks()  # bytes would also count where a dict moves to a larger block
        make(count)
        return sys.getallocatedblocks() - before

    make(100)
    before, held = opened(), resident()
    make(1200)  # full caches drop an operator for each that they get
    assert growth(1200) < 300  # less than one for each different operator
    assert resident() - held < 2**23
    assert opened() == before


def test_many_shapes(library, monkeypatch):
    """An operator keeps the inferred results of only some shapes."""
    monkeypatch.setattr(primitive, "_KEPT", 3)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    op = custom_op(library.Cube, "x -> y", name="many_shapes")
    for n in (*range(1, 9), 1, 8):
        assert op(Tensor(np.full(n, 2, np.float32))).asnumpy().tolist() == [8] * n
        assert 0 < len(op.primitive._inferred) <= 3


def test_library_by_a_variable(mode, library, monkeypatch):
    """From 2.7 on, MindSpore gets the name of the variable, not the path."""
    monkeypatch.setenv("CUSTOM_OP_TEST", "")
    named = msops.Library(library.path, variable="CUSTOM_OP_TEST")
    op = custom_op(named.Cube, "x -> y")
    assert Net(op)(Tensor(X)).asnumpy().tolist() == [1, 8, 27]
    assert (op.primitive.func == "CUSTOM_OP_TEST:Cube") == (compat.VERSION >= (2, 7))


def test_operators_that_come_again(library):
    """An operator that is made again has its earlier number, so that MindSpore does not compile it again."""

    def numbers():
        op = make_cube(library, derivatives=2)
        return op.number, op.gradient.number, op.gradient.gradient.number

    before = numbers()
    gc.collect()
    assert numbers() == before


def test_second_order(mode, library):
    """The second derivative is the gradient that the author gave to the gradient's operator."""
    if mode == "pynative" and compat.VERSION == (2, 0):
        pytest.skip("MindSpore 2.0 crashes")
    op = make_cube(library, derivatives=2)

    class First(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = Net(op)

        def construct(self, x):
            return ops.grad(self.net)(x)

    np.testing.assert_array_equal(First()(Tensor(X)).asnumpy(), 3 * X * X)
    np.testing.assert_array_equal(ops.grad(First())(Tensor(X)).asnumpy(), 6 * X)


def test_third_order(mode, library):
    """The third derivative needs a function, since ddx is an input already."""
    if mode == "pynative" and compat.VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 fails")
    third = custom_op(library.CubeThird, "x, dy, g, a, b -> dx, ddy, dg")

    def gradient(x, dy, ddx, out, dout):
        return third(x, dy, ddx, dout[0], dout[1])

    second = custom_op(library.CubeBackwardBackward, "x, dy, ddx -> dx, ddy", gradient=gradient)
    first = custom_op(library.CubeBackward, "x, dy -> dx", gradient=second)
    net = Net(custom_op(library.Cube, "x -> y", gradient=first))
    np.testing.assert_array_equal(ops.grad(ops.grad(ops.grad(net)))(Tensor(X)).asnumpy(), np.full_like(X, 6))


def test_deepcopy(mode, library):
    net = Net(make_cube(library))
    np.testing.assert_array_equal(run(copy.deepcopy(net), X)[0], X**3)
    assert copy.deepcopy(net.operator) is net.operator


PROGRAM = """
import sys
import mindspore, msops
from mindspore import Tensor, nn, ops
from msops.compat import set_device

library = msops.Library(sys.argv[1])
backward = msops.custom_op(library.BothBackward, "x, y, dsum, dproduct -> dx, dy")
both = msops.custom_op(library.Both, "x, y -> sum, product", gradient=backward)

class Net(nn.Cell):
    def construct(self, x):
        return both(x, x)[1]

set_device("CPU")
mindspore.set_context(mode=mindspore.GRAPH_MODE)
print(ops.grad(Net())(Tensor([3.0])))
"""


@pytest.mark.parametrize("cache", [pytest.param("cache", marks=pytest.mark.wide), "/proc/nowhere"])
def test_files_of_gradients(library, tmp_path, cache):
    """MindSpore looks for files of gradients and prints errors if there are none. Where the files cannot be kept,
    everything still works."""
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"GLOG_v": "2", "MSOPS_CACHE": str(tmp_path / cache)}
    done = run_python(tmp_path / "program.py", library.path, cwd=tmp_path, **variables)
    assert done.stdout == "[6.]\n", done.stderr
    assert ("gradient" in done.stderr) == (cache != "cache" and compat.VERSION >= (2, 7))


def test_jit(library):
    op = make_cube(library)

    @compat.jit
    def function(x):
        return 2 * op(x)

    np.testing.assert_array_equal(function(Tensor(X)).asnumpy(), 2 * X**3)
    np.testing.assert_array_equal(ops.grad(function)(Tensor(X)).asnumpy(), 6 * X**2)


def test_value_and_grad_and_training(mode, library):
    op = make_cube(library)

    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.factor = mindspore.Parameter(Tensor([1, 2, 3], mindspore.float32), name="factor")

        def construct(self, x):
            return op(self.factor * x)

    check_training(Scaled(), X / 10)


def test_gradient_that_is_a_method(mode, library):
    class Layer(nn.Cell):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor
            self.op = custom_op(library.Cube, "x -> y", gradient=self.backward)

        def backward(self, x, y, dy):
            return (self.factor * dy,)

        def construct(self, x):
            return self.op(x)

    for factor in (3, 5):
        np.testing.assert_array_equal(gradient_of(Layer(factor), X), factor * np.ones_like(X))


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (TypeError("x must be blue"), TypeError, "custom_op_test: x must be blue"),
        (ValueError("x must be blue"), ValueError, "custom_op_test: x must be blue"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "why"), ValueError, "custom_op_test: 'utf-8' codec can't decode"),
        (KeyError("blue"), RuntimeError, "custom_op_test: infer raised KeyError: 'blue'"),
        (
            ZeroDivisionError("division by zero"),
            RuntimeError,
            "custom_op_test: infer raised ZeroDivisionError: division",
        ),
        (StopIteration(), RuntimeError, "custom_op_test: infer raised StopIteration: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_infer_that_raises(mode, library, raised, error, message):
    def infer(x):
        raise raised

    with pytest.raises(error, match=f"^{re.escape(message)}"):
        run(Net(custom_op(library.Cube, "x -> y", infer=infer)), X)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, "infer must return a Spec for each output, got None"),
        ((3,), TypeError, "infer must return a Spec for each output, got (3,)"),
        ([], ValueError, "infer must return 1 outputs (y), got 0"),
        ([Spec((3,), mindspore.float32)] * 2, ValueError, "infer must return 1 outputs (y), got 2"),
        (Spec((-1,), mindspore.float32), ValueError, "infer must return sizes of at least 0 for y, got (-1,)"),
        (Spec((1.5,), mindspore.float32), ValueError, "infer must return sizes of at least 0 for y, got (1.5,)"),
        (Spec(3, mindspore.float32), ValueError, "infer must return sizes of at least 0 for y, got 3"),
        (Spec((3,), "float32"), TypeError, "infer must return a dtype of MindSpore for y, got float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_infer_that_returns_something_else(mode, library, returned, error, message):
    op = custom_op(library.Cube, "x -> y", infer=lambda x: returned)
    with pytest.raises(error, match=f"^custom_op_test: {re.escape(message)}$"):
        run(Net(op), X)


def test_infer_of_other_arguments(library):
    op = custom_op(library.Cube, "x -> y", infer=lambda: None)
    with pytest.raises(TypeError, match=r"^custom_op_test: .* takes 0 positional arguments but 1 was given$"):
        op.infer(Spec((3,), mindspore.float32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(gradient=lambda x, dy: dy), TypeError, "name: gradient must take (x, y, dy), got a function of (x, dy)"),
        (dict(gradient=3), TypeError, "name: gradient must be callable, got int"),
        (dict(infer=3), TypeError, "name: infer must be callable, got int"),
        (dict(value="1"), TypeError, "name: attribute value must be an int, a float or a bool, got str"),
        (dict(value=[1]), TypeError, "name: attribute value must be an int, a float or a bool, got list"),
        (dict(value=2**63), ValueError, "name: attribute value must fit into 64 bits, got 9223372036854775808"),
        (dict(signature="x"), ValueError, "signature 'x': there must be one ->"),
        (dict(signature=None), TypeError, "name: signature must be a str, got NoneType"),
        (dict(signature=["x -> y"]), TypeError, "name: signature must be a str, got list"),
        (dict(dtypes=mindspore.float32), TypeError, "name: dtypes must be a tuple of MindSpore's dtypes, got Float32"),
        (dict(dtypes=("float32",)), TypeError, "name: dtypes must be a tuple of MindSpore's dtypes, got ('float32',)"),
        (dict(dtypes=()), ValueError, "name: dtypes must have at least one dtype, got ()"),
        (dict(name=3), TypeError, "custom_op: name must be a str, got int"),
        (
            dict(signature="x -> y(3)", infer=lambda x: x),
            ValueError,
            "name: the sizes of outputs must come from infer or the signature, not both: with infer, write y in place "
            "of y(3,)",
        ),
        (
            dict(signature="x -> y, place(dtype=int32)", infer=lambda x: x),
            ValueError,
            "name: the sizes of outputs must come from infer or the signature, not both: with infer, write "
            "place(..., dtype=int32) in place of place()",
        ),
        (dict(entry="Cube"), TypeError, "custom_op: entry must be a function of a Library, got str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments(library, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        custom_op(**{"entry": library.Cube, "signature": "x -> y", "name": "name", **arguments})


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("x, z, dy -> dx", "gradient takes z; there are the inputs x, the outputs y and their gradients dy"),
        ("x, dx -> dz", "gradient takes dx; there are the inputs x, the outputs y and their gradients dy"),
        ("x, dy -> dz", "gradient gives dz, but the gradients of the inputs x are called dx; did you mean dx?"),
        (
            "x, dy -> sum",
            "gradient gives sum, but the gradients of the inputs x are called dx; scratch follows a semicolon",
        ),
    ],
)
def test_gradient_of_unknown_names(library, signature, message):
    backward = custom_op(library.CubeBackward, signature)
    with pytest.raises(ValueError, match=f"^custom_op_test: {re.escape(message)}$"):
        custom_op(library.Cube, "x -> y", gradient=backward)


MISTAKE = """
import sys
import msops

library = msops.Library(sys.argv[1])
backward = msops.custom_op(library.CubeBackward, "x, g -> dx")
for signature in ("x -> y", "x -> y; s(3)"):
    try:
        msops.custom_op(library.Cube, signature, gradient=backward, name="cube")
    except ValueError as error:
        trace = error.__traceback__
        while trace.tb_next:
            trace = trace.tb_next
            if "self" in trace.tb_frame.f_locals:
                made = dict(trace.tb_frame.f_locals)["self"]
                print(hasattr(made, "anything"), made)
"""


def test_repr_of_what_could_not_be_made(library, tmp_path):
    """pytest shows an exception with the repr of each self; here a process of its own does so, since it might crash."""
    done = run_python("-c", MISTAKE, library.path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain, scratch = "False Operator(cube: x -> y)", "Operator(cube: x -> y; s(3))"
    own = f"False Primitive({scratch})"
    assert done.stdout.splitlines() == [plain] * 2 + [f"False {scratch}", own]


def test_gradient_of_ambiguous_names(mode, library):
    """An operator with an input dy and an output y needs a function, which tells dy from the gradient of y."""
    backward = custom_op(library.CubeBackward, "x, dy -> dx")
    message = "gradient must be a function, since dy would be both an input and the gradient of an output"
    for signature in ("x, dy -> y", "x, dy -> y, z"):
        with pytest.raises(ValueError, match=f"^custom_op_test: {message}$"):
            custom_op(library.Both, signature, gradient=backward)

    def gradient(x, dy, y, dout):
        return 2 * dout, 3 * dout

    op = custom_op(library.CubeBackward, "x, dy -> y", gradient=gradient)
    dx, dy = Gradient(Net(op), 2)(Tensor(X), Tensor(X), Tensor(X))
    np.testing.assert_array_equal(dx.asnumpy(), 2 * X)
    np.testing.assert_array_equal(dy.asnumpy(), 3 * X)


def gives_one(x, y, out, dout):
    return (x,)


def gives_three(x, y, out, dout):
    return x, x, x


def gives_no_tuple(x, y, out, dout):
    return x


@pytest.mark.parametrize("gradient", [gives_one, gives_three, gives_no_tuple])
def test_gradient_that_returns_something_else(mode, library, gradient):
    net = Gradient(Net(custom_op(library.Both, "x, y -> sum, product", gradient=gradient)), 2)
    ones = Tensor(np.ones_like(X))
    with pytest.raises(ValueError, match=r"custom_op_test: gradient must return a tuple \(dx, dy\)"):
        net(Tensor(X), Tensor(X), ones, ones)


needs_open_sizes = pytest.mark.skipif(compat.VERSION < (2, 7), reason="graph mode has no open sizes")


def open_net(op, *shape):
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Net(op)
    net.set_inputs(Tensor(shape=shape, dtype=mindspore.float32))
    return net


def test_unknown_size_without_entry(library):
    """A C function that is not an MSOPS_ENTRY cannot ask for sizes."""
    net = open_net(custom_op(library.NoEntry, "x -> y"), None, 4)
    with pytest.raises(ValueError, match="custom_op_test: x must have a shape known at compile time"):
        net(Tensor(np.ones((2, 4), np.float32)))


@needs_open_sizes
def test_sizes_that_do_not_fit_when_the_graph_runs(library):
    """The error has the message of the rule."""

    def rule(x):
        if x.shape[0] == 3:
            raise ValueError("x must not have 3 rows")
        return x

    net = open_net(custom_op(library.Cube, "x -> y", infer=rule), None, 2)
    net(Tensor(np.ones((2, 2), np.float32)))
    with pytest.raises(RuntimeError, match="x must not have 3 rows"):
        net(Tensor(np.ones((3, 2), np.float32)))


def test_more_sizes_than_the_library_has_room_for(library, monkeypatch):
    op = make_cube(library)
    monkeypatch.setattr(op, "input_dtypes", [mindspore.float32], raising=False)
    shape, sizes, message = (ctypes.c_int64 * 2)(3, 2), (ctypes.c_int64 * 3)(), ctypes.create_string_buffer(1024)
    inputs = (ctypes.c_int * 1)(2), (ctypes.POINTER(ctypes.c_int64) * 1)(shape)
    assert sizes_of_outputs(op.number, *inputs, sizes, 3, message) == 1
    assert list(sizes) == [2, 3, 2]
    assert sizes_of_outputs(op.number, *inputs, sizes, 2, message) == 0
    assert message.value == b"custom_op_test: the outputs have more than 2 sizes"


@needs_open_sizes
def test_too_many_open_sizes(library):
    def rule(x):
        if x.shape[0] != 2:
            raise ValueError("x must have 2 rows")
        return x

    with pytest.raises(ValueError, match=r"cube: more sizes must be known at compile time than \(-1, 2\)"):
        open_net(custom_op(library.Cube, "x -> y", infer=rule, name="cube"), None, 2)(
            Tensor(np.ones((2, 2), np.float32))
        )


def test_what_is_no_tensor(mode, library):
    with pytest.raises(TypeError, match="custom_op_test: x must be a Tensor, got float"):
        Net(make_cube(library))(1.5)


@needs_open_sizes
def test_what_is_no_tensor_beside_open_sizes(library):
    class Half(nn.Cell):
        def construct(self, x):
            return both(x, 0.5)

    both = custom_op(library.Both, "x, y -> sum, product")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Half()
    net.set_inputs(Tensor(shape=(None,), dtype=mindspore.float32))
    with pytest.raises(TypeError, match="custom_op_test: y must be a Tensor, got float"):
        net(Tensor(X))


@wide_in_graph_mode
def test_entry_that_fails(mode, library):
    op = custom_op(library.Fails, "x -> y")
    with pytest.raises(RuntimeError, match="77"):
        run(Net(op), X)


def test_once(mode):
    made = []

    @msops.once
    def make(n):
        made.append(n)
        return 2 * n

    class Twice(nn.Cell):
        def construct(self, x):
            return x * make(3) + make(4)

    for _ in range(2):
        np.testing.assert_array_equal(run(Twice(), X)[0], 6 * X + 8)
    assert make(3) == 6
    assert sorted(made) == [3, 4]


def test_once_for_equal_types():
    """Arguments are equal if their types and those of their elements are. Lists have no hash, and count, too."""
    made = []

    @msops.once
    def make(value, other=0):
        made.append((value, other))
        return type(value), value, other

    kept = (1, 1.0, True, "1", None, (1,), (1.0,), (True,), [1], [1.0], ((1,),), ([1],), [(1,)], (1, "1"))
    for value in (*kept, *kept, {"a": 1}, {"a": 1}):
        kind, got, other = make(value)
        assert kind is type(value)
        assert (repr(got), other) == (repr(value), 0)
    assert repr(made) == repr([(value, 0) for value in (*kept, {"a": 1}, {"a": 1})])
    if compat.VERSION >= (2, 7):  # older versions drop arguments that are passed by name
        assert make((1,), other=[True])[2] == [True]


def test_once_keeps_256():
    made = []

    @msops.once
    def make(n):
        made.append(n)

    for n in (*range(256), 0, 256, 1):
        make(n)
    assert made == [*range(256), 256, 1]


@pytest.mark.parametrize(
    "shapes",
    [[()], [(3,), ()], [(2, 1), (3,)], [(1,), (0,)], [(5, 1, 3), (4, 1), ()], [(2, 3), (2, 3)], [(0, 1), (1, 4)]],
)
def test_broadcast(shapes):
    out = msops.broadcast(*(Spec(shape, mindspore.float64) for shape in shapes))
    assert out == Spec(np.broadcast_shapes(*shapes), mindspore.float64)


@pytest.mark.parametrize("shapes", [[(2,), (3,)], [(0,), (2,)], [(2, 3), (2, 1), (3, 1)]])
def test_what_does_not_broadcast(shapes):
    with pytest.raises(ValueError, match=re.escape(f"shapes must broadcast, got {' and '.join(map(str, shapes))}")):
        msops.broadcast(*(Spec(shape, mindspore.float64) for shape in shapes))


def test_int_beyond_64_bits():
    """MindSpore's own words name neither the operator nor the input."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(TypeError, match="silu: x must be a Tensor, got int"):
        msops.silu(2**70)
