"""Tests methods of Tensors that MindSpore has for Ascend alone, mostly in PyNative mode, while it is patched.

tests/mint_cases/methods.py has programs for both modes.
"""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from scipy import special

import msops
from msops.compat import VERSION
from msops.patch.mint import in_place, methods
from msops.testing.opcheck import MODES

pytestmark = pytest.mark.skipif(VERSION < (2, 7), reason="older versions lack most of these methods")
X = np.array([[1, 2, 3, 0], [4, 1, 0, 5]], np.float32)
PLACES = np.array([[0, 1, 1], [2, 0, 1]])
ROWS = np.array([1, 0])


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


@pytest.fixture(autouse=True)
def _in_pynative_mode():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def along_columns(x, y, at):
    out = x.copy()
    at(out, (np.arange(len(x))[:, None], PLACES), y[:, :3])
    return out


def with_rows(value):
    out = X.copy()
    out[ROWS[:1]] = value
    return out


# (method, arguments, what NumPy says)
PLAIN = [
    ("clone", (), X),
    ("floor_divide", (2,), X // 2),
    ("index_add", (0, ROWS, X), X + X[ROWS]),
    ("new_full", ((2, 3), 7.0), np.full((2, 3), 7, np.float32)),
    ("repeat", (2, 3), np.tile(X, (2, 3))),
    ("scatter_add", (1, PLACES, X), along_columns(X, X, np.add.at)),
    ("unflatten", (1, (2, 2)), X.reshape(2, 2, 2)),
    ("unflatten", (-1, (4, 1)), X.reshape(2, 4, 1)),
    ("unique", (), np.unique(X)),
]
IN_PLACE = [
    ("add_", (X,), 2 * X),
    ("add_", (1.0,), X + 1),
    ("clamp_", (1.0, 2.0), X.clip(1, 2)),
    ("copy_", (X[1],), np.stack((X[1], X[1]))),
    ("div_", (2.0,), X / 2),
    ("erfinv_", (), special.erfinv(X / 10)),
    ("exp_", (), np.exp(X)),
    ("fill_", (2.5,), np.full_like(X, 2.5)),
    ("fill_diagonal_", (9.0,), X + np.eye(2, 4, dtype=np.float32) * (9 - X)),
    ("floor_", (), X),
    ("floor_divide_", (2,), X // 2),
    ("index_add_", (0, ROWS, X), X + X[ROWS]),
    ("index_copy_", (0, ROWS, X), X[ROWS]),
    ("index_fill_", (0, ROWS[:1], 9.0), with_rows(9)),
    ("index_put_", ((ROWS, PLACES[0, :2]), np.float32([7, 8])), np.float32([[1, 8, 3, 0], [7, 1, 0, 5]])),
    ("index_put_", ((-ROWS[:1],), np.float32([7]), True), X + np.float32([[0], [7]])),
    ("index_put_", ((X > 2,), np.float32([9])), np.where(X > 2, np.float32(9), X)),
    ("log_", (), np.log(X + 1)),
    ("masked_fill_", (X > 1, 9.0), np.where(X > 1, np.float32(9), X)),
    ("masked_scatter_", (X > 2, -X), np.float32([[1, 2, -1, 0], [-2, 1, 0, -3]])),
    ("mul_", (X,), X * X),
    ("mul_", (2.0,), 2 * X),
    ("put_", (np.array([[0, 1], [-1, 3]]), np.float32([[7, 8], [9, 6]])), np.float32([[7, 8, 3, 6], [4, 1, 0, 9]])),
    ("put_", (PLACES[1, :2] + 1, X[0, :2], True), np.float32([[1, 4, 3, 1], [4, 1, 0, 5]])),
    ("scatter_", (1, PLACES[:, 1:], 5.0), None),
    ("scatter_add_", (1, PLACES, X), along_columns(X, X, np.add.at)),
    ("sub_", (1.0,), X - 1),
    ("tanh_", (), np.tanh(X)),
    ("zero_", (), np.zeros_like(X)),
]


def tensors(arguments):
    kinds = {np.ndarray: Tensor, tuple: lambda part: tuple(tensors(part))}
    return [kinds.get(type(each), lambda same: same)(each) for each in arguments]


@pytest.mark.parametrize(("name", "arguments", "want"), PLAIN)
def test_method(name, arguments, want):
    x = Tensor(X)
    np.testing.assert_array_equal(getattr(x, name)(*tensors(arguments)).asnumpy(), want)
    np.testing.assert_array_equal(x.asnumpy(), X)


@pytest.mark.parametrize(("name", "arguments", "want"), IN_PLACE)
def test_method_in_place(name, arguments, want):
    before = {"log_": X + 1, "erfinv_": X / 10}.get(name, X)
    if name == "scatter_":
        want = X.copy()
        want[np.arange(2)[:, None], PLACES[:, 1:]] = 5
    x = Tensor(before)
    result = getattr(x, name)(*tensors(arguments))
    np.testing.assert_allclose(x.asnumpy(), want, rtol=1e-5)
    np.testing.assert_array_equal(result.asnumpy(), x.asnumpy())


def test_keywords():
    np.testing.assert_array_equal(Tensor(X).repeat(repeats=(2, 1)).asnumpy(), np.tile(X, (2, 1)))
    np.testing.assert_array_equal(Tensor(X).repeat_interleave(2, dim=1, output_size=8).asnumpy(), X.repeat(2, 1))
    x = Tensor(X)
    np.testing.assert_array_equal(x.add_(Tensor(X), alpha=2).asnumpy(), 3 * X)
    np.testing.assert_array_equal(x.sub_(Tensor(X), alpha=2).asnumpy(), X)
    np.testing.assert_array_equal(x.div_(2.0, rounding_mode="floor").asnumpy(), X // 2)
    np.testing.assert_array_equal(Tensor(X).index_add(0, Tensor(ROWS), Tensor(X), alpha=3).asnumpy(), X + 3 * X[ROWS])


def test_older_forms():
    """MindSpore's own methods take arguments that mint's do not have."""
    x, y, rows = np.zeros((3, 2), np.float32), np.ones((2, 2), np.float32), Tensor(np.array([2, 0], np.int32))
    np.testing.assert_array_equal(Tensor(x).index_add(rows, Tensor(y), 0).asnumpy(), [[1, 1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(Tensor(X).count_nonzero(axis=1).asnumpy(), [3, 3])
    np.testing.assert_array_equal(Tensor(X).narrow(1, 1, 2).asnumpy(), X[:, 1:3])


@mindspore.jit
def older(x, places, row):
    """The older scatter_add adds to elements of a matrix at places (row, column)."""
    return x.scatter_add(places, row), row.transpose(-1), row.repeat(repeats=(2, 1))


def test_older_forms_in_graph_mode():
    added, same, twice = older(Tensor(X), Tensor([[0, 1], [1, 3], [0, 1], [0, 0]]), Tensor(X[0]))
    np.testing.assert_array_equal(added.asnumpy(), X + np.float32([[0, 4, 0, 0], [0, 0, 0, 2]]))
    np.testing.assert_array_equal(same.asnumpy(), X[0])
    np.testing.assert_array_equal(twice.asnumpy(), np.tile(X[0], (2, 1)))


@mindspore.jit
def cut(x):
    return x.chunk(2, dim=1)


@mindspore.jit
def subtracted(x):
    x.sub_(1.0)
    return x


@mindspore.jit
def repeated_by(x, repeats):
    return x.repeat_interleave(repeats, dim=1)


def test_graph_mode():
    first, second = cut(Tensor(X))
    np.testing.assert_array_equal(np.concatenate((first.asnumpy(), second.asnumpy()), 1), X)
    with pytest.raises(NotImplementedError, match=r"mint\.Tensor\.sub_: graph mode cannot write into a Tensor"):
        subtracted(Tensor(X))
    with pytest.raises(NotImplementedError, match=r"mint\.repeat_interleave: graph mode cannot have repeats"):
        repeated_by(Tensor(X), Tensor([1, 2, 0, 1]))


def test_bernoulli():
    draws = Tensor(np.zeros(10_000, np.float32)).bernoulli_(0.25).asnumpy()
    assert set(draws) == {0, 1}
    assert abs(draws.mean() - 0.25) < 0.03


def test_result_must_keep_its_shape():
    with pytest.raises(ValueError, match=r"mint.Tensor.add_: the result's shape \(2, 4\) must be \(4,\)"):
        Tensor(X[0]).add_(Tensor(X))


class Counter(nn.Cell):
    """Counts its calls in a Parameter, and squares a tensor in place if told to."""

    def __init__(self, squares):
        super().__init__()
        self.calls = Parameter(Tensor(np.zeros(1, np.float32)), requires_grad=False)
        self.squares = squares

    def construct(self, x):
        self.calls.add_(1.0)
        y = x * 2
        return (y.mul_(y) if self.squares else y * y).sum()


@pytest.fixture(params=("copy_into", "become"))
def write(request, monkeypatch, device_target):
    """Lets methods write as on this device, or as in PyNative mode on a GPU."""
    if request.param == "become":
        if device_target == "GPU" or not hasattr(mindspore._c_expression, "_unsafe_set_version_counter"):
            pytest.skip("this is what the device does, or MindSpore cannot set versions")
        monkeypatch.setattr(methods, "copy_into", in_place.become)


OVERWRITTEN = "modified by an inplace operation"


@pytest.mark.usefixtures("write")
def test_in_place_in_a_gradient():
    counter = Counter(squares=False)
    np.testing.assert_array_equal(mindspore.grad(counter)(Tensor(X)).asnumpy(), 8 * X)
    assert counter.calls.asnumpy() == 1
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        mindspore.grad(Counter(squares=True))(Tensor(X))


def test_copy_into_a_view(device_target):
    """On the CPU, MindSpore's own copy writes into what a view shows."""
    if device_target == "GPU":
        pytest.skip("a GPU has no such copy")
    x = Tensor(X)
    x.view(-1).copy_(Tensor(2 * X.ravel()))
    np.testing.assert_array_equal(x.asnumpy(), 2 * X)


F = mint.nn.functional
INTO_PARTS = {
    "relu_": (lambda x: F.relu_(x), lambda x: np.maximum(x, 0)),
    "relu": (lambda x: F.relu(x, inplace=True), lambda x: np.maximum(x, 0)),
    "hardtanh": (lambda x: F.hardtanh(x, -1.0, 1.0, inplace=True), lambda x: x.clip(-1, 1)),
    "dropout": (lambda x: F.dropout(x, 0.0, True, inplace=True), lambda x: x),
    "uniform_": (lambda x: x.uniform_(0.0, 0.0), np.zeros_like),
    "copy_": (lambda x: x.copy_(Tensor(2 * x.asnumpy())), lambda x: 2 * x),
}
PARTS = (slice(0, 1), slice(1, 2), (slice(None), slice(1, 3)), 1)


@pytest.mark.parametrize("kind", [Tensor, Parameter])
@pytest.mark.parametrize("name", INTO_PARTS)
def test_functions_in_place_write_into_parts(name, kind):
    write, function = INTO_PARTS[name]
    for index in PARTS:
        x, want = kind(Tensor(X - 2)), X - 2
        x = x if kind is Parameter else x + 0  # which is in the device's memory, not NumPy's
        part = x[index]
        result = write(part)
        want[index] = function(want[index])
        np.testing.assert_array_equal(part.asnumpy(), want[index])
        np.testing.assert_array_equal(x.asnumpy(), want)
        assert result is None or result is part


@pytest.mark.parametrize("name", ["relu_", "relu", "hardtanh", "copy_"])
@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: mint.chunk(x, 2, 0)[0], lambda x: x[1].view(2, 2)])
def test_functions_in_place_refuse_other_views(name, view):
    """MindSpore's copy would write nothing there, silently."""
    x = Tensor(X - 2) + 0
    with pytest.raises((NotImplementedError, RuntimeError), match=r"cannot write into a view|Not support view input"):
        INTO_PARTS[name][0](view(x))
    np.testing.assert_array_equal(x.asnumpy(), X - 2)


@pytest.mark.parametrize("what", ["a part of another tensor", "a Parameter that requires a gradient"])
def test_gradients_of_functions_in_place_that_are_refused(what):
    weight = Parameter(Tensor(X))

    def function(x):
        y = x * 2
        F.relu_(y[0] if "part" in what else weight)
        return y.sum()

    with pytest.raises(NotImplementedError, match=f"mint: {what} has no gradient on GPU and CPU"):
        mindspore.grad(function)(Tensor(X))


class Dropped(nn.Cell):
    """Drops in place, and returns the sum of squares, and what is left."""

    def __init__(self, of_channels):
        super().__init__()
        self.of_channels = of_channels

    def construct(self, x):
        y = x * 1
        if self.of_channels:
            F.dropout2d(y, 0.5, True, True)
        else:
            F.dropout(y, 0.5, True, True)
        return (y * y).sum(), y


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("of_channels", [False, True])
def test_gradient_of_dropout_in_place(mode, of_channels):
    mindspore.set_context(mode=mode)
    x = np.arange(1, 193, dtype=np.float32).reshape(2, 6, 4, 4)
    (_, y), dx = mindspore.value_and_grad(Dropped(of_channels), has_aux=True)(Tensor(x))
    assert 0 < (y.asnumpy() != 0).mean() < 1
    np.testing.assert_allclose(dx.asnumpy(), 2 * y.asnumpy() * (y.asnumpy() / x), rtol=1e-6)


def test_xlogy_of_whole_numbers():
    whole = Tensor([2, 3], mindspore.int32)
    np.testing.assert_allclose(mindspore.mint.xlogy(0.5, whole).asnumpy(), 0.5 * np.log([2, 3]), rtol=1e-6)
    np.testing.assert_allclose(mindspore.mint.xlogy(whole, 2.5).asnumpy(), np.multiply([2, 3], np.log(2.5)), rtol=1e-6)


def accumulated(x):
    """Adds rows as layers of experts do."""
    total, rows = ops.zeros((3, 4)), Tensor([0, 0]).add_(2).clamp_(0, 1)
    total.index_add_(0, Tensor([0, 2]), x * x)
    total.index_add_(0, rows, x).exp_().mul_(2.0)
    return (total * total).sum()


WRITING = {
    "fill_diagonal_": lambda x, y: x.fill_diagonal_(2.0),
    "index_put_": lambda x, y: x.index_put_((Tensor(ROWS), Tensor(PLACES[0, :2])), y[:, 0]),
    "index_put_ adding": lambda x, y: x.index_put_((Tensor(ROWS),), y, True),
    "index_put_ of a mask": lambda x, y: x.index_put_((Tensor(X > 2),), y[0, :3]),
    "masked_scatter_": lambda x, y: x.masked_scatter_(Tensor(X > 2), y),
    "put_": lambda x, y: x.put_(Tensor([[1, 7]]), y[:1, :2]),
}


@pytest.mark.parametrize("name", WRITING)
def test_gradients_of_writing_at_places(name):
    """What is written is linear in the tensor and in the source, except for what the diagonal is filled with."""
    rng = np.random.default_rng(0)
    x, y, dx, dy, factors = rng.standard_normal((5, 2, 4))

    def loss(x, y):
        return (WRITING[name](x * 1, y) * Tensor(factors)).sum()

    gradients = mindspore.grad(loss, (0, 1))(Tensor(x), Tensor(y))
    change = loss(Tensor(x + dx), Tensor(y + dy)) - loss(Tensor(x), Tensor(y))
    got = sum((gradient.asnumpy() * each).sum() for gradient, each in zip(gradients, (dx, dy)))
    np.testing.assert_allclose(got, change.asnumpy(), rtol=1e-10)


def test_refusals_of_writing_at_places():
    with pytest.raises(ValueError, match=r"fill_diagonal_: the tensor must be a matrix, .*, got shape \(4,\)"):
        Tensor(X[0]).fill_diagonal_(1.0)
    with pytest.raises(ValueError, match=r"masked_scatter_: source must have an element for each of 3 places, got 2"):
        Tensor(X).masked_scatter_(Tensor(X > 2), Tensor(X[0, :2]))


def shifted(x):
    """Overwrites a factor that the gradient needs."""
    factors = Tensor(X)
    total = (factors * x).sum()
    factors.add_(1)
    return total


@pytest.mark.usefixtures("write")
def test_gradients_in_place():
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    total = np.zeros((3, 4))
    total[[0, 2]] = x * x
    np.add.at(total, [1, 1], x)
    dtotal = 8 * np.exp(2 * total)
    got = mindspore.grad(accumulated)(Tensor(x)).asnumpy()
    np.testing.assert_allclose(got, dtotal[[0, 2]] * 2 * x + dtotal[[1, 1]], rtol=1e-5)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        mindspore.grad(shifted)(Tensor(x))


def test_parts_in_place(device_target):
    x, weight = Tensor(X), Parameter(Tensor(X))
    x[0].add_(1.0)
    x[:, 1].fill_(7.0)
    weight.data[1].zero_()
    want = X + np.array([[1], [0]])
    want[:, 1] = 7
    np.testing.assert_array_equal(x.asnumpy(), want)
    if device_target == "CPU":  # `data` is a copy on a GPU
        np.testing.assert_array_equal(weight.asnumpy(), X * [[1], [0]])


@pytest.mark.parametrize("what", ["a part of another tensor", "a Parameter that requires a gradient"])
def test_gradients_in_place_that_are_refused(what):
    weight = Parameter(Tensor(X))

    def function(x):
        return ((x * 2)[0] if "part" in what else weight).add_(1.0).sum()

    with pytest.raises(NotImplementedError, match=f"mint.Tensor.add_: {what} has no gradient on GPU and CPU"):
        mindspore.grad(function)(Tensor(X))


@pytest.mark.skipif(VERSION < (2, 10), reason="nn.Cell.to came with 2.10")
def test_cell_takes_another_dtype():
    net = nn.Dense(3, 4, weight_init="ones", bias_init="zeros")
    weight = net.weight
    net.to(mindspore.float16)
    x = Tensor(np.ones((2, 3)), mindspore.float16)
    loss, (dweight, dbias) = mindspore.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(x)
    assert net.weight is weight
    assert weight.dtype == dweight.dtype == mindspore.float16
    assert loss == 24
    np.testing.assert_array_equal(dweight.asnumpy(), 2)
    np.testing.assert_array_equal(dbias.asnumpy(), 2)


@pytest.mark.skipif(VERSION < (2, 10), reason="nn.Cell.to came with 2.10")
@pytest.mark.parametrize("use", ["normal_", "fill_", "gather"])
def test_operators_infer_from_the_dtype_that_a_cell_takes(use):
    # MindSpore keeps what it inferred for a shape and a dtype, so each case has a shape of its own.
    net = nn.Dense(7, 11 + len(use), weight_init="ones")
    weight, places = net.weight, Tensor([[1, 0]], mindspore.int32)
    ops.gather(weight, places, 0) if use == "gather" else getattr(weight.data, use)(1.0)
    before = weight.asnumpy()
    net.to(mindspore.float16)
    assert weight.shape == before.shape
    np.testing.assert_array_equal(weight.asnumpy(), before.astype(np.float16))
    for result in (ops.gather(weight, places, 0), msops.embedding(places, weight)):
        assert result.dtype == mindspore.float16
        np.testing.assert_array_equal(result.asnumpy(), weight.asnumpy()[[[1, 0]]])
    assert msops.silu(weight).dtype == mindspore.float16


@pytest.mark.parametrize("named", [{}, {"non_blocking": False}, {"device": None}])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_to_another_dtype(named, is_parameter):
    x = Parameter(X, name="x") if is_parameter else Tensor(X)
    for result in (x.to(mindspore.float16), x.to(dtype=mindspore.float16, **named)):
        assert result.dtype == mindspore.float16
        np.testing.assert_array_equal(result.asnumpy(), X)
