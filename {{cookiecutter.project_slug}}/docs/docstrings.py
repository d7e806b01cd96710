"""For MkDocs: docstrings as Markdown, which the sources write with a few words of reST."""

import re
from typing import Any

import griffe

# :class:`~.options.Options` becomes `Options`, and the colons before an example one.
ROLE = re.compile(r":\w+:`~?[\w.]*?\.?(\w+)`")
EXAMPLE = re.compile(r"(?<=\w)::$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(":\n", text)
