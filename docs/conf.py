"""How Sphinx builds the documentation: make docs."""

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

import msops

project = "msops"
version = release = msops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

default_role = "code"  # `x` in docstrings
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True  # attributes as a list in the class
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings have them

html_theme = "furo"
html_title = "msops"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False


class Operators(SphinxDirective):
    """The operators of the package, which are the public names that are defined in msops.operators."""

    def run(self):
        text = []
        for public in (getattr(msops, name) for name in sorted(msops.__all__, key=str.lower)):
            if not public.__module__.startswith("msops.operators."):
                continue
            if isinstance(public, type):
                members = [name for name, value in vars(public).items() if name[0] != "_" and value.__doc__]
                members = ", ".join(name for name in members if name not in ("construct", "extend_repr"))
                text += [f".. autoclass:: {public.__name__}", f"   :members: {members}" if members else "", ""]
            else:
                text += [f".. autofunction:: {public.__name__}", ""]
        return self.parse_text_to_nodes(StringList(text, source=__file__))


def setup(app):
    app.add_directive("operators", Operators)
