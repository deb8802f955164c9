"""Tests that every operator must pass: a test class inherits OperatorTest and describes the operator."""

import functools
import itertools
import math
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from card import DTYPES, Card, random
from msops.compat import VERSION
from msops.testing.checks import (
    CALL_CHECKS,
    Gradient,
    Net,
    as_tuple,
    assert_accurate,
    assert_equal,
    random_like,
    run,
    run_gradient,
)  # fmt: skip
from msops.testing.derived import wrong_inputs
from msops.testing.differences import check_finite_differences
from msops.testing.opcheck import MODES

PLAIN = ["-O0"]  # g++ compiles the sources of tests in a quarter of the time then
LARGE = 2**17  # elements of a case's inputs
ELEMENTS = 12  # of an input, for which finite differences are taken: each takes two calls


def load_kernels(name):
    """Returns the library of a source in tests/kernels."""
    return msops.load(f"{name}_test", Path(__file__).with_name("kernels") / f"{name}.cu", cxx_flags=PLAIN)


# Marks a test that takes long in graph mode: `make test` runs it in PyNative mode alone.
wide_in_graph_mode = pytest.mark.parametrize(
    "mode", [pytest.param("graph", marks=pytest.mark.wide), "pynative"], indirect=True
)


class WithGradients(nn.Cell):
    """Returns a tuple of a Cell's `n` inputs' results and of their gradients: a graph of both takes half as long to
    compile as two graphs do."""

    def __init__(self, net, n):
        super().__init__()
        self.net, self.n, self.gradient = net, n, Gradient(net, n)

    def construct(self, *arguments):
        outs, gradients = self.net(*arguments[: self.n]), self.gradient(*arguments)
        if not isinstance(outs, tuple):
            outs = (outs,)
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        return outs + gradients


