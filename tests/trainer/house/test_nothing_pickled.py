"""What ranks send one another is tensors or JSON: a pickle runs what its sender wants."""

import ast
import re

from test_floors import TRAINER

# Collectives that pickle: torch's (broadcast_object_list, …) and Horovod's.
_PICKLE = re.compile(r"_object(_list)?$|^broadcast_optimizer_state$")


def test_no_collective_of_the_trainer_pickles() -> None:
    called = {
        f"{path.relative_to(TRAINER)}: {node.func.attr}"
        for path in TRAINER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if _PICKLE.search(node.func.attr)
    }
    # jsonargparse's
    assert called == {"options/conversion.py: parse_object"}
