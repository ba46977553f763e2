"""The site: `sphinx-build -W -b html docs build/site`."""

import re

import jgc
import jgc.comm
import jgc.method

project = "jgc"
version = release = jgc.__version__
html_title = "jgc: gradient compression for JAX"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["jupyter_execute"]

nb_execution_mode = "force"  # every build runs every code cell: the pages show the output of this version
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # a wait for a busy machine, not a measure of the cells, which take seconds
nb_merge_streams = True

suppress_warnings = [
    "ref.python",  # values of a Literal are looked up as if they were types: 'scale', 'mean'
    "toc.not_included",  # the tables behind a result page are reached from it, not from the sidebar
]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say what arguments are
autodoc_default_options = {"members": True, "inherited-members": "tuple,object"}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_use_ivar = True

PLACES = {name: f"{module.__name__}.{name}" for module in (jgc.comm, jgc.method, jgc.compress, jgc)
          for name in vars(module) if not name.startswith("_")}  # fmt: skip


def code_of(match):
    """Docstrings write code in single backticks: a link where it names something public, else literal text."""
    text = match[1].removesuffix("()")
    place = PLACES.get(text) or PLACES.get(text.removeprefix("jgc.").removeprefix("compress."))
    code = f":py:obj:`{text} <{place}>`" if place else f"``{match[1]}``"
    return code + (r"\ " if match[2] else "") + match[2]


COLON = "\uf001"  # replaces a colon in the help of a setting, where Napoleon would read a type


def without_colons(app, what, name, obj, options, lines):
    """For autodoc-process-docstring, before Napoleon."""
    if what in ("attribute", "property"):
        lines[:] = [line.replace(":", COLON) for line in lines]


def with_code(app, what, name, obj, options, lines):
    """For autodoc-process-docstring, after Napoleon."""
    text = "\n".join(lines).replace(COLON, ":")
    lines[:] = re.sub(r"(?<![`:])`([^`\n]+)`(?!`)(\w?)", code_of, text).split("\n")


def without_tuple_fields(app, what, name, obj, skip, options):
    """For autodoc-skip-member: a NamedTuple's docstring lists its fields, which have no other text."""
    return True if type(obj).__name__ == "_tuplegetter" else skip


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", without_colons, priority=400)
    app.connect("autodoc-process-docstring", with_code, priority=600)
    app.connect("autodoc-skip-member", without_tuple_fields)
