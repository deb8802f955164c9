"""Tests that formulas which model libraries write out are computed by msops' kernels while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import msops
from msops.patch.formula import Formula
from msops.testing.checks import as_tuple
from msops.testing.opcheck import MODES

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
RNG = np.random.default_rng(0)
NORM = """
from mindspore import Parameter, Tensor, mint, nn, ops
import mindspore as ms

def rms_norm(x):
    return ops.rms_norm(x, x[0])[0]

class OwnRMSNorm(nn.Cell):
    def __init__(self, weight, eps=0.125):
        super().__init__()
        self.weight, self.eps, self.variance_epsilon = Parameter(Tensor(weight), name="w"), eps, eps

    def _norm(self, x):
        return x * mint.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def construct(self, hidden_states):
        {}
"""
ROTATION = """
import mindspore
from mindspore import mint, nn

def rotate_half(x):
    \"\"\"Turns pairs of features by a quarter.\"\"\"
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return mint.cat((-second, first), dim=-1)

def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) {sign} (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed

class Attention(nn.Cell):
    def construct(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim={axis})
"""
LLAMA = """dtype = hidden_states.dtype
        hidden_states = hidden_states.to(ms.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * ops.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)"""
MULTIPLY = """out = self._norm(hidden_states.float()) * {}
        return out.type_as(hidden_states)"""
T5 = """variance = hidden_states.to(ms.float32).pow(2).mean(-1, keep_dims=True)
        hidden_states = hidden_states * ops.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [ms.float16, ms.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states"""
FORMULAS = {  # the body of `construct`, and what is added to the weight
    "llama": (LLAMA, 0),
    "olmo": (LLAMA.replace("self.weight * hidden_states.to(dtype)", "(self.weight * hidden_states).astype(dtype)"), 0),
    "moshi": (MULTIPLY.format("self.weight.float()"), 0),
    "gemma": (MULTIPLY.format("(1.0 + self.weight.float())"), 1),
    "t5": (T5, 0),
}
OTHERS = {
    "other dtypes": T5.replace("ms.float16, ms.bfloat16", "ms.float16, ms.float32"),
    "another cast": T5.replace("hidden_states.to(self.weight.dtype)", "hidden_states.to(ms.float16)"),
    "not in": T5.replace(" in [", " not in ["),
    "no cast": T5.replace("hidden_states = hidden_states.to(self.weight.dtype)", "hidden_states = hidden_states * 1"),
    "sum": LLAMA.replace("mean", "sum"),
    "no square": LLAMA.replace("pow(2)", "pow(3)"),
    "lambda": "half = lambda x: x\n        return half(hidden_states)",
    "astype": "return hidden_states.astype('float32', False)",
    "own name": "return rms_norm(hidden_states)",
    "branch": LLAMA.replace(
        "return", "if self.training:\n            hidden_states = hidden_states + 0\n        return"
    ),
}


def own_of(function):
    """Tells whether a function is that of the module that defines it."""
    return function.__module__ != "msops.patch.models"


def normalized(x, weight, dx=None):
    """Returns RMSNorm of x or, beside the gradient of the result, the gradients of x and the weight, in float64."""
    x, weight = (np.asarray(each, np.float64) for each in (x, weight))
    root = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + 0.125)
    if dx is None:
        return x * root * weight
    scaled = dx * weight
    inner = np.mean(scaled * x, -1, keepdims=True)
    return root * scaled - root**3 * x * inner, np.sum(dx * x * root, (0, 1))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", FORMULAS)
def test_norms(mode, load, name, dtype):
    body, offset = FORMULAS[name]
    x, weight = RNG.standard_normal((2, 3, 40)).astype(dtype), RNG.standard_normal(40).astype(dtype)
    with msops.patch_mindspore():
        net = load(NORM.format(body)).OwnRMSNorm(weight)
        assert not own_of(type(net).construct)
        y = net(Tensor(x))

        def squares(x):
            y = net(x)
            return (y * y).sum()

        dx, dweight = mindspore.grad(squares, 0, net.trainable_params())(Tensor(x))
    assert own_of(type(net).construct)
    tolerance = {"float16": 4e-3, "float32": 2e-5}[dtype]
    wanted = normalized(x, weight + np.float64(offset))
    assert y.dtype == getattr(mindspore, dtype)
    np.testing.assert_allclose(y.asnumpy(), wanted, tolerance, tolerance)
    gradients = normalized(x, weight + np.float64(offset), 2 * wanted)
    for got, each in zip((dx, dweight[0]), gradients):
        np.testing.assert_allclose(got.asnumpy(), each, 4 * tolerance, 4 * tolerance * np.abs(each).max())


@pytest.mark.parametrize("body", [LLAMA, T5])
def test_norms_of_other_dtypes_stay(mode, load, body):
    """The formula's own result is float32 where a weight of float32 meets float16. T5's is float16 where one of float16
    meets float32."""
    x, weight = RNG.standard_normal((3, 8)).astype(np.float16), RNG.standard_normal(8).astype(np.float32)
    with msops.patch_mindspore():
        module = load(NORM.format(body))
        y = module.OwnRMSNorm(weight)(Tensor(x))
        other = module.OwnRMSNorm(weight.astype(np.float16))(Tensor(x.astype(np.float32)))
    assert y.dtype == mindspore.float32
    assert other.dtype == (mindspore.float16 if body is T5 else mindspore.float32)
    for each in (y, other):
        np.testing.assert_allclose(each.asnumpy(), normalized(x, weight), 2e-3, 2e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_other_formulas_stay(load, name):
    with msops.patch_mindspore():
        assert own_of(load(NORM.format(OTHERS[name])).OwnRMSNorm.construct)
        assert own_of(load(ROTATION.format(sign="-", axis=1)).apply_rotary_pos_emb)


def test_inherited_formulas(load):
    """A class that defines a method of the formula anew, also by another library, computes by its own."""
    module = load(NORM.format(FORMULAS["gemma"][0]))
    with msops.patch_mindspore():

        class OwnHalf(module.OwnRMSNorm):
            def _norm(self, x):
                return x * 0.5

        class Same(module.OwnRMSNorm):
            pass

        x = Tensor(RNG.standard_normal((3, 8)).astype(np.float32))
        np.testing.assert_allclose(OwnHalf(np.zeros(8, np.float32))(x).asnumpy(), 0.5 * x.asnumpy(), 1e-6)
        assert not own_of(Same.construct)
    assert "construct" not in vars(OwnHalf)


def test_what_a_program_puts_in_place_stays(load):
    with msops.patch_mindspore():
        cls = load(NORM.format(LLAMA)).OwnRMSNorm
        cls.construct = numbers = lambda self, x: x
    assert cls.construct is numbers


def test_calls_by_name_and_shapes_that_stay(load):
    """A call may name the argument, and a weight of one number, for all columns, is the library's."""
    x = Tensor(RNG.standard_normal((3, 8)).astype(np.float32))
    with msops.patch_mindspore():
        module = load(NORM.format(LLAMA))
        assert not own_of(module.OwnRMSNorm.construct)
        for weight in (np.ones(8, np.float32), np.ones(1, np.float32)):
            y = module.OwnRMSNorm(weight)(hidden_states=x)
            np.testing.assert_allclose(y.asnumpy(), normalized(x.asnumpy(), weight), 1e-5, 1e-6)


def test_other_defaults_stay(load):
    text = ROTATION.replace("unsqueeze_dim=1):", "unsqueeze_dim=2):").format(sign="+", axis=1)
    with msops.patch_mindspore():
        assert own_of(load(text).apply_rotary_pos_emb)


def test_functions_without_source():
    assert Formula(eval("lambda x: x")).text == ""  # noqa: S307 (this code is in no file)


def test_libraries_imported_before(load):
    module, text = load(NORM.format(LLAMA)), ROTATION.format(sign="+", axis=1)
    rotation, importing = load(text), load("from library_1 import apply_rotary_pos_emb\n" + NORM.format(LLAMA))
    owns = module.OwnRMSNorm.construct, rotation.apply_rotary_pos_emb, importing.apply_rotary_pos_emb
    with msops.patch_mindspore() as outer, msops.patch_mindspore():
        outer.undo()
        found = module.OwnRMSNorm.construct, rotation.apply_rotary_pos_emb, importing.apply_rotary_pos_emb
        assert not any(map(own_of, found))
    assert (module.OwnRMSNorm.construct, rotation.apply_rotary_pos_emb, importing.apply_rotary_pos_emb) == owns
    assert "__init_subclass__" not in vars(nn.Cell)


def rotated(x, cos, sin):
    first, second = np.split(np.float64(x), 2, -1)
    return x * cos + np.concatenate((-second, first), -1) * sin


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("axis", [1, 2])
def test_rotation(mode, load, axis, dtype):
    shape = (2, 5, 4, 8) if axis == 2 else (2, 4, 5, 8)
    q, k = (RNG.standard_normal(each).astype(dtype) for each in (shape, (*shape[:axis], 1, *shape[axis + 1 :])))
    angles = RNG.standard_normal((2, 5, 4))
    cos, sin = (np.concatenate((each, each), -1).astype(dtype) for each in (np.cos(angles), np.sin(angles)))
    with msops.patch_mindspore():
        module = load(ROTATION.format(sign="+", axis=axis))
        assert not own_of(module.apply_rotary_pos_emb)
        net = module.Attention()
        results = net(*map(Tensor, (q, k, cos, sin)))

        def squares(q, k, cos, sin):
            turned_q, turned_k = net(q, k, cos, sin)
            return (turned_q * turned_q).sum() + (turned_k * turned_k).sum()

        gradients = mindspore.grad(squares, (0, 1))(*map(Tensor, (q, k, cos, sin)))
    tolerance = {"float16": 4e-3, "float32": 2e-6}[dtype]
    tables = np.expand_dims(cos, axis), np.expand_dims(sin, axis)
    for x, got, gradient in zip((q, k), results, gradients):
        assert got.dtype == getattr(mindspore, dtype)
        np.testing.assert_allclose(got.asnumpy(), rotated(x, *tables), tolerance, tolerance)
        np.testing.assert_allclose(gradient.asnumpy(), 2 * np.float64(x), 4 * tolerance, 4 * tolerance)


@pytest.mark.parametrize("change", ["tables of float32", "three axes"])
def test_rotations_that_stay(mode, load, change):
    """Where the operator does not fit, the library's own function computes."""
    q, table = RNG.standard_normal((2, 4, 5, 8)).astype(np.float16), RNG.standard_normal((2, 5, 8)).astype(np.float16)
    if change == "tables of float32":
        table = table.astype(np.float32)
    else:
        q, table = q[0], table[0]
    axis = 0 if change == "three axes" else 1
    with msops.patch_mindspore():
        results = load(ROTATION.format(sign="+", axis=axis)).Attention()(*map(Tensor, (q, q, table, table)))
    wanted = rotated(q, np.expand_dims(table, axis), np.expand_dims(table, axis))
    assert results[0].dtype == (mindspore.float32 if change == "tables of float32" else mindspore.float16)
    for got in results:
        np.testing.assert_allclose(got.asnumpy(), wanted, 4e-3, 4e-3)


GEMMA = NORM.format(FORMULAS["gemma"][0])
OF_NORM = """
def make():
    weight = np.linspace(0.5, 2, 8).astype(np.float32)
    return {}
"""
WRAP = """
import functools
def wrapped(f):
    @functools.wraps(f)
    def g(*arguments, **named):
        out = f(*arguments, **named)
        {}
    return g
"""
TWICE, CLAMPED = WRAP.format("return out * 2"), WRAP.format("return mint.clamp(out, -0.5, 0.5)")
ALL_TWICE = WRAP.format("return tuple([each * 2 for each in out])")


def norm_with(old, new, text=LLAMA):
    """Returns a module whose norm differs in a word of its formula."""
    changed = NORM.format(text).replace(old, new)
    assert changed != NORM.format(text)
    return changed + OF_NORM.format("OwnRMSNorm(weight)")


def norm_and(more, made="OwnRMSNorm(weight)", text=GEMMA, before=""):
    """Returns a module of a norm, with more definitions before or after it."""
    begin = text.index("class OwnRMSNorm")
    return text[:begin] + before + "\n" + text[begin:] + "\n" + more + OF_NORM.format(made)


def subclass(body, bases="OwnRMSNorm"):
    return norm_and(f"class Sub({bases}):\n{body}\n", "Sub(weight)")


def rotation_with(old, new):
    changed = ROTATION.format(sign="+", axis=1).replace(old, new)
    assert changed != ROTATION.format(sign="+", axis=1)
    return changed + "\ndef make():\n    return Attention()\n"


def rotation_and(more, before=""):
    text = ROTATION.format(sign="+", axis=1)
    begin = text.index("class Attention")
    return text[:begin] + before + "\n" + text[begin:] + more + "\ndef make():\n    return Attention()\n"


HALF = "    def _norm(self, x):\n        return x * 0.5\n"
VARIANTS = {
    # Other formulas.
    "no square root": norm_with("ops.rsqrt", "mint.reciprocal"),
    "square root": norm_with("ops.rsqrt", "mint.sqrt"),
    "third power": norm_with("pow(2)", "pow(3).abs()"),
    "sum": norm_with("mean", "sum"),
    "first axis": norm_with("mean(-1", "mean(0"),
    "less eps": norm_with("+ self.variance_epsilon", "- 0.01 * self.variance_epsilon"),
    "twice eps": norm_with("+ self.variance_epsilon", "+ 2 * self.variance_epsilon"),
    "eps outside": norm_with("ops.rsqrt(variance + self.variance_epsilon)", "(ops.rsqrt(variance) + 0.125)"),
    "no weight": norm_with("return self.weight * hidden", "return hidden"),
    "weight is added": norm_with("self.weight * hidden", "self.weight + hidden"),
    "square of the weight": norm_with("self.weight *", "self.weight * self.weight *"),
    "factor": norm_with("self.weight *", "2 * self.weight *"),
    "by less than the weight": norm_with("(1.0 + self", "(1.0 - self", FORMULAS["gemma"][0]),
    "by two and the weight": norm_with("(1.0 + self", "(2.0 + self", FORMULAS["gemma"][0]),
    "centred": norm_with("hidden_states.pow(2)", "(hidden_states - hidden_states.mean(-1, keepdim=True)).pow(2)"),
    "float16 between": norm_with("to(ms.float32)", "to(ms.float16)"),
    "branch": norm_with(
        "variance = ", "if self.eps > 0:\n            hidden_states = hidden_states + 1\n        variance = "
    ),
    "loop": norm_with(
        "variance = ", "for _ in range(2):\n            hidden_states = hidden_states + 1\n        variance = "
    ),
    "sum in place": norm_with("variance = ", "hidden_states += 1\n        variance = "),
    "minus": rotation_with("(q * cos) +", "(q * cos) -"),
    "turned back": rotation_with("(-second, first)", "(second, -first)"),
    "halves in place": rotation_with("(-second, first)", "(first, second)"),
    "both negative": rotation_with("(-second, first)", "(-second, -first)"),
    "pairs": rotation_with("x[..., : x.shape[-1] // 2]", "x[..., ::2]").replace(
        "x[..., x.shape[-1] // 2 :]", "x[..., 1::2]"
    ),
    "keys stay": rotation_with("rotate_half(k)", "rotate_half(k) * 0"),
    "tables swapped": rotation_with("(q * cos) + (rotate_half(q) * sin)", "(q * sin) + (rotate_half(q) * cos)"),
    "results swapped": rotation_with("return q_embed, k_embed", "return k_embed, q_embed"),
    "queries twice": rotation_with("return q_embed, k_embed", "return q_embed, q_embed"),
    "scaled": rotation_with("return q_embed, k_embed", "return q_embed * 2, k_embed"),
    # Wrappers that the source does not show.
    "construct twice": norm_and("", before=TWICE).replace("    def construct", "    @wrapped\n    def construct"),
    "construct twice, put": norm_and("OwnRMSNorm.construct = wrapped(OwnRMSNorm.construct)", before=TWICE),
    "construct twice, in the class": norm_and("", before=TWICE, text=GEMMA + "\n    construct = wrapped(construct)\n"),
    "_norm twice": norm_and("", before=TWICE).replace(
        "    def construct", "    _norm = wrapped(_norm)\n    def construct"
    ),
    "_norm clamped": norm_and("", before=CLAMPED).replace(
        "    def construct", "    _norm = wrapped(_norm)\n    def construct"
    ),
    "_norm twice, decorated": norm_and("", before=TWICE).replace("    def _norm", "    @wrapped\n    def _norm"),
    "_norm twice, put": norm_and("OwnRMSNorm._norm = wrapped(OwnRMSNorm._norm)", before=TWICE),
    "rotation twice": rotation_and("", ALL_TWICE + "apply_rotary_pos_emb = wrapped(apply_rotary_pos_emb)\n"),
    "rotation twice, decorated": ALL_TWICE + rotation_and("").replace("def apply_rot", "@wrapped\ndef apply_rot"),
    "rotate_half twice": rotation_and("", TWICE + "rotate_half = wrapped(rotate_half)\n"),
    "rotate_half clamped": rotation_and("", CLAMPED + "rotate_half = wrapped(rotate_half)\n"),
    "rotate_half twice, decorated": TWICE + rotation_and("").replace("def rotate_half", "@wrapped\ndef rotate_half"),
    # Other methods behind the names.
    "mixin": subclass("    pass", "Mixin, OwnRMSNorm").replace("class Sub", f"class Mixin:\n{HALF}\nclass Sub"),
    "mixin of two": subclass("    pass", "Mixin, OwnRMSNorm").replace(
        "class Sub", f"class Base:\n{HALF}\nclass Mixin(Base):\n    pass\n\nclass Sub"
    ),
    "override": subclass(HALF),
    "override, super": subclass(HALF + "    def construct(self, x):\n        return super().construct(x)"),
    "override, super by class": subclass(
        HALF + "    def construct(self, x):\n        return OwnRMSNorm.construct(self, x)"
    ),
    "override of two": subclass(HALF)
    .replace("Sub(weight)", "Last(weight)")
    .replace("\ndef make", "\nclass Last(Sub):\n    pass\n\ndef make"),
    "static": subclass("    @staticmethod\n    def _norm(x):\n        return x * 0.5"),
    "of the class": subclass("    @classmethod\n    def _norm(cls, x):\n        return x * 0.5"),
    "callable": subclass("    _norm = Half()").replace(
        "class Sub", "class Half:\n    def __call__(self, x):\n        return x * 0.5\n\nclass Sub"
    ),
    "of the instance": subclass(
        "    def __init__(self, weight):\n        super().__init__(weight)\n        self._norm = mint.abs"
    ),
    "put on the instance": norm_and("", "put(OwnRMSNorm(weight))").replace(
        "\ndef make", "\ndef put(net):\n    net._norm = mint.abs\n    return net\n\ndef make"
    ),
    "put on the class later": norm_and("", "put(OwnRMSNorm(weight))").replace(
        "\ndef make", "\ndef put(net):\n    type(net)._norm = lambda self, x: x * 0.5\n    return net\n\ndef make"
    ),
    # Other things behind the names of a module.
    "own rsqrt": norm_with("ops.rsqrt", "rsqrt").replace("class Own", "rsqrt = ops.Sqrt()\nclass Own"),
    "own function rsqrt": norm_with("ops.rsqrt", "rsqrt").replace(
        "class Own", "def rsqrt(x, n=2):\n    return x * n\nclass Own"
    ),
    "own ops": norm_and("", text=NORM.format(LLAMA), before="class ops:\n    rsqrt = staticmethod(lambda x: x * 2)\n"),
    "own cat": rotation_with("mint.cat", "cat").replace(
        "def rotate_half",
        "class Cat:\n    def __call__(self, x, dim):\n        return -mint.cat(x, dim)\ncat = Cat()\ndef rotate_half",
    ),
    "rotate_half again": rotation_and("\ndef rotate_half(x):\n    return x * 2\n"),
    "lambda rotate_half": rotation_and("", before="rotate_half = lambda x: x * 2\n"),
    # Other arguments.
    "residual": norm_and(
        "class Outer(nn.Cell):\n    def __init__(self, norm):\n        super().__init__()\n        self.norm = norm\n"
        "    def construct(self, x):\n        return self.norm(x, None)\n",
        "Outer(OwnRMSNorm(weight))",
    ).replace("def construct(self, hidden_states)", "def construct(self, hidden_states, residual=None)"),
    "more arguments": norm_and("", text=GEMMA).replace(
        "def construct(self, hidden_states)", "def construct(self, hidden_states, *more)"
    ),
    "default": norm_and("", text=GEMMA).replace(
        "def construct(self, hidden_states)", "def construct(self, hidden_states=None)"
    ),
    "negative eps": norm_and("", "OwnRMSNorm(weight, -1e-3)"),
    "tiny eps": norm_and("", "OwnRMSNorm(weight, 1e-60)"),
}


IN_GRAPH_MODE = "mixin", "override, super", "put on the class later", "rotate_half again", "residual"


def computed(load, names):
    """Returns what each variant computes."""
    found, rng = {}, np.random.default_rng(0)
    rows, of_heads = [(2, 3, 8)], [(2, 4, 6, 8), (2, 4, 6, 8), (2, 6, 8), (2, 6, 8)]
    for name in names:
        text = "import numpy as np\n" + VARIANTS[name]
        arrays = [rng.standard_normal(s).astype(np.float32) for s in (of_heads if "class Attention" in text else rows)]
        try:
            found[name] = as_tuple(load(text).make()(*map(Tensor, arrays)))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return found


@pytest.mark.parametrize(("in_mode", "names"), [("pynative", VARIANTS), ("graph", IN_GRAPH_MODE)])
def test_variants_compute_as_without_the_patch(load, in_mode, names):
    """What is no formula of msops', or means something else by its names, computes as it does by itself. One patch
    serves all, since it takes half a second."""
    mindspore.set_context(mode=MODES[in_mode])
    want = computed(load, names)
    with msops.patch_mindspore():
        got = computed(load, names)
    for name in names:
        for each, wanted in zip(got[name], want[name]):
            np.testing.assert_allclose(each.asnumpy(), wanted.asnumpy(), 1e-5, 1e-5, err_msg=name)