class OperatorTest(Card):
    """Tests an operator. A subclass defines what Card names, and `reference` and `reference_gradient` of the function
    where the entries' formulas do not give them."""

    cell = None  # the function's Cell, if it takes what the function does
    second_order = False  # whether the gradient has a gradient
    constants = ()  # the positions of floating inputs without a gradient, which gets zeros
    wrong = ()  # (inputs, settings, error, words of its message), where test_wrong_inputs does not make it
    half_in_float32 = half_gradient_in_float32 = True  # see assert_accurate
    units_of_largest = 1  # see assert_accurate

    def douts(self, inputs, settings):
        """Returns random gradients of the results, which are zeros for results that are not floating."""
        shapes = [np.shape(out) for out in self.reference(*inputs, **settings)]
        pairs = zip(random(2, np.float64, *shapes), self.result_dtypes(inputs[0].dtype.name, len(shapes)))
        return [np.asarray(dout * (dtype.kind == "f"), dtype) for dout, dtype in pairs]

    def result_dtypes(self, dtype, results):
        """Returns the dtype of each of the function's results."""
        dtypes = self.result_dtype(dtype)
        return [np.dtype(each) for each in (dtypes if isinstance(dtypes, tuple) else [dtypes] * results)]

    def case_inputs(self, case, dtype):
        shapes, settings = self.cases[case]
        return self.inputs(shapes, dtype, **settings), settings

    def elements(self, case):
        return sum(map(math.prod, self.cases[case][0]))

    def largest(self):
        return max(self.cases, key=self.elements)

    def variables(self, arguments):
        """Returns the positions of the arguments with a gradient."""
        return [i for i in range(len(arguments)) if i not in self.constants]

    def net(self, **settings):
        return Net(type(self).function, **settings)

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:  # test_entries.py takes every case in every dtype
            metafunc.parametrize(("in_mode", "case", "dtype"), list(self.calls_in_modes()))
        if "mistake" in metafunc.fixturenames:
            metafunc.parametrize(("in_mode", "mistake"), list(self.mistakes_in_modes()))

    def calls_in_modes(self):
        """Yields (mode, case, dtype). Graph mode calls the same entries as PyNative mode, but compiles for each: `make
        test` compiles one. It leaves the largest cases to test_entries.py."""
        large = {self.largest(), *(name for name in self.cases if self.elements(name) > LARGE)}
        for mode, case in itertools.product(MODES, self.cases):
            for dtype in DTYPES if case == self.small else ("float32",):
                usual = (case, dtype) == (self.small, "float32") if mode == "graph" else case not in large
                marks = [] if usual or (mode == "pynative" and case == self.small) else [pytest.mark.wide]
                yield pytest.param(mode, case, dtype, marks=marks)

    def mistakes_in_modes(self):
        """Yields (mode, mistake). Graph mode runs the same checks while it compiles: it takes one mistake of each error
        in inputs and in settings, and `make test` the first."""
        kinds = set()
        for mistake in self.wrong:
            yield pytest.param("pynative", mistake, id=f"pynative-{mistake[-1]}")
            kind = bool(mistake[1]), mistake[2]
            if kind not in kinds:
                marks = [pytest.mark.wide] * bool(kinds)
                yield pytest.param("graph", mistake, id=f"graph-{mistake[-1]}", marks=marks)
            kinds.add(kind)

    def test_case(self, in_mode, case, dtype):
        """Results and gradients are accurate. The smallest and the largest case also pass opcheck's checks of calls."""
        mindspore.set_context(mode=MODES[in_mode])
        inputs, settings = self.case_inputs(case, dtype)
        douts, n = self.douts(inputs, settings), len(inputs)
        net, arguments = self.net(**settings), [*inputs, *douts]
        calls = [(WithGradients(net, n), arguments)]
        if VERSION < (2,):  # MindSpore 1.10 cannot compile some of them together
            calls = [(net, inputs), (Gradient(net, n), arguments)]
        results = [result for each, given in calls for result in run(each, *given)]
        outs, gradients = results[:-n], results[-n:]
        assert [out.dtype for out in outs] == self.result_dtypes(dtype, len(outs))
        assert [dx.dtype for dx in gradients] == [x.dtype for x in inputs]
        reference, units = functools.partial(self.reference, **settings), self.units_of_largest
        assert_accurate(outs, reference, inputs, self.half_in_float32, units=units)
        reference = functools.partial(self.reference_gradient, **settings)
        assert_accurate(gradients, reference, arguments, self.half_gradient_in_float32, units=units)
        cases = (self.largest(), *[self.small] * (in_mode == "pynative" or dtype == "float32"))
        for check, call in itertools.product(CALL_CHECKS.values() if case in cases else (), calls):
            check(*call)

    def test_cell(self, mode):
        if self.cell is None:
            pytest.skip("there is none that takes what the function does")
        inputs, settings = self.case_inputs(self.small, np.float32)
        assert_equal(run(self.cell(**settings), *inputs), run(self.net(**settings), *inputs))

    def calls(self, case, dtype):
        """Returns the Cell and its gradient's Cell, each with the arrays that it takes."""
        inputs, settings = self.case_inputs(case, dtype)
        net = self.net(**settings)
        return (net, inputs), (Gradient(net, len(inputs)), [*inputs, *self.douts(inputs, settings)])

    def test_gradient_against_finite_differences(self):
        """The formulas of results and gradients fit each other: test_case compares both modes with them."""
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        (net, inputs), (gradient, arguments) = self.calls(self.small, np.float64)
        gradients = run(gradient, *arguments)
        check_finite_differences(
            gradients, net, inputs, arguments[len(inputs) :], which=self.variables(inputs), most=ELEMENTS
        )

    def test_second_order(self, mode):
        if not self.second_order:
            pytest.skip("gradients of first order only")
        _, (gradient, arguments) = self.calls(self.small, np.float64)
        check_second_order(gradient, arguments, mode, self.variables(arguments))

    def test_wrong_inputs(self):
        """Dtypes and shapes that the signature rules out raise an error that names the operator."""
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        inputs, settings = self.case_inputs(self.small, np.float32)
        operators = self.operators(self.cases[self.small][0], **settings)
        if not operators or len(operators[0].signature.inputs) != len(inputs):
            pytest.skip("the function takes other inputs than its operator")
        for what, changed in wrong_inputs(operators[0], inputs):
            if len(changed) == len(inputs):
                error = ValueError if "of shape" in what else TypeError
                with pytest.raises(error, match=f"^{operators[0].label}: "):
                    print(what, run(self.net(**settings), *changed))  # shown if nothing is raised

    def test_wrong_arguments(self, in_mode, mistake):
        mindspore.set_context(mode=MODES[in_mode])
        inputs, settings, error, words = mistake
        tensors = [Tensor(a) if isinstance(a, np.ndarray) else a for a in inputs]
        with pytest.raises(error) as caught:
            as_tuple(self.net(**settings)(*tensors))[0].asnumpy()
        assert words in str(caught.value)


