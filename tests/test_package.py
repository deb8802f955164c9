"""The package imports what it needs when a name of it is first asked for."""

import pytest

import msops
from child import run_python

IN_GRAPH = """
import sys
import mindspore
import msops

assert "msops.operators" not in sys.modules
mindspore.set_context(mode=mindspore.{mode})


class Cell(mindspore.nn.Cell):
    def construct(self, x):
        return msops.add(msops.sigmoid(x), x)


print(Cell()(mindspore.Tensor([0.0], mindspore.float32)))
"""


def run(code, tmp_path):
    path = tmp_path / "program.py"  # MindSpore reads the source of what it compiles
    path.write_text(code)
    done = run_python(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light(tmp_path):
    code = "import sys, msops, msops.__main__; print([name for name in sys.modules if name in ('mindspore', 'numpy')])"
    assert run(code, tmp_path) == "[]\n"


@pytest.mark.parametrize("mode", ["GRAPH_MODE", "PYNATIVE_MODE"])
def test_first_use_in_a_cell(mode, tmp_path):
    assert run(IN_GRAPH.format(mode=mode), tmp_path) == "[0.5]\n"


def test_operators_stay_functions(tmp_path):
    """Their modules have the same names."""
    code = "import msops.operators.sigmoid\nfrom msops import *\nprint(sigmoid is msops.sigmoid, callable(sigmoid))"
    assert run(code, tmp_path) == "True True\n"


def test_names(tmp_path):
    assert run("import msops; print({*msops.__all__} <= {*dir(msops)})", tmp_path) == "True\n"
    for name in msops.__all__:
        assert getattr(msops, name).__name__ == name
    with pytest.raises(AttributeError, match=r"^module 'msops' has no attribute 'sigmiod'$"):
        _ = msops.sigmiod
