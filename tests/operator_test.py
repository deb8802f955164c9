"""What every operator must pass: a test class inherits OperatorTest and says what the operator is."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

DTYPES = ("float16", "float32", "float64")


class Net(nn.Cell):
    """A network of one operator."""

    def __init__(self, operator, **settings):
        super().__init__()
        self.operator = operator
        self.settings = settings

    def construct(self, *inputs):
        return self.operator(*inputs, **self.settings)


class Gradient(nn.Cell):
    """The gradients of all inputs of `net`, whose output's gradient comes last."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *inputs):
        return self.gradient(self.net)(*inputs)


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def run(net, *inputs):
    """NumPy arrays through a Cell, which gets as many Tensors."""
    return tuple(out.asnumpy() for out in as_tuple(net(*(Tensor(a) for a in inputs))))


def run_gradient(net, inputs, douts):
    sens = tuple(Tensor(d) for d in douts)
    gradients = Gradient(net)(*(Tensor(a) for a in inputs), sens[0] if len(sens) == 1 else sens)
    return tuple(g.asnumpy() for g in as_tuple(gradients))


def random(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def zeros(*shapes, dtype=np.float32):
    return [np.zeros(shape, dtype) for shape in shapes]


def assert_accurate(results, formula, inputs, half_in_float32=True):
    """Requires at most twice the largest error that `formula` makes in NumPy in the inputs' dtype.

    Beyond that one unit in the last place of the largest result is allowed, since NumPy's own error may happen to be 0.
    float16 is held to more: to the formula in float32, each result rounded to nearest (with a quarter of a unit for
    unlucky ties).
    """
    dtype = inputs[0].dtype
    exact = as_tuple(formula(*(a.astype(np.longdouble if dtype == np.float64 else np.float64) for a in inputs)))
    in_float32 = dtype == np.float16 and half_in_float32
    plain = as_tuple(formula(*(a.astype(np.float32) if in_float32 else a for a in inputs)))
    assert len(results) == len(exact)
    for i, (got, want, numpy) in enumerate(zip(results, exact, plain)):
        assert (got.dtype, got.shape) == (dtype, want.shape), f"result {i} is {got.dtype} {got.shape}"
        if got.size == 0:
            continue
        size = np.abs(want) if in_float32 else np.abs(want).max()
        unit = np.spacing(size.astype(dtype)).astype(want.dtype)
        allowed = np.broadcast_to(2 * np.abs(numpy - want).max() + (0.75 if in_float32 else 1) * unit, want.shape)
        error = np.abs(got - want)
        worst = np.unravel_index((error - allowed).argmax(), error.shape)
        assert (error <= allowed).all(), f"result {i}: error {error[worst]} at {worst}, allowed are {allowed[worst]}"


class OperatorTest:
    """The tests. A subclass gives the attributes below and methods `reference` and `reference_gradient`.

    reference(*inputs, **settings) and reference_gradient(*inputs, *douts, **settings) are plain NumPy in the dtype of
    their arguments, and return a tuple.
    """

    function = None  # the function under test
    cases = {}  # name -> (shapes of the inputs, settings)
    small = None  # the case for tests that need just one, of some tens of elements
    wrong = ()  # (inputs, settings, error, words of its message)
    half_in_float32 = half_gradient_in_float32 = True  # see assert_accurate

    def inputs(self, case, dtype):
        return random(1, dtype, *self.cases[case][0])

    def douts(self, inputs, settings):
        return random(2, inputs[0].dtype, *(out.shape for out in self.reference(*inputs, **settings)))

    def net(self, **settings):
        return Net(type(self).function, **settings)

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", DTYPES)
        if "mistake" in metafunc.fixturenames:
            metafunc.parametrize("mistake", self.wrong, ids=lambda mistake: mistake[-1])

    def test_forward(self, mode, case, dtype):
        settings, inputs = self.cases[case][1], self.inputs(case, dtype)
        before = [a.copy() for a in inputs]
        tensors = [Tensor(a) for a in inputs]
        outs = tuple(out.asnumpy() for out in as_tuple(self.net(**settings)(*tensors)))
        assert_accurate(outs, lambda *a: self.reference(*a, **settings), inputs, self.half_in_float32)
        for tensor, old in zip(tensors, before):
            np.testing.assert_array_equal(tensor.asnumpy(), old, "an input was changed")

    def test_gradient(self, mode, case, dtype):
        settings, inputs = self.cases[case][1], self.inputs(case, dtype)
        douts = self.douts(inputs, settings)
        gradients = run_gradient(self.net(**settings), inputs, douts)
        assert_accurate(
            gradients,
            lambda *a: self.reference_gradient(*a, **settings),
            [*inputs, *douts],
            self.half_gradient_in_float32,
        )

    def test_gradient_against_finite_differences(self, mode):
        settings, inputs = self.cases[self.small][1], self.inputs(self.small, np.float64)
        douts = self.douts(inputs, settings)
        net = self.net(**settings)
        gradients = run_gradient(net, inputs, douts)
        step = 1e-6
        for i, (array, gradient) in enumerate(zip(inputs, gradients)):
            for at in np.ndindex(array.shape):
                sides = []
                for sign in (1, -1):
                    moved = array.copy()
                    moved[at] += sign * step
                    outs = run(net, *inputs[:i], moved, *inputs[i + 1 :])
                    sides.append(sum((out * dout).sum() for out, dout in zip(outs, douts)))
                # The quotient's own error is about 1e-16 / step + step^2.
                np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-7)

    def test_views(self, mode):
        """Transposed and sliced inputs give what their copies give, bit for bit."""
        settings, inputs = self.cases[self.small][1], self.inputs(self.small, np.float32)
        douts = self.douts(inputs, settings)
        net = self.net(**settings)
        expected, gradients = run(net, *inputs), run_gradient(net, inputs, douts)
        turned = [Tensor(np.ascontiguousarray(a.T)).transpose(*reversed(range(a.ndim))) for a in inputs]
        wider = [Tensor(np.concatenate([a[:1], a, a[:1]]))[1:-1] for a in inputs]
        for views in (turned, wider):
            for out, want in zip(as_tuple(net(*views)), expected):
                np.testing.assert_array_equal(out.asnumpy(), want)
        transposed = [Tensor(np.ascontiguousarray(d.T)).transpose(*reversed(range(d.ndim))) for d in douts]
        sens = transposed[0] if len(douts) == 1 else tuple(transposed)
        for gradient, want in zip(Gradient(net)(*(Tensor(a) for a in inputs), sens), gradients):
            np.testing.assert_array_equal(gradient.asnumpy(), want)

    def test_repeated_runs_are_equal(self, mode):
        """Bit for bit, forward and backward, in the largest case."""
        case = max(self.cases, key=lambda name: sum(np.prod(shape) for shape in self.cases[name][0]))
        settings, inputs = self.cases[case][1], self.inputs(case, np.float32)
        douts = self.douts(inputs, settings)
        net = self.net(**settings)
        first, first_gradients = run(net, *inputs), run_gradient(net, inputs, douts)
        for _ in range(3):
            for got, want in zip(run(net, *inputs) + run_gradient(net, inputs, douts), first + first_gradients):
                np.testing.assert_array_equal(got, want)

    def test_wrong_arguments(self, mode, mistake):
        inputs, settings, error, words = mistake
        tensors = [Tensor(a) if isinstance(a, np.ndarray) else a for a in inputs]
        with pytest.raises(error) as caught:
            as_tuple(self.net(**settings)(*tensors))[0].asnumpy()
        assert words in str(caught.value)


