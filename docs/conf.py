"""The site: `make docs` builds it into docs/_build/html, with warnings as errors."""

import os
import shutil
from pathlib import Path

import lazyshards

DOCS = Path(__file__).parent
ROOT = DOCS.parent

# Links that lead out of this folder when the pages are read as plain files, and where the same lies in the site.
IN_THE_SITE = {
    "](../../notebooks/": "](../notebooks/",
    "](../../benchmarks/README.md": "](../about/benchmarks.md",
    "](../../CHANGELOG.md": "](../about/changelog.md",
    "](../../CONTRIBUTING.md": "](../about/contributing.md",
}

# The notebooks are executed while the site is built, as users would run them: on the engine that `auto` takes.
for name in ("LAZYSHARDS_ENGINE", "LEGATE_CONFIG", "MPLBACKEND"):
    os.environ.pop(name, None)
os.environ["PYTHONPATH"] = str(ROOT)
shutil.copytree(ROOT / "notebooks", DOCS / "notebooks", dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "__*"))

project = "lazyshards"
author = "The lazyshards developers"
copyright = author
release = version = lazyshards.__version__

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "**/.*"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "cache"  # what was executed once is executed again only if its code changed
nb_execution_cache_path = str(DOCS / "_build" / "executed")
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_output_stderr = "error"
nb_merge_streams = True

autodoc_member_order = "bysource"
# Objects are made by functions, and records have their fields listed in order: no signatures of classes.
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
autodoc_typehints = "none"  # the docstrings say what a parameter is, and in words
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Every cross-reference has to lead somewhere. The exceptions are names of Python and NumPy, whose own sites would have
# to be asked while this one is built; it is built without a network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:class", r"(Exception|\w*Error|UserWarning|object|tuple)"),
    (r"py:class", r"(collections|typing|numpy)\..*"),
]

toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "lazyshards"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "lazyshards"},
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_sidebars = {"index": []}


def lead_within_the_site(app, docname, source):
    """Have links to files of the repository lead to the same pages in the site."""
    for outside, inside in IN_THE_SITE.items():
        source[0] = source[0].replace(outside, inside)


def setup(app):
    """Register the step above."""
    app.connect("source-read", lead_within_the_site)