def check_second_order(gradient, arguments, mode, which=None):
    """Compares the gradient's gradient, with respect to inputs and incoming gradients, or to `which` of them, with
    finite differences of the gradient."""
    if mode == "pynative" and VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 has none, with a given gradient of the output, in PyNative mode")
    weights = random_like(run(gradient, *arguments), 3)
    gradients = run_gradient(gradient, arguments, weights)
    check_finite_differences(gradients, gradient, arguments, weights, which=which, most=ELEMENTS)


def check_dtypes(net, inputs, douts, reference, reference_gradient):
    """Requires results in the dtype of the first input, gradients in the dtypes of their inputs, and in both the digits
    of float64's that these dtypes hold."""
    outs, gradients = run(net, *inputs), run_gradient(net, inputs, douts)
    assert {out.dtype for out in outs} == {inputs[0].dtype}
    assert [gradient.dtype for gradient in gradients] == [x.dtype for x in inputs]
    wide = [a.astype(np.float64) for a in (*inputs, *douts)]
    for got, want in zip([*outs, *gradients], [*reference(*wide[: len(inputs)]), *reference_gradient(*wide)]):
        near = max({2: 4e-3, 4: 1e-5, 8: 1e-11}[dtype.itemsize] for dtype in (inputs[0].dtype, got.dtype))
        np.testing.assert_allclose(got, want, near, near)


class InTwo(nn.Cell):
    """Cuts the inputs at these positions along axis 1 or -1. The state, the last input and result, goes on."""

    def __init__(self, net, along, axis, cut):
        super().__init__()
        self.net, self.along, self.axis, self.cut = net, along, axis, cut

    def first(self, x):
        return x[:, : self.cut] if self.axis == 1 else x[..., : self.cut]

    def rest(self, x):
        return x[:, self.cut :] if self.axis == 1 else x[..., self.cut :]

    def construct(self, *inputs):
        given = inputs[:-1]
        before = [self.first(given[i]) if i in self.along else given[i] for i in range(len(given))]
        after = [self.rest(given[i]) if i in self.along else given[i] for i in range(len(given))]
        first, state = self.net(*before, inputs[-1])
        rest, state = self.net(*after, state)
        return ops.concat((first, rest), self.axis), state


def check_in_two_calls(net, along, axis, inputs, douts, cuts=(1, 4, 8)):
    """Requires that the state carries results and gradients over a cut anywhere."""
    want, gradients = run(net, *inputs), run_gradient(net, inputs, douts)
    for cut in cuts:
        two = InTwo(net, along, axis, cut)
        for got, expected in zip(run(two, *inputs), want):
            np.testing.assert_allclose(got, expected, 1e-12, 1e-14)
        for got, expected in zip(run_gradient(two, inputs, douts), gradients):
            np.testing.assert_allclose(got, expected, 1e-10, 1e-12)


class Training(nn.Cell):
    """Computes the mean square of a Cell's first output, as a loss to train with."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, *inputs):
        out = self.net(*inputs)
        if isinstance(out, tuple):
            out = out[0]
        return (out * out).mean()


def check_training(net, *inputs):
    """Requires that the gradients reach every Parameter of `net`, by value_and_grad and in TrainOneStepCell."""
    loss_net, tensors = Training(net), [Tensor(a) if isinstance(a, np.ndarray) else a for a in inputs]
    parameters = net.trainable_params()
    loss, gradients = ops.value_and_grad(loss_net, None, parameters)(*tensors)
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
