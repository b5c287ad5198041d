"""Sphinx configuration: MyST pages and the API from its docstrings, built without a network."""

import apex

project = "apex-amp"
author = "the apex-amp authors"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
release = version = apex.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# No inventories of other projects (the build runs offline): only our own names must resolve.
nitpick_ignore_regex = [("py:.*", r"(?!apex\.).*")]

html_theme = "furo"
html_title = f"apex-amp {release}"
