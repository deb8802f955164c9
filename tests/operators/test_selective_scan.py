# ruff: noqa: N803, N806 (the field's names of matrices)
import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from card import chain, length, random, zeros
from msops.operators.selective_scan import operators
from operator_test import OperatorTest, check_in_two_calls, run, run_gradient, wide_in_graph_mode
from test_sigmoid import sigmoid

CHUNK = 64  # steps between two states that are kept
GROWING = 5  # steps in which states or gradients grow
OPTIONAL = ("D", "z", "delta_bias", "initial_state")


class Walk:
    """Has what each step needs, with the states as the last axis. A is negative also where the card's checks ask for a
    formula of magnitudes, so that states do not grow."""

    def __init__(self, u, delta, A, B, C, *given, optional, delta_softplus):
        given = dict(zip(optional, given))
        self.u, self.A, self.D, self.z = u, -np.abs(A), given.get("D"), given.get("z")
        self.B, self.C = (self.of_channels(x) for x in (B, C))
        self.x = delta + given["delta_bias"][:, None] if "delta_bias" in given else delta
        self.dt = np.logaddexp(self.x, np.zeros_like(self.x)) if delta_softplus else self.x
        batch, channels, self.steps = u.shape
        self.start = given.get("initial_state", np.zeros((batch, channels, A.shape[1]), u.dtype))

    def of_channels(self, x):
        """Returns x (B, D, N, L) of the channels."""
        x = x if x.ndim == 4 else x[:, None]
        return np.repeat(x, self.u.shape[1] // max(1, x.shape[1]), 1)

    def of_groups(self, gradient, like):
        """Adds up gradients (B, D, N, L) over the channels of each group."""
        groups = like.shape[1] if like.ndim == 4 else 1
        batch, channels = gradient.shape[:2]
        of_group = channels // max(1, groups)
        return gradient.reshape(batch, groups, of_group, *gradient.shape[2:]).sum(2).reshape(like.shape)

    def run(self):
        """Returns y and the states before each step, and after the last one."""
        states, y = [self.start], np.zeros_like(self.u)
        for t in range(self.steps):
            dt = self.dt[:, :, t, None]
            states.append(np.exp(dt * self.A) * states[-1] + dt * self.u[:, :, t, None] * self.B[..., t])
            y[:, :, t] = (self.C[..., t] * states[-1]).sum(-1)
        return y + (0 if self.D is None else self.D[:, None] * self.u), states


def selective_scan(*inputs, optional=(), delta_softplus=False):
    walk = Walk(*inputs, optional=optional, delta_softplus=delta_softplus)
    y, states = walk.run()
    out = y if walk.z is None else y * walk.z * sigmoid(walk.z)
    kept = np.stack(states[:-1:CHUNK], 1) if walk.steps else np.zeros((len(y), 0, *walk.start.shape[1:]), y.dtype)
    return out, states[-1], kept


def selective_scan_backward(*arguments, optional=(), delta_softplus=False):
    *inputs, _, dout, g = arguments
    u, _, A, B, C = inputs[:5]
    walk = Walk(*inputs, optional=optional, delta_softplus=delta_softplus)
    y, states = walk.run()
    z = walk.z
    dy = dout if z is None else dout * z * sigmoid(z)
    dx, du = np.zeros_like(u), np.zeros_like(u)
    dA, dB, dC = np.zeros((len(u), *A.shape), u.dtype), np.zeros_like(walk.B), np.zeros_like(walk.C)
    for t in range(walk.steps - 1, -1, -1):
        dt, of_y = walk.dt[:, :, t, None], dy[:, :, t, None]
        g = g + of_y * walk.C[..., t]
        dC[..., t], dB[..., t] = of_y * states[t + 1], dt * u[:, :, t, None] * g
        factor = np.exp(dt * walk.A)
        p, s1 = g * factor * states[t], (g * walk.B[..., t]).sum(-1)
        dA += dt * p
        dx[:, :, t], du[:, :, t] = (walk.A * p).sum(-1) + u[:, :, t] * s1, walk.dt[:, :, t] * s1
        g = factor * g
    if delta_softplus:
        dx = dx * sigmoid(walk.x)
    gradients = {"D": (dy * u).sum((0, 2)), "delta_bias": dx.sum((0, 2)), "initial_state": g}
    if z is not None:
        gradients["z"] = dout * y * sigmoid(z) * (1 + z * sigmoid(-z))
    if walk.D is not None:
        du = du + walk.D[:, None] * dy
    return du, dx, dA.sum(0), walk.of_groups(dB, B), walk.of_groups(dC, C), *(gradients[name] for name in optional)


def case(b, d, steps, n, groups=None, optional=OPTIONAL, softplus=True):
    of_inputs = (b, n, steps) if groups is None else (b, groups, n, steps)
    shapes = dict(D=(d,), z=(b, d, steps), delta_bias=(d,), initial_state=(b, d, n))
    given = [shapes[name] for name in optional]
    return [(b, d, steps), (b, d, steps), (d, n), of_inputs, of_inputs, *given], dict(
        optional=optional, delta_softplus=softplus
    )


class Both(nn.Cell):
    """Calls the function with the optional inputs that are given, and returns both results."""

    def __init__(self, optional, delta_softplus):
        super().__init__()
        self.places = tuple(5 + optional.index(name) if name in optional else 0 for name in OPTIONAL)
        self.delta_softplus = delta_softplus

    def construct(self, *inputs):
        of_D, of_z, of_bias, of_state = self.places
        D = inputs[of_D] if of_D else None
        z = inputs[of_z] if of_z else None
        delta_bias = inputs[of_bias] if of_bias else None
        state = inputs[of_state] if of_state else None
        return msops.selective_scan(*inputs[:5], D, z, delta_bias, self.delta_softplus, state, True)


SMALL = zeros((2, 4, 3), (2, 4, 3), (4, 5), (2, 5, 3), (2, 5, 3))


def wrong(**changed):
    inputs = dict(zip(("u", "delta", "A", "B", "C"), SMALL), **changed)
    optional = tuple(name for name in OPTIONAL if name in changed)
    return list(inputs.values()), dict(optional=optional, delta_softplus=inputs.pop("delta_softplus", False))


class TestSelectiveScan(OperatorTest):
    function = msops.selective_scan
    formulas = selective_scan, selective_scan_backward
    half_gradient_in_float32 = False
    cases = {
        "small": case(2, 4, 5, 3, 2),
        "plain": case(2, 3, 7, 2, optional=(), softplus=False),
        "one": case(1, 1, 1, 1),
        "no steps": case(2, 3, 0, 2),
        "no states": case(2, 3, 4, 0, optional=("D", "z")),
        "no channels": case(2, 0, 4, 3, optional=("D",)),
        "groups of one channel": case(2, 5, 70, 3, 5),
        "odd": case(2, 35, 67, 16),
        "large": case(2, 96, 192, 16, 3),
    }
    further = {
        f"{b} x {d} x {steps}, {n} states, {groups} groups, {'+'.join(optional)}": case(
            b, d, steps, n, groups, optional, softplus
        )
        for b, d, steps, n, groups, optional, softplus in (
            (2, 33, 64, 1, None, (), False),
            (1, 64, 130, 4, 2, ("D",), True),
            (2, 40, 65, 8, 1, ("z",), False),
            (1, 9, 128, 17, 3, ("D", "z", "delta_bias", "initial_state"), True),
            (1, 12, 100, 40, 2, ("z", "initial_state"), True),
            (1, 3, 1100, 16, 1, ("z", "delta_bias", "initial_state"), True),
            (1, 2, 1056, 20, 2, ("D", "initial_state"), True),
            (1, 34, 1090, 3, None, ("initial_state",), True),
            (0, 4, 3, 2, None, ("D",), True),
        )
    }
    small = "small"
    hostile = ("small", "plain")
    roundings = 128  # a state stays in a sum for some steps, and the sums have up to thousands of terms
    units_of_largest = 4
    wrong = (
        (*wrong(u=np.zeros((2, 4), np.float32)), ValueError, "selective_scan: u must have shape (B, D, L), got (2, 4)"),
        (*wrong(B=np.zeros((2, 3, 5, 3), np.float32), C=np.zeros((2, 3, 5, 3), np.float32)), ValueError,
         "selective_scan: u must have a multiple of the 3 groups of B as channels, got 4"),
        (*wrong(B=np.zeros((2, 1, 1, 5, 3), np.float32), C=np.zeros((2, 1, 1, 5, 3), np.float32)), ValueError,
         "B must have shape (B, N, L) or (B, G, N, L), got rank 5"),
        (*wrong(z=0.0), TypeError, "selective_scan: z must be a Tensor, got float"),
        ([*SMALL], dict(optional=(), delta_softplus=1), TypeError, "delta_softplus must be a bool, got int"),
    )  # fmt: skip
    huge = ((5, 2**14, 33000, 2),)

    def operators(self, shapes=(), optional=OPTIONAL, delta_softplus=False):
        return chain(operators(delta_softplus).without(*(name for name in OPTIONAL if name not in optional)))

    def net(self, **settings):
        return Both(**settings)

    def result_dtype(self, dtype):
        return dtype, np.promote_types(dtype, np.float32)

    def reference(self, *inputs, **settings):
        return selective_scan(*inputs, **settings)[:2]

    def reference_gradient(self, *arguments, **settings):
        return selective_scan_backward(*arguments[:-2], None, *arguments[-2:], **settings)

    def inputs(self, shapes, dtype, seed=1, optional=(), delta_softplus=False):
        """Keeps A negative, so that states decay. What Mamba keeps in float32 is float32 beside float16."""
        u, delta, A, *rest = random(seed, np.float64, *shapes)
        A = -np.exp(A)
        wide = np.promote_types(dtype, np.float32)
        kinds = [dtype, dtype, wide, dtype, dtype, *(dtype if name == "z" else wide for name in optional)]
        tensors = dict(zip(("u", "delta", "A", "B", "C", *optional), (u, delta, A, *rest)))
        for name in {"delta", "delta_bias"}.intersection(() if delta_softplus else tensors):
            tensors[name] = np.abs(tensors[name]) / 2
        return [np.asarray(x, kind) for x, kind in zip(tensors.values(), kinds)]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        return super().entry_calls(shapes, settings, dtype, seed)  # scaled steps and decays would overflow

    def random_case(self, random):
        groups = random.choice((None, 1, 2, 3))
        optional = tuple(name for name in OPTIONAL if random.random() < 0.5)
        channels = (groups or 1) * random.randrange(30)
        return case(
            random.randrange(4), channels, random.choice((length(random), random.randrange(300))),
            random.randrange(20), groups, optional, random.random() < 0.5,
        )  # fmt: skip

    def check_huge(self, gpu, b, d, steps, n):
        shapes, settings = case(b, d, steps, n, optional=())
        forward, backward = self.operators(shapes, **settings)
        u, delta, A, B, C = (gpu.random(*shape) / 4 for shape in shapes)
        inputs = [u, delta.abs_(), -abs(A), B, C]
        out, last, states, _ = gpu.run(forward, *inputs)
        gpu.check_parts(forward, inputs, [out, last, states], b, 1, gpu.assert_close)
        inputs += [states, out, last]
        du, ddelta, _, dB, dC, *_ = gpu.run(backward, *inputs)
        gpu.check_parts(backward, inputs, [du, ddelta, None, dB, dC], b, 1, gpu.assert_close)

    def growing(self, dtype):
        """Returns inputs, and the gradients of the results, for which the growth over a part of the steps is infinite,
        but no number is: states begin to grow with the last steps, and gradients with the first ones."""
        shapes, settings = case(1, 3, 2048, 5, optional=("initial_state",), softplus=False)
        inputs = [np.ones(shape, dtype) for shape in shapes]
        inputs[2] /= 2
        inputs[1] *= 3
        u, state = inputs[0], inputs[5]
        u[..., :-GROWING], state[:] = 0, 0
        dout, dlast = np.zeros_like(u), np.zeros_like(state)
        dout[..., :GROWING] = 1
        return inputs, [dout, dlast], settings


@wide_in_graph_mode
def test_sequence_in_two_calls(mode):
    shapes, settings = case(2, 4, 70, 3, 2)
    inputs = TestSelectiveScan().inputs(shapes, np.float64, **settings)
    whole = msops.SelectiveScan(delta_softplus=True, return_last_state=True)
    douts = random(2, np.float64, (2, 4, 70), (2, 4, 3))
    check_in_two_calls(whole, (0, 1, 3, 4, 6), -1, inputs, douts, cuts=(1, 64, 69))


def test_function_without_last_state(mode):
    """The function returns the outputs alone, unless it is asked for both, with the gradient of these alone."""
    shapes, settings = case(1, 2, 5, 3, optional=("z",))
    inputs = TestSelectiveScan().inputs(shapes, np.float32, **settings)
    net = msops.SelectiveScan()
    u, delta, A, B, C, z = map(Tensor, inputs)
    out = net(u, delta, A, B, C, None, z)
    assert isinstance(out, Tensor)
    want, _ = selective_scan(*inputs, optional=("z",))[:2]
    np.testing.assert_allclose(out.asnumpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decays_of_any_sign(dtype):
    """A state may grow, as fast as its dtype allows; long and negative steps are right, too."""
    ones = np.ones((1, 1, 3), dtype)
    for step, a in ((3, 20), (-3, -20), (3, -2000), (2, 40), (1, 88), (-1, 30), (1, np.log(np.finfo(dtype).max) - 1)):
        with np.errstate(over="ignore"):
            decay = np.exp(np.asarray(step * a, dtype))
            want = step * np.array([1, 1 + decay, 1 + decay * (1 + decay)], dtype)
        inputs = ones, dtype(step) * ones, np.full((1, 1), a, dtype), ones, ones
        got = msops.selective_scan(*map(Tensor, inputs)).asnumpy()
        np.testing.assert_allclose(got[0, 0], want, rtol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_growth_over_parts(dtype):
    """Parts of the steps share a row on a GPU. Growth over a part may be infinite where there is nothing to grow."""
    inputs, douts, settings = TestSelectiveScan().growing(dtype)
    net, states = Both(**settings), 5
    state, want = 0.0, np.zeros_like(inputs[0])
    for t in range(GROWING):
        state = np.exp(1.5) * state + 3
        want[..., t - GROWING] = states * state
    out, last = run(net, *inputs)
    np.testing.assert_allclose(out, want, rtol=1e-5)
    np.testing.assert_allclose(last, np.full_like(last, state), rtol=1e-5)
    du, _, dA, dB, _, dstate = run_gradient(net, inputs, douts)
    np.testing.assert_allclose(du[..., :GROWING], want[..., : -GROWING - 1 : -1], rtol=1e-5)
    np.testing.assert_array_equal(du[..., GROWING:], 0)
    np.testing.assert_allclose(dstate, np.full_like(dstate, np.exp(1.5) * state / 3), rtol=1e-5)
    assert not dA.any()
    assert not dB.any()


def test_softplus_of_any_size():
    """dt keeps its digits where it is small, and is delta where that is large."""
    delta = np.array([-80.0, -20, -5, -1, -1e-3, 0, 1e-3, 0.5, 2, 15, 90], np.float64).reshape(1, -1, 1)
    ones = np.ones_like(delta)
    for dtype in (np.float32, np.float64):
        B, A = np.ones((1, 1, 1), dtype), np.zeros((delta.size, 1), dtype)
        inputs = (ones.astype(dtype), delta.astype(dtype), A, B, B)
        got = msops.selective_scan(*map(Tensor, inputs), delta_softplus=True).asnumpy()
        want = np.logaddexp(0, inputs[1].astype(np.float64))
        np.testing.assert_allclose(got, want, rtol=8 * np.finfo(dtype).eps)


class Losses(nn.Cell):
    """Returns gradients of all inputs, and the output."""

    def __init__(self):
        super().__init__()
        self.gradient = ops.GradOperation(get_all=True)
        self.net = msops.SelectiveScan(delta_softplus=True)

    def construct(self, *inputs):
        return self.gradient(self.net)(*inputs), self.net(*inputs)


@pytest.mark.parametrize("which", ["BC", "B", "C"])
def test_float32_beside_float16(mode, which):
    """B and C of float32 keep their digits: the result is that of float32, rounded once."""
    rng = np.random.default_rng(0)
    shapes = {
        "u": (2, 4, 5),
        "delta": (2, 4, 5),
        "A": (4, 3),
        "B": (2, 3, 5),
        "C": (2, 3, 5),
        "D": (4,),
        "z": (2, 4, 5),
    }
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays["A"] = -np.abs(arrays["A"])
    arrays.update({name: rng.standard_normal(shapes[name]).astype(np.float32) for name in which})
    net = Losses()
    gradients, out = net(*map(Tensor, arrays.values()))
    wide_gradients, wide_out = net(*[Tensor(x.astype(np.float32)) for x in arrays.values()])
    assert out.dtype == mindspore.float16
    np.testing.assert_array_equal(out.asnumpy(), wide_out.asnumpy().astype(np.float16))
    for x, got, want in zip(arrays.values(), gradients, wide_gradients):
        assert got.asnumpy().dtype == x.dtype
        np.testing.assert_array_equal(got.asnumpy(), want.asnumpy().astype(x.dtype))
