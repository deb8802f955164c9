"""Tests whether callers of a function of a model library use its second result."""

import pytest

CALLERS = {  # bodies of functions of f, which returns a tuple of two, and whether they drop the second one
    "underscore": ("x, _ = f(); return x", True),
    "a name that nobody reads": ("x, w = f(); w = 0; return x", True),
    "first": ("return f()[0]", True),
    "in a list": ("return [f()[0] for _ in range(1)]", True),
    "guard": ("x, w = f(); return (x, w) if a else (x,)", True),
    "guard of a statement": ("x, w = f(); y = (x,)\n    if a:\n        y += (w,)\n    return y", True),
    "guard that is None": ("x, w = f(); return (x, w) if none else (x,)", True),
    "handed on": ("_, x = swapped(f); return x", True),
    "handed on whole": ("x, _ = whole(f); return x", True),
    "second": ("return f()[1]", False),
    "last": ("return f()[-1]", False),
    "a part": ("return f()[:1]", False),
    "whole": ("return f()", False),
    "a tuple": ("y = f(); return y[0]", False),
    "used": ("x, w = f(); return x + w", False),
    "both": ("x, w = f(); return x, w", False),
    "guard that is true": ("x, w = f(); return (x, w) if true else (x,)", False),
    "turned guard": ("x, w = f(); return (x,) if a else (x, w)", False),
    "guard that changes": ("x, w = f(); a = True; return (x, w) if a else (x,)", False),
    "list": ("y = [0, 0]; x, y[0] = f(); return y", False),
    "closure": ("x, w = f(); return lambda: w", False),
    "locals": ("x, w = f(); return locals()", False),
    "starred": ("x, w = f(); return *(1, 2), w", False),
    "two places": ("x, w = f()\n    if a:\n        return x, w\n    return w, x", False),
    "swapped on its way": ("x, _ = swapped(f); return x", False),
    "changed": ("x, w = f(); w += 1; return x", False),
    "one of two results": ("x, _ = map(lambda _: f(), (1, 2)); return x", False),
    "one of a list of two results": ("x, _ = list(map(lambda _: f(), (1, 2))); return x", False),
    "within a call": ("x, _ = tuple(f()); return x", False),
}
CALLED = """
from msops.patch.callers import is_dropped
found = []

def f():
    found.append(is_dropped(1))
    return 1, 2

def swapped(f):
    x, w = f()
    return w, x

def whole(f):
    return f()

def call(f, a=False, none=None, true=True):
    {}
"""


@pytest.mark.parametrize("name", CALLERS)
def test_callers(load, name):
    body, drops = CALLERS[name]
    module = load(CALLED.format(body))
    result = module.call(module.f)
    assert result is not None
    assert set(module.found) == {drops}
