"""Tests what msops.Signature takes, infers and refuses."""

import re
import sys

import mindspore
import pytest

from msops import Signature, Spec

F16, F32, F64, INT = mindspore.float16, mindspore.float32, mindspore.float64, mindspore.int32


def shapes(specs):
    return [spec.shape for spec in specs]


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("x -> y", [(2, 3)], [(2, 3)]),
        ("x -> y", [()], [()]),
        ("x, w -> y, z", [(2, 3), (5,)], [(2, 3), (2, 3)]),
        ("x(N, C) -> y(C, N)", [(2, 3)], [(3, 2)]),
        ("x(), y(1) -> z()", [(), (1,)], [()]),
        ("x(*S, K), w(K) -> y(*S)", [(2, 3, 5), (5,)], [(2, 3)]),
        ("x(*S, K) -> y(K, *S)", [(5,)], [(5,)]),
        ("x(N, *S, K) -> y(*S)", [(2, 3, 4, 5)], [(3, 4)]),
        ("x(N), y(2 * N + 1) -> z(N // 2, N % 2, max(N, 7), min(N, 2), -1 + N)", [(5,), (11,)], [(2, 1, 7, 2, 4)]),
        ("y(3 * H), x(H) -> z(H)", [(6,), (2,)], [(2,)]),
        (" x ( N ) \n -> y ( N , ) ", [(4,)], [(4,)]),
        ("x(N) -> y(N + k)", [(4,)], [(14,)]),
        ("x(0) -> y(0)", [(0,)], [(0,)]),
    ],
)
def test_shapes(text, inputs, outputs):
    specs = Signature(text, k=10).infer("op", *(Spec(shape, F32) for shape in inputs))
    assert shapes(specs) == outputs
    assert all(spec.dtype == F32 for spec in specs)


def test_scratch():
    signature = Signature("x(N, C) -> y(C); partial(max(1, N // 64), C), index(C, dtype=int32)")
    assert [tensor.name for tensor in signature.scratch] == ["partial", "index"]
    assert [tensor.name for tensor in signature.outputs] == ["y"]
    for common, accumulator in ((F16, F32), (F32, F32), (F64, F64)):
        specs = signature.infer("op", Spec((128, 3), common))
        assert specs == [Spec((3,), common), Spec((2, 3), accumulator), Spec((3,), INT)]


def test_dtypes():
    signature = Signature(
        "i(N, dtype=int32), x(N), s(..., dtype=accumulator) -> y, j(..., dtype=int64), t(2, dtype=accumulator)"
    )
    for common, accumulator in ((F16, F32), (F32, F32), (F64, F64)):
        outputs = signature.infer("op", Spec((4,), INT), Spec((4,), common), Spec((1, 2), accumulator))
        assert outputs == [Spec((4,), common), Spec((4,), mindspore.int64), Spec((2,), accumulator)]
    whole = Signature("x -> y", dtypes=(INT,))
    assert whole.infer("op", Spec((4,), INT)) == [Spec((4,), INT)]


