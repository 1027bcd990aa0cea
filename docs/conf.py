"""Sphinx configuration."""

import hashlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path

from jupyter_cache import get_cache
from sphinx.util import logging

import numpyro_wide

HERE = Path(__file__).parent
logger = logging.getLogger(__name__)
os.environ["CI"] = "1"  # no progress bars on pages
sys.path.insert(0, str(HERE))
import pages  # noqa: E402

project = "numpyro_wide"
author = "The numpyro_wide developers"
project_copyright = "the numpyro_wide developers, Apache-2.0"
version = release = numpyro_wide.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "kernels",
    "mathml",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
]
napoleon_use_ivar = True  # attributes of named tuples are documented once
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
math_eqref_format = "eq. {number}"  # as docstrings cite papers
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["outputs.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True  # a function by its name, not by its address
autosummary_generate = False  # tables alone: objects stand on the page
bibtex_bibfiles = [pages.BIBLIOGRAPHY.name]
bibtex_default_style = "years"
bibtex_reference_style = "years"

# Pages are executed once for each state of the package's code; what they print and draw is kept beside the build.
sources = sorted(Path(numpyro_wide.__file__).parent.rglob("*.py"))
digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[
    :16
]
nb_execution_cache_path = str(HERE / "_build" / "outputs" / digest)
get_cache(
    nb_execution_cache_path
).list_cache_records()  # there before two processes would both make it
nb_custom_formats = {".md": "pages.read"}
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # of one cell, on a busy machine
# Pages without code need no kernel, and would race for one record of the cache. The notebook is shown with the outputs
# that it holds, and the gallery with the figures of its studies; the tests run both.
nb_execution_excludepatterns = ["notebooks/*", "gallery/*", *pages.without_code()]
nb_output_stderr = "remove-warn"  # a page that warns fails the build
# Pages run a program once or twice: most of their time is compilation, shortened as `make test` does (conftest.py).
if metadata.version("jaxlib").startswith("0.9."):
    quick = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ.setdefault("XLA_FLAGS", quick)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Pages share many small programs, and a second build most of all; JAX logs each that it reads.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(HERE / "_build" / "programs")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CI"] = "true"  # NumPyro draws no progress bars there
# ArviZ 0.23 announces its next generation at import, and tqdm misses a widget.
os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore:IProgress not found"
os.environ["MATPLOTLIBRC"] = str(HERE / "matplotlibrc")


def dollars_to_roles(app, what, name, obj, options, lines):
    """Docstrings write $...$ and $$...$$; reStructuredText wants roles and directives."""
    text = "\n".join(lines)
    text = re.sub(
        r"\$\$(.+?)\$\$",
        lambda m: "\n.. math:: " + " ".join(m[1].split()) + "\n",
        text,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"\$(.+?)\$",
        lambda m: ":math:`" + " ".join(m[1].split()) + "`",
        text,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"^( +\w+)_: ", r"\1\\_: ", text, flags=re.MULTILINE
    )  # report_ would be a reference without its end
    lines[:] = text.split("\n")


def skip_fields(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples, "Alias for field number N": the class's docstring has them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def leave_out_flax_fields(app, what, name, obj, options, signature, returned):
    """Leave out what every flax module takes besides its own fields: its parent and its name."""
    return re.sub(
        r", parent=<[^>]*>(, name=[^,)]*)?", "", signature or ""
    ) or signature, returned


def tell_page(app, name, source):
    """Print a line for every page that runs code, before it runs."""
    number = source[0].count("```python")
    if number and not name.startswith(("notebooks/", "gallery/")):
        logger.info("%s: %d blocks", name, number)


def setup(app):
    app.connect("source-read", tell_page)
    app.connect("autodoc-process-signature", leave_out_flax_fields)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", dollars_to_roles, priority=1)
    app.connect("autodoc-process-docstring", pages.cite_in_docstring, priority=2)
    app.connect("source-read", pages.cite_in_page)
    app.connect("source-read", pages.offer_notebook)
    app.connect("source-read", pages.list_names)
    app.connect("doctree-resolved", pages.link_figures)
    app.connect("doctree-resolved", pages.mark_tables)
