import math

import numpy as np
import pytest
from numpy.polynomial import legendre

import msops
from card import chain, length, random, zeros
from msops.operators.spherical_harmonics import operators
from operator_test import OperatorTest, run


def terms(directions, degree, powers=(0, 0)):
    """Yields (l^2 + l + m, K, derivatives of Q, (x + iy)^|m| and its derivatives by x) of each harmonic."""
    x, y, z = directions.T
    u = x + 1j * y
    for l in range(degree):  # noqa: E741 (its name in the formula)
        for m in range(-l, l + 1):
            n = abs(m)
            k = (-1) ** n * math.sqrt(
                (2 * l + 1) / (4 * math.pi) * math.factorial(l - n) / math.factorial(l + n) * (1 + (n > 0))
            )
            coefficients = np.zeros(l + 1)
            coefficients[l] = 1
            q = [legendre.Legendre(legendre.legder(coefficients, n + i))(z) for i in range(3)]
            p = [math.perm(n, i) * u ** max(n - i, 0) if n >= i else 0 * u for i in range(3)]
            yield l * l + l + m, k, q, p, (np.imag if m < 0 else np.real)


def spherical_harmonics(directions, degree):
    rows = [k * q[0] * part(p[0]) for _, k, q, p, part in terms(directions, degree)]
    return (np.stack(rows, 1).astype(directions.dtype),)


def slopes(k, q, p, part):
    return np.stack([k * q[0] * part(p[1]), k * q[0] * part(1j * p[1]), k * q[1] * part(p[0])], 1)


def spherical_harmonics_backward(directions, dout, degree):
    total = sum(dout[:, i, None] * slopes(k, q, p, part) for i, k, q, p, part in terms(directions, degree))
    return (np.asarray(total, directions.dtype),)


def spherical_harmonics_second(directions, dout, along, degree):
    d, ddout = np.zeros_like(directions), np.zeros_like(dout)
    for i, k, q, p, part in terms(directions, degree):
        ddout[:, i] = (slopes(k, q, p, part) * along).sum(1)
        of_x, of_z = np.stack([part(p[2]), part(1j * p[2])], 1), np.stack([part(p[1]), part(1j * p[1])], 1)
        hessian = np.zeros((len(d), 3, 3), d.dtype)
        hessian[:, 0, 0], hessian[:, 0, 1] = (q[0][:, None] * of_x).T
        hessian[:, 1, 0], hessian[:, 1, 1] = hessian[:, 0, 1], -hessian[:, 0, 0]
        hessian[:, 2, :2] = hessian[:, :2, 2] = q[1][:, None] * of_z
        hessian[:, 2, 2] = q[2] * part(p[0])
        d += dout[:, i, None] * k * np.einsum("nab,nb->na", hessian, along)
    return d, ddout


class TestSphericalHarmonics(OperatorTest):
    function, cell = msops.spherical_harmonics, msops.SphericalHarmonics
    formulas = spherical_harmonics, spherical_harmonics_backward, spherical_harmonics_second
    second_order = True
    roundings = 200  # the terms of a high degree's polynomial cancel out
    cases = {
        "small": ([(4, 3)], dict(degree=3)),
        "one": ([(1, 3)], dict(degree=1)),
        "none": ([(0, 3)], dict(degree=4)),
        "four": ([(1003, 3)], dict(degree=4)),
        "eight": ([(131, 3)], dict(degree=8)),
    }
    further = {f"{degree} degrees": ([(129 + degree, 3)], dict(degree=degree)) for degree in (2, 5, 6, 7)}
    small = "small"
    wrong = (
        (zeros((2, 4)), dict(degree=2), ValueError, "directions must have shape (N, 3) = (2, 3), got (2, 4)"),
        (zeros((2, 3)), dict(degree=9), ValueError, "spherical_harmonics: degree must be from 1 to 8, got 9"),
        (zeros((2, 3)), dict(degree=0), ValueError, "spherical_harmonics: degree must be from 1 to 8, got 0"),
        (zeros((2, 3)), dict(degree=2.0), TypeError, "spherical_harmonics: degree must be an int, got float"),
    )

    def operators(self, shapes=(), degree=4):
        return chain(operators(degree))

    def inputs(self, shapes, dtype, seed=1, **settings):
        (vectors,) = random(seed, np.float64, *shapes)
        return [np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype)]

    def random_case(self, random):
        return [(length(random), 3)], dict(degree=random.randrange(1, 9))


def test_orthonormal():
    """Gauss's and equal steps integrate products of harmonics over the sphere."""
    z, of_z = legendre.leggauss(16)
    phi = np.arange(32) * 2 * np.pi / 32
    z, phi = (a.ravel() for a in np.meshgrid(z, phi, indexing="ij"))
    r = np.sqrt(1 - z * z)
    (y,) = run(msops.SphericalHarmonics(8), np.stack([r * np.cos(phi), r * np.sin(phi), z], 1))
    weights = np.repeat(of_z, 32) * 2 * np.pi / 32
    np.testing.assert_allclose(y.T @ (weights[:, None] * y), np.eye(64), atol=1e-12)


@pytest.mark.parametrize("vector", [(0.6, 0.0, 0.8), (-0.48, 0.6, 0.64)])
def test_signs_of_instant_ngp(mode, vector):
    x, y, z = vector
    want = [0.28209479, -0.48860251 * y, 0.48860251 * z, -0.48860251 * x, 1.09254843 * x * y, -1.09254843 * y * z,
            0.94617470 * z * z - 0.31539157, -1.09254843 * x * z, 0.54627422 * (x * x - y * y),
            0.59004359 * y * (-3 * x * x + y * y), 2.89061144 * x * y * z, 0.45704580 * y * (1 - 5 * z * z),
            0.37317633 * z * (5 * z * z - 3), 0.45704580 * x * (1 - 5 * z * z), 1.44530572 * z * (x * x - y * y),
            0.59004359 * x * (-x * x + 3 * y * y)]  # fmt: skip
    np.testing.assert_allclose(run(msops.SphericalHarmonics(4), np.array([vector]))[0], [want], rtol=1e-7, atol=1e-9)