@pytest.mark.parametrize(
    ("text", "inputs", "error", "message"),
    [
        ("x, y -> z", [((2,), F32)], TypeError, "op: takes 2 inputs (x, y), got 1"),
        ("x -> z", [((2,), INT)], TypeError, "op: x must be float16, float32 or float64, got int32"),
        ("x, y -> z", [((2,), F32), ((2,), F64)], TypeError, "op: y must be float32 as x is, got float64"),
        ("x(N, dtype=int32) -> z", [((2,), F32)], TypeError, "op: x must be int32, got float32"),
        (
            "x, s(..., dtype=accumulator) -> z",
            [((2,), F16), ((2,), F16)],
            TypeError,
            "op: s must be float32, got float16",
        ),
        ("x -> z", ["list"], TypeError, "op: x must be a Tensor, got list"),
        ("x -> z", [((-1, 2), F32)], ValueError, "op: x must have a shape known at compile time, got (-1, 2)"),
        ("x(N, C) -> z", [((2,), F32)], ValueError, "op: x must have shape (N, C), got (2,)"),
        ("x(N, N) -> z", [((2, 3), F32)], ValueError, "op: x must have shape (N, N) = (2, 2), got (2, 3)"),
        ("x(N), y(N) -> z", [((2,), F32), ((3,), F32)], ValueError, "op: y must have shape (N,) = (2,), got (3,)"),
        ("x(*S, K) -> z", [((), F32)], ValueError, "op: x must have shape (*S, K), got ()"),
        (
            "x(*S), y(*S) -> z",
            [((2, 3), F32), ((3,), F32)],
            ValueError,
            "op: y must have shape (*S,) = (2, 3), got (3,)",
        ),
        ("x(8) -> z", [((7,), F32)], ValueError, "op: x must have shape (8,), got (7,)"),
        ("x(N) -> z(N - 5)", [((3,), F32)], ValueError, "op: z cannot have shape (N - 5,) = (-2,)"),
        ("x(N) -> z(6 // N)", [((0,), F32)], ValueError, "op: z cannot have shape (6 // N,): division by zero"),
        (
            "x(N), y(6 % N) -> z",
            [((0,), F32), ((0,), F32)],
            ValueError,
            "op: y cannot have shape (6 % N,): division by zero",
        ),
        (
            "x(..., dtype=int32) -> z",
            [((0,), INT)],
            ValueError,
            "op: z must name its dtype in the signature, since all inputs do",
        ),
    ],
)
def test_inputs_that_do_not_fit(text, inputs, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Signature(text).infer("op", *(spec if isinstance(spec, str) else Spec(*spec) for spec in inputs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there must be one ->"),
        ("x, y", "there must be one ->"),
        ("x -> y -> z", "there must be one ->"),
        ("-> y", "there is no input"),
        ("x ->", "there is no output"),
        ("x -> y; x", "there are two tensors x"),
        ("x; y -> z", "there must be at most one ;, after the outputs"),
        ("x -> y; z; w", "there must be at most one ;, after the outputs"),
        ("x -> y; z(M)", "no input has an axis of the size M"),
        ("x, x -> y", "there are two tensors x"),
        ("x -> x", "there are two tensors x"),
        ("x(N) -> y(M)", "no input has an axis of the size M"),
        ("x(2 * N) -> y", "no input has an axis of the size N"),
        ("x(N) -> y(*S)", "no input has an axis of the size S"),
        ("x(N) -> y(max)", "no input has an axis of the size max"),
        ("x(*S, *T) -> y", "x has two sizes with *"),
        ("x(*S) -> y(2 * S)", "S cannot be both the size of an axis and, as *S, those of many"),
        ("x(*S), y(S) -> z", "S cannot be both the size of an axis and, as *S, those of many"),
        ("x(N) -> y(*N)", "N cannot be both the size of an axis and, as *N, those of many"),
        ("x(*k) -> y(*k)", "k cannot be both the size of an axis and, as *k, those of many"),
        ("x(N) -> y(N * share)", "the size share must be a whole number, got 0.5"),
        ("x(2.5) -> y", "2.5 is no size"),
        ("x('N') -> y", "'N' is no size"),
        ("x(True) -> y", "True is no size"),
        ("x(..., N) -> y", "... is no size"),
        ("x(N) -> y(N / 2)", "N / 2 is no size"),
        ("x(N) -> y(N ** 2)", "N ** 2 is no size"),
        ("x(N) -> y(N.real)", "N.real is no size"),
        ("x(N) -> y(abs(N))", "abs(N) is no size"),
        ("x(N) -> y(min(N))", "min(N) is no size"),
        ("x(*S) -> y(max(*S))", "max(*S) is no size"),
        ("x(N) -> y(N if N else 1)", "N if N else 1 is no size"),
        ("x(N, dtype=int31) -> y", "dtype=int31 is no dtype"),
        ("x(N, dtype=Tensor) -> y", "dtype=Tensor is no dtype"),
        ("x(N, kind=int32) -> y", "kind=int32 is no dtype"),
        ("x[N] -> y", "x[N] is no tensor"),
        ("x.y -> z", "x.y is no tensor"),
        ("*x -> z", "*x is no tensor"),
        ("3 -> z", "3 is no tensor"),
        ("x(N -> y", "'(' was never closed" if sys.version_info >= (3, 10) else "unexpected EOF while parsing"),
        ("x) -> y", "unmatched ')'"),
        ("x) + (y -> z", "x) + (y is no list of tensors"),
        ("x y -> z", "invalid syntax" + (". Perhaps you forgot a comma?" if sys.version_info >= (3, 10) else "")),
        ("in -> y", "invalid syntax"),
        ("x -> y(..., dtype=index)", "y must have one dtype, not dtype=index"),
        ("x -> y; s(3, dtype=float32|common)", "s must have one dtype, not dtype=float32|common"),
        ("i(N, dtype=int32) -> y(N, dtype=common)", "no input has the common dtype"),
        ("x, v(N, dtype=w), w -> y", "dtype=w is no dtype"),
        ("x, b(N)? -> y(N)", "no input has an axis of the size N"),
        ("x, b? -> y(..., dtype=b)", "dtype=b is no dtype"),
        ("x -> y; s(3)?", "s cannot be optional, since it is scratch"),
        ("x(N?) -> y", "N? is no size"),
    ],
)
def test_texts_that_are_no_signature(text, message):
    message = f"signature {text!r}: {message}; it must read like 'x(N, C), y(C) -> out(N)'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Signature(text, k=2, share=0.5)


def test_no_text():
    with pytest.raises(TypeError, match=r"^signature must be a str, got NoneType$"):
        Signature(None)
