"""What a folder or file of ``strategies/`` declares about itself; no other file names it."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..launch.cluster import Source
from ..launch.devices import Hardware
from .base import Launcher, Strategy
from .limits import Limits


@dataclass(frozen=True)
class Entry:
    """A strategy's name in the registry: a class, or a class with a preset.

    Args:
        strategy: The class; or ``"module:Class"`` in the declaring folder, which is imported when
            the name is first used, so that a heavy engine costs nothing until then.
        summary: One line for the help; empty: the first paragraph of the class's docstring.
        preset: Options that the name sets.
        base: The name under which users can set these options.
        lacks: Options that it does not have (of other strategies, older names), each with an
            alternative.
        launcher: How processes are started; ``None``: the launcher of the class.
        max_nodes: Largest number of nodes; ``None``: the limit of the class.
    """

    strategy: str | type[Strategy]
    summary: str = ""
    preset: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    launcher: Launcher | None = None
    max_nodes: int | None = None

    @property
    def cls(self) -> type[Strategy]:
        """The class; imports it."""
        if not isinstance(self.strategy, str):
            return self.strategy
        module, _, name = self.strategy.partition(":")
        found: type[Strategy] = getattr(importlib.import_module(module), name)
        return found

    @property
    def limits(self) -> Limits:
        """The limits of the strategy under this name."""
        return self._limited(self.cls.limits)

    def make(self, options: Mapping[str, Any]) -> Strategy:
        """Create the strategy with the preset and the user's options."""
        make: Callable[..., Strategy] = self.cls
        made = make(**self.preset, **options)
        if self.launcher is not None:
            made.launcher = self.launcher
        made.limits = self._limited(made.limits)
        return made

    def _limited(self, limits: Limits) -> Limits:
        return limits if self.max_nodes is None else replace(limits, max_nodes=self.max_nodes)

    def below(self, package: str) -> "Entry":
        """The same entry with the full path of its class."""
        if not isinstance(self.strategy, str):
            return self
        return replace(self, strategy=f"{package}.{self.strategy}")


@dataclass(frozen=True)
class Registration:
    """What a folder or file of ``strategies/`` adds to the trainer, in its ``REGISTRATION``.

    Args:
        strategies: Its strategies by name, in the order of the help.
        refused: Names of strategies that it had once, each with an alternative.
        accelerators: Accelerators of an engine by name.
        cluster_sources: Launchers of an engine, from which a process reads its rank.
        variables: Environment variables that an engine reads.
        lost_peer_errors: Names of an engine's exceptions that only report the loss of a peer.
    """

    strategies: Mapping[str, Entry]
    refused: Mapping[str, str] = field(default_factory=dict)
    accelerators: Mapping[str, Hardware] = field(default_factory=dict)
    cluster_sources: Sequence[Source] = ()
    variables: Sequence[str] = ()
    lost_peer_errors: Sequence[str] = ()
