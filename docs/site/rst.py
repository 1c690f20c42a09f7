"""Parts of pages in reStructuredText."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def heading(text: str, line: str = "-") -> str:
    """Return a heading.

    Args:
        text: Text of the heading.
        line: Character of the line below it, which decides about the level.
    """
    return f"{text}\n{line * len(text)}"


def code(value: Any) -> str:
    """Return a value as code; nothing for an empty text.

    Args:
        value: Value, shown as Python shows it, or a text, shown as it is.
    """
    text = value if isinstance(value, str) else repr(value)
    return f"``{text}``" if text else ""


def list_table(header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> str:
    """Return a table.

    Args:
        header: Titles of the columns.
        rows: Cells of each row, as reStructuredText.
        widths: Relative widths of the columns. Default: as their content needs.
    """
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {' '.join(map(str, widths)) or 'auto'}", ""]
    for row in (header, *rows):
        for index, cell in enumerate(row):
            mark = "* -" if index == 0 else "  -"
            lines.append(f"   {mark} " + textwrap.indent(cell.strip(), "       ").strip())
    return "\n".join(lines)


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and of its bases.

    Args:
        kind: Class whose source has a string after each field.
    """
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs
