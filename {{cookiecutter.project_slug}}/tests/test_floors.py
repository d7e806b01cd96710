"""The trainer's modules import one another downwards only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from .project import PACKAGE, ROOT

TRAINER = ROOT / "src" / PACKAGE / "trainer"
# From the ground up; a module may import what stands on a line before its own.
FLOORS = [
    {"errors", "distributed", "dtensors", "randomness", "progress", "pickling", "stacks"},
    {"redaction", "commit", "blocks", "forks"},
    {"safetensors_reader", "safetensors_writer", "run_lock"},
    {"files", "preemption", "stored_tensors", "checkpoint_state", "elsewhere", "hidden_gpus"},
    {"paths", "ranges", "values", "loaders", "leftover_threads", "interfaces"},
    {"reading"},
    {"cluster", "devices", "idle_gpus", "legacy", "loggers", "outcome", "nccl_watch"},
    {"metrics", "scaling", "optimization", "precision", "interruption", "finite"},
    {"gpu_backends"},
    {"activation_checkpointing"},
    {"compilation", "sync_batchnorm", "batch_size", "watchdog", "restarts"},
    {"sampling", "checkpoint", "rendezvous", "module"},
    {"hooks", "feed", "run_directory", "launch", "meta_device", "outputs", "checkpoint_writer"},
    {"transfer"},
    {"strategies", "schedule", "run_choice"},
    {"evaluation", "manual_optimization", "environment", "placement"},
    {"loop", "batch_size_trial", "device_choice"},
    {"arguments"},
    {"announcements"},
    {"rank_run"},
    {"trainer"},
]


def imports(path: Path) -> set[str]:
    """Modules of the trainer that a file imports, at whatever place but for types alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    depth = len(path.relative_to(TRAINER).parts)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names if name}
    return found


def graph() -> dict[str, set[str]]:
    """What each module of the trainer imports; the strategies are one."""
    found: dict[str, set[str]] = {}
    for path in sorted(TRAINER.rglob("*.py")):
        name = path.relative_to(TRAINER).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, set()).update(imports(path) - {name})
    return found


def test_no_module_imports_itself_round_a_circle():
    assert len(list(TopologicalSorter(graph()).static_order())) == len(graph())


def test_imports_go_down_only():
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    assert floor.keys() == graph().keys()
    upward = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if floor[other] >= floor[name]
    ]
    assert upward == []
