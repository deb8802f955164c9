"""The examples in docstrings and README run, and print what they say."""

import doctest
import re
import sys
from pathlib import Path

import mindspore
import pytest

import msops
import msops.testing.entry

README = Path(__file__).resolve().parents[1] / "README.md"


PUBLIC = {name: getattr(msops, name) for name in msops.__all__}
PUBLIC |= {name: getattr(msops.testing, name) for name in msops.testing.__all__}
PUBLIC["prepare"] = msops.testing.entry.prepare


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    public = PUBLIC[name]
    (example,) = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    assert example.examples or "See :func:`msops." in public.__doc__
    failures = []
    doctest.DocTestRunner().run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_readme(capsys, tmp_path, monkeypatch):
    """The longest Python block, as a module, since MindSpore wants to read the source of what it compiles."""
    code = max(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL), key=len)
    (tmp_path / "readme_example.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("readme_example")
    del sys.modules["readme_example"]
    printed = [line.split("  # ")[1] for line in code.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == printed
