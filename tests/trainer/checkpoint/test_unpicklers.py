"""Nothing in the sources unpickles or runs what it reads."""

import ast
import re

import pytest
from tests.project import PACKAGE, ROOT

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"}
# Collectives that unpickle what another process sent; not parse_object, and not our _is_object.
OBJECTS = re.compile(r"(?<!parse)(?<!_is)_object(_list)?$|^broadcast_optimizer_state$")


def suspicious(tree: ast.AST) -> list[str]:
    """What in a source could run what it reads."""
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            calls += [name.name for name in node.names if name.name in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            calls += [node.module] if node.module in UNPICKLERS else []
            calls += [alias.name for alias in node.names if OBJECTS.search(alias.name)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = called == "torch.load" and keywords.get("weights_only") == "True"
            bad = OBJECTS.search(called.split(".")[-1]) or called in RUNNERS | LOADERS
            calls += [called] if bad and not safe else []
    return calls


def test_nothing_in_the_sources_unpickles_or_runs_what_it_reads() -> None:
    sources = sorted((ROOT / "src").rglob("*.py"))
    assert len(sources) > 20
    calls_of = {
        str(path.relative_to(ROOT)): suspicious(ast.parse(path.read_text())) for path in sources
    }
    assert {path: calls for path, calls in calls_of.items() if calls} == {
        # What a process has pickled itself for those that it starts, and what they send back.
        f"src/{PACKAGE}_trainer/launch/start.py": ["pickle"],
        # Writes only, to find out what cannot be.
        f"src/{PACKAGE}_trainer/launch/pickling.py": ["pickle"],
    }


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("torch.load(f)", ["torch.load"]),
        ("torch.load(f, weights_only=False)", ["torch.load"]),
        ("torch.load(f, weights_only=True)", []),
        ("eval(text)", ["eval"]),
        ("module.eval()", []),
        ("dist.all_gather_object(a, b)", ["dist.all_gather_object"]),
        ("hvd.broadcast_optimizer_state(a, 0)", ["hvd.broadcast_optimizer_state"]),
        ("parser.parse_object(a)", []),
    ],
)
def test_the_search_finds(source: str, names: list[str]) -> None:
    assert suspicious(ast.parse(source)) == names
