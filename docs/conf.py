"""Sphinx configuration."""

import re

import numpyro_wide

project = "numpyro_wide"
author = "The numpyro_wide developers"
version = release = numpyro_wide.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
napoleon_use_ivar = True  # attributes of named tuples are documented once
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
math_eqref_format = "eq. {number}"  # as docstrings cite papers
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_member_order = "bysource"
autodoc_typehints = "none"


def dollars_to_roles(app, what, name, obj, options, lines):
    """Docstrings write $...$ and $$...$$; reStructuredText wants roles and directives."""
    text = "\n".join(lines)
    text = re.sub(r"\$\$(.+?)\$\$", lambda m: "\n.. math:: " + " ".join(m[1].split()) + "\n", text, flags=re.DOTALL)
    text = re.sub(r"\$(.+?)\$", lambda m: ":math:`" + " ".join(m[1].split()) + "`", text, flags=re.DOTALL)
    lines[:] = text.split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", dollars_to_roles, priority=1)
