"""Shows doctests as code in the API reference; mkdocstrings loads this as an extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)  # up to an empty line or the end


class DoctestBlocks(griffe.Extension):
    """Markdown reads `>>>` as a quotation: a fence around each example keeps it code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
