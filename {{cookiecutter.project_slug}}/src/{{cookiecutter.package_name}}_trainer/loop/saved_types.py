"""Compare the types of a checkpoint's values with those that torch's own classes save.

The classes of torch load any value, and fail with it in a later step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..checkpoint import Stored
from ..strategies.optimizer_state import implementation

_TENSORS = Tensor | Stored
_KINDS: Sequence[tuple[Any, str]] = (
    (bool, "true or false"),
    (int | float, "a number"),
    (str, "text"),
    (_TENSORS, "a tensor"),
    (Mapping, "a dict"),
    (list, "a list"),
    (tuple, "a tuple"),
)


def is_of_torch(value: object) -> bool:
    """Whether torch has defined the class."""
    return type(value).__module__.startswith("torch.")


def check(saved: Any, own: Any, path: str) -> None:
    """Compare values with those of this run, in dicts, lists and tuples; its ``None`` fits to all.

    Raises:
        TypeError: A value has another type; the message contains its path.
    """
    if own is None:
        return
    expected, found = _kind(own), _kind(saved)
    if found != expected:
        raise TypeError(f"{path} is {found}, not {expected}")
    if isinstance(own, tuple) and len(saved) != len(own):
        raise TypeError(f"{path} has {len(saved)} items, not {len(own)}")
    if isinstance(own, Mapping):
        for key in own.keys() & saved.keys():
            check(saved[key], own[key], f"{path}/{key}")
    elif isinstance(own, list | tuple):
        for index, (one, other) in enumerate(zip(saved, own, strict=False)):
            check(one, other, f"{path}/{index}")


def check_optimizer(saved: Mapping[str, Any], optimizer: Any, path: str) -> None:
    """Compare options with those of this run, and the state of each parameter with others'; raises
    as :func:`check`."""
    options: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options |= _plain(group)
    options["params"] = []
    for index, group in enumerate(saved["param_groups"]):
        check(_plain(group), options, f"{path}/param_groups/{index}")
    first: dict[str, Any] = {}
    for values in saved["state"].values():
        first = {**{key: each for key, each in values.items() if each is not None}, **first}
    for name, values in saved["state"].items():
        check(values, first, f"{path}/state/{name}")


def numbers(saved: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a dict of numbers by name; raises as :func:`check`."""
    check(saved, dict.fromkeys(saved, 0.0), path)
    return dict(saved)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that a checkpoint sets; a learning rate may also be a tensor."""
    own = implementation(group)
    kept = [key for key in group if key not in own]
    return {key: group[key] for key in kept if not isinstance(group[key], _TENSORS)}


def _kind(value: Any) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "nothing")