class Training(nn.Cell):
    """Mean square of a Cell's first output, as a loss to train with."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, *inputs):
        out = self.net(*inputs)
        if isinstance(out, tuple):
            out = out[0]
        return (out * out).mean()


def check_training(net, *inputs):
    """The gradients reach every Parameter of `net`: by value_and_grad, and in TrainOneStepCell."""
    loss_net, tensors = Training(net), [Tensor(a) if isinstance(a, np.ndarray) else a for a in inputs]
    parameters = net.trainable_params()
    loss, gradients = mindspore.value_and_grad(loss_net, None, parameters)(*tensors)
    before = [p.asnumpy().copy() for p in parameters]
    for gradient in gradients:
        assert np.abs(gradient.asnumpy()).max() > 0
    rate = 0.01
    step = nn.TrainOneStepCell(loss_net, nn.SGD(parameters, rate))
    step.set_train()
    np.testing.assert_allclose(step(*tensors).asnumpy(), loss.asnumpy(), rtol=1e-5)
    for parameter, old, gradient in zip(parameters, before, gradients):
        np.testing.assert_allclose(parameter.asnumpy(), old - rate * gradient.asnumpy(), rtol=1e-5, atol=1e-6)
    assert step(*tensors).asnumpy() < loss.asnumpy()
