"""Says which names of torch that the trainer uses are missing in a version, from its sources.

usage: python tools/torch_names.py FOLDER VERSION …      such as 2.10.*

Wheels for macOS, which are small, are downloaded into FOLDER; nothing is installed. What the
trainer imports, or reads from a module (`torch.a.b`), must be bound there. Private attributes and
keywords of its calls must occur somewhere. A name that all these versions lack is made at run time.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from subprocess import run

TEMPLATE = Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"
TRAINER = TEMPLATE / "src" / "{{cookiecutter.package_name}}_trainer"
PLATFORMS = [f"--platform=macosx_{version}_arm64" for version in ("11_0", "14_0")]
DOWNLOAD = [*PLATFORMS, "--no-deps", "--only-binary=:all:", "--python-version=3.12", "-qq"]
READ = (ast.Attribute, ast.Call)


def bound(node: ast.AST, package: list[str]) -> Iterator[tuple[str, str]]:
    """The names that code binds and the paths that they import; of ``import *`` only the path."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                yield name, ""
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) + 1 - level] if level else []
                path = ".".join([*above, *filter(None, [module])])
                for one in names:
                    yield one.asname or one.name.replace("*", f"{path}.*"), f"{path}.{one.name}"
            case ast.alias(name=name, asname=asname):
                yield asname or name.partition(".")[0], name if asname else name.partition(".")[0]
            case _:
                yield from bound(child, package)


def used(tree: ast.Module) -> Iterator[str]:
    """Paths below torch that a file imports or reads, private attributes, and keywords of calls."""
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef)]
    known = {name: path for scope in scopes for name, path in bound(scope, []) if path}
    paths = list(known.values())
    for node in ast.walk(tree):
        first, _, rest = (
            ast.unparse(node).partition(".") if isinstance(node, READ) else ("", "", "")
        )
        path = f"{known.get(first)}.{rest}"
        if isinstance(node, ast.Attribute):
            paths += [path, *([node.attr] if re.match("_[a-z]", node.attr) else [])]
        elif isinstance(node, ast.Call) and path.startswith("torch."):
            paths += [keyword.arg for keyword in node.keywords if keyword.arg]
    return (path for path in paths if re.fullmatch(r"torch(\.\w+)+|\w+", path))


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that a file gives to its attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


class Version:
    """The modules of a wheel."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as files:
            stubs = [name for name in files.namelist() if re.search(r"^torch/.*\.pyi?$", name)]
            self.files = {name.replace("/", "."): files.read(name).decode() for name in stubs}
        self.words = {word for text in self.files.values() for word in re.findall(r"\w+", text)}
        self.modules = {re.sub(r"(\.__init__)?\.pyi?$", "", name) for name in self.files}

    @cache  # noqa: B019 - there are as many as versions
    def names(self, module: str) -> dict[str, str]:
        """What a module binds."""
        files = [f"{module}{x}" for x in (".py", ".pyi", ".__init__.py", ".__init__.pyi")]
        texts = {name: self.files[name] for name in files if name in self.files}
        bindings = [bound(ast.parse(text), name.split(".")[:-2]) for name, text in texts.items()]
        return dict(binding for names in bindings for binding in names)

    def has(self, path: str, seen: tuple[str, ...] = ()) -> bool:
        """Whether it is a module, or a module binds it."""
        module, _, name = path.rpartition(".")
        names = self.names(module)
        stars = [star[:-2] for star in names if star.endswith(".*") and star[:-2] not in seen]
        inside = (self.has(f"{star}.{name}", (*seen, module)) for star in stars)
        return path in self.modules or name in names or any(inside)

    def lacks(self, path: str) -> str:
        """What is missing of a path: up to its first name that is no module."""
        if "." not in path:
            return "" if path in self.words else path
        above = accumulate(path.split("."), "{}.{}".format)
        first = next((prefix for prefix in above if prefix not in self.modules), path)
        return "" if self.has(first) else first


def missing(trainer: list[ast.Module], versions: list[Version]) -> list[set[str]]:
    """Of each version: the names that it lacks and another has."""
    wanted: set[str] = {name for tree in trainer for name in used(tree)}
    wanted -= {name for tree in trainer for name in defined(tree)}
    lacked = [{name for name in map(v.lacks, wanted) if name} for v in versions]
    return [lacking - lacked[0].intersection(*lacked) for lacking in lacked]


if __name__ == "__main__":
    folder, wheels = Path(sys.argv[1]), []
    for version in sys.argv[2:]:
        place = folder / version.rstrip(".*")
        if not [*place.glob("torch-*.whl")]:
            pip = [sys.executable, "-m", "pip", "download", *DOWNLOAD, f"--dest={place}"]
            run([*pip, f"torch=={version}"], check=True)
        wheels.append(Version(*place.glob("torch-*.whl")))
    lacked = missing([ast.parse(file.read_text("utf-8")) for file in TRAINER.rglob("*.py")], wheels)
    for version, names in zip(sys.argv[2:], lacked, strict=True):
        print(f"torch {version}:", ", ".join(sorted(names)) or "nothing is missing")
    sys.exit(any(lacked))
