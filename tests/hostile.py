"""Answers that break templates, and a place to try them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rendering import tree

# Each payload that is run, by Jinja, a shell or Python, makes a file of this name.
CANARY = "canary"
# What Jinja would run if the value were compiled as a template: it needs no variable.
JINJA_CODE = "{{ cycler.__init__.__globals__.os.system('touch canary') }}"

HOSTILE: dict[str, str] = {
    "single quote": "it's",
    "double quote": 'say "x"',
    "triple quotes": "\"\"\"x''' + y",
    "apostrophe": "O'Brien",
    "command substitution": "$(touch canary)",
    "backticks": "`touch canary`",
    "semicolon": "x; touch canary #",
    "variable": "${HOME} $$ $(shell touch canary)",
    "braces": "{{ 7*7 }}",
    "Jinja code": JINJA_CODE,
    "Jinja statement": "{% if cycler.__init__.__globals__.os.system('touch canary') %}{% endif %}",
    "Jinja raw": "{% raw %}x",
    "Jinja comment": "{# x",
    "half a brace": "}} x %}",
    "parent": "../../x",
    "absolute path": "/tmp/cookiecutter-canary",  # noqa: S108 - a path to refuse, not to use
    "home": "~",
    "dots": "..",
    "newline": "x\ny",
    "newline of TOML": 'x"\nname = "y',
    "CRLF": "x\r\ny",
    "NUL": "x\0y",
    "escape": "x\x1b[31my",
    "line separator": "x\u2028y",
    "right to left": "x\u202ey",
    "surrogate": "x\udce9y",
    "unicode": "Zoë 日本",
    "emoji": "🔥",
    "emoji, joined": "👩‍💻 x",
    "empty": "",
    "blank": "   ",
    "300 characters": "x" * 300,
    "keyword": "class",
    "soft keyword": "match",
    "standard library": "json",
    "dependency": "torch",
    "own folder": "tests",
    "leading dash": "-rf",
    "trailing dash": "x-",
    "leading digit": "3d",
    "percent": "%s %(x)s",
    "hash": "x # y",
    "backslashes": "a\\b\\\\c\\n\\",
    "trailing dot": "x.",
    "trailing space": "x ",
    "device of Windows": "aux",
    "angle brackets": "<b>x</b> & y",
    "YAML": "x: [y, *z]",
    "markup of rich": "[bold]x[/]",
    "false": "false",
}


@dataclass(frozen=True)
class Area:
    """A folder with an empty output folder and an empty working folder in it, three levels deep."""

    root: Path

    @property
    def output(self) -> Path:
        return self.root / "a" / "b" / "output"

    @property
    def cwd(self) -> Path:
        return self.root / "a" / "b" / "cwd"

    def lay(self) -> None:
        self.output.mkdir(parents=True)
        self.cwd.mkdir()

    def assert_nothing_ran(self) -> None:
        """Assert that no payload has left its mark, here or at the absolute path among them."""
        assert not list(self.root.rglob(CANARY))
        assert not Path("/tmp/cookiecutter-canary").exists()  # noqa: S108 - see above

    def assert_untouched(self) -> None:
        self.assert_nothing_ran()
        assert tree(self.root) == {"a", "a/b", "a/b/output", "a/b/cwd"}

    def the_project(self) -> Path:
        """Return the one folder that was rendered, and assert that it is all that was written."""
        self.assert_nothing_ran()
        (project,) = self.output.iterdir()
        outside = {name for name in tree(self.root) if not name.startswith("a/b/output/")}
        assert outside == {"a", "a/b", "a/b/output", "a/b/cwd"}
        return project
