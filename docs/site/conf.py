"""Configuration of Sphinx; `build.py` calls it."""

from sphinx.ext.napoleon import GoogleDocstring

import lightning_sparsefl

project = "lightning-sparsefl"
author = "The lightning-sparsefl developers"
release = version = lightning_sparsefl.__version__
copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["**/.ipynb_checkpoints"]
default_role = "literal"  # docstrings write `name` for code
suppress_warnings = ["config.cache"]

toc_object_entries = False  # each page has the sidebar of all pages, which takes most of the time with them

html_theme = "furo"
html_title = f"lightning-sparsefl {release}"
html_copy_source = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are committed with their output, and the tests run them

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Napoleon reads an attribute's docstring as "type: text"; ours are plain sentences, in which a colon may occur.
GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()
