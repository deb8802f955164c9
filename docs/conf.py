"""How Sphinx builds the documentation: make docs."""

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
html_copy_source = False
