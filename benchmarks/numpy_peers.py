"""The operators and their gradients in NumPy: a function of the entry's inputs for each op and direction."""

import itertools

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sigmoid_backward(y, dy):
    return dy * y * (1 - y)


def sum_to(dout, x):
    axes = tuple(range(dout.ndim - x.ndim))
    axes += tuple(axis for axis in range(len(axes), dout.ndim) if x.shape[axis - len(axes)] != dout.shape[axis])
    return dout.sum(axes).reshape(x.shape)


def _corners(points):
    """(weight, slope of it in each direction) of each corner of the cube."""
    far = (points + 1) / 2
    sides = (1 - far, far)
    for corner in itertools.product((0, 1), repeat=3):
        u, v, w = (sides[i][:, d] for d, i in enumerate(corner))
        su, sv, sw = (i - 0.5 for i in corner)
        yield u * v * w, np.stack([su * v * w, u * sv * w, u * v * sw], 1).astype(points.dtype)


def trilinear(feats, points):
    weights = np.stack([weight for weight, _ in _corners(points)], 1)
    return np.einsum("ncf,nc->nf", feats, weights)


def trilinear_backward(feats, points, dout):
    weights, slopes = (np.stack(arrays, 1) for arrays in zip(*_corners(points)))
    dfeats = weights[:, :, None] * dout[:, None]
    dpoints = np.einsum("ncd,nc->nd", slopes, np.einsum("ncf,nf->nc", feats, dout))
    return dfeats, dpoints


def _taps(x, kernel, out_shape, stride):
    """(row, column, slices of the padded x that this tap meets) of each tap."""
    for a, b in np.ndindex(kernel, kernel):
        rows, columns = (slice(t, t + (length - 1) * stride + 1, stride) for t, length in zip((a, b), out_shape[2:]))
        yield a, b, (slice(None), slice(None), rows, columns)


def _padded(x, kernel):
    p = kernel // 2
    return np.pad(x, [(0, 0), (0, 0), (p, p), (p, p)])


def depthwise(x, weight, bias, stride):
    kernel = weight.shape[-1]
    out_shape = (*x.shape[:2], *((n + 2 * (kernel // 2) - kernel) // stride + 1 for n in x.shape[2:]))
    padded, out = _padded(x, kernel), np.empty(out_shape, x.dtype)
    out[:] = bias[:, None, None]
    for a, b, part in _taps(x, kernel, out_shape, stride):
        out += weight[:, 0, a, b, None, None] * padded[part]
    return out


def depthwise_backward(x, weight, dout, stride):
    kernel = weight.shape[-1]
    padded, dweight = _padded(x, kernel), np.empty_like(weight)
    dpadded, p = np.zeros_like(padded), kernel // 2
    for a, b, part in _taps(x, kernel, dout.shape, stride):
        dweight[:, 0, a, b] = np.einsum("nchw,nchw->c", padded[part], dout)
        dpadded[part] += weight[:, 0, a, b, None, None] * dout
    return dpadded[:, :, p : p + x.shape[2], p : p + x.shape[3]], dweight, dout.sum((0, 2, 3))


def _gates(product, bias, c):
    i, o, g = np.split(product + bias, 3, 1)
    i, o, elu = sigmoid(i), sigmoid(o), np.where(g > 0, g, np.expm1(np.minimum(g, 0)))
    return i, o, g, elu, c + i * elu


def lltm(product, bias, c):
    _, o, _, _, new_c = _gates(product, bias, c)
    return np.tanh(new_c) * o, new_c


def lltm_backward(product, bias, c, dnew_h, dnew_c):
    i, o, g, elu, new_c = _gates(product, bias, c)
    tanh_c = np.tanh(new_c)
    dc = dnew_c + dnew_h * o * (1 - tanh_c**2)
    di, do = dc * elu * i * (1 - i), dnew_h * tanh_c * o * (1 - o)
    dproduct = np.concatenate([di, do, dc * i * np.where(g > 0, 1, elu + 1)], 1, dtype=product.dtype)
    return dproduct, dproduct.sum(0), dc


def multiply(a, b, out=None):
    """The product of matrices in float32, since NumPy's BLAS has none of float16."""
    out = np.empty((len(a), b.shape[1]), a.dtype) if out is None else out
    return np.matmul(a, b, out=out, dtype="float32", casting="same_kind")


def _steps(x, h, c, weight_ih, weight_hh, bias):
    """The gates, h and c before each step, and those behind the last."""
    for product in multiply(x.reshape(-1, x.shape[2]), weight_ih.T).reshape(*x.shape[:2], -1):
        gates = product + multiply(h, weight_hh.T)
        yield gates, h, c
        h, c = lltm(gates, bias, c)
    yield None, h, c


def lltm_sequence(*inputs):
    _, (_, *hidden), (*_, last_c) = zip(*_steps(*inputs))
    return np.stack(hidden), hidden[-1], last_c


def lltm_sequence_gradient(x, h, c, weight_ih, weight_hh, bias, doutput, dh, dc):
    gates, hidden, cells = zip(*_steps(x, h, c, weight_ih, weight_hh, bias))
    dgates = np.empty((len(x), *gates[0].shape), x.dtype)
    for t in reversed(range(len(x))):
        dgates[t], _, dc = lltm_backward(gates[t], bias, cells[t], dh + doutput[t], dc)
        dh = multiply(dgates[t], weight_hh)
    rows = dgates.reshape(-1, len(bias))
    dx, dweight_ih = multiply(rows, weight_ih), multiply(rows.T, x.reshape(len(rows), -1))
    return dx.reshape(x.shape), dh, dc, dweight_ih, multiply(rows.T, np.concatenate(hidden[:-1])), rows.sum(0)


FORMULAS = {
    ("add", "forward"): np.add,
    ("add", "backward"): sum_to,
    ("sigmoid", "forward"): sigmoid,
    ("sigmoid", "backward"): sigmoid_backward,
    ("trilinear", "forward"): trilinear,
    ("trilinear", "backward"): trilinear_backward,
    ("depthwise", "forward"): depthwise,
    ("depthwise", "backward"): depthwise_backward,
    ("lltm", "forward"): lltm,
    ("lltm", "backward"): lltm_backward,
}


def prepare(case, sets):
    """For each set of the entry's inputs, a function without arguments that computes the results."""
    formula = FORMULAS[case.op, case.direction]
    settings = dict(stride=case.stride) if case.op == "depthwise" else {}
    return [lambda inputs=inputs: formula(*inputs, **settings) for inputs in sets]
