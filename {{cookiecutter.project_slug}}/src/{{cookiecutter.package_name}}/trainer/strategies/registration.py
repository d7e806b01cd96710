"""What a folder or file of ``strategies/`` declares about itself, so that nobody else names it."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arguments.legacy import Mode
from ..launch.cluster import Source
from .base import Launcher, Strategy
from .limits import Limits


@dataclass(frozen=True)
class Entry:
    """What a name of the registry stands for: a class, or a class with a preset.

    Args:
        strategy: the class; or ``"module:Class"`` in the declaring folder, which is imported when
            the name is used: a heavy engine costs nothing until then.
        summary: a line for the help; empty: the first paragraph of the class's docstring.
        preset: options that the name sets.
        base: the name under which these options can be chosen.
        launcher: how processes are started; ``None``: as the class says.
        max_nodes: that it runs on; ``None``: as the class says.
    """

    strategy: str | type[Strategy]
    summary: str = ""
    preset: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    launcher: Launcher | None = None
    max_nodes: int | None = None

    @property
    def cls(self) -> type[Strategy]:
        """The class, imported."""
        if not isinstance(self.strategy, str):
            return self.strategy
        module, _, name = self.strategy.partition(":")
        found: type[Strategy] = getattr(importlib.import_module(module), name)
        return found

    @property
    def limits(self) -> Limits:
        """What it cannot do under this name."""
        return self._limited(self.cls.limits)

    def make(self, options: Mapping[str, Any]) -> Strategy:
        """A strategy with the user's options beside the preset ones."""
        made = self.cls(**self.preset, **options)
        if self.preset:
            made.preset = self.preset
        if self.launcher is not None:
            made.launcher = self.launcher
        made.limits = self._limited(made.limits)
        return made

    def _limited(self, limits: Limits) -> Limits:
        return limits if self.max_nodes is None else replace(limits, max_nodes=self.max_nodes)

    def below(self, package: str) -> "Entry":
        """The same with the class's full path."""
        is_path = isinstance(self.strategy, str)
        return replace(self, strategy=f"{package}.{self.strategy}") if is_path else self


@dataclass(frozen=True)
class Registration:
    """What a folder or file of ``strategies/`` adds to the trainer: its ``REGISTRATION``.

    Args:
        strategies: what its names stand for, in the order of the help.
        cluster_sources: an engine's own launchers, each of which says who a process is.
        variables: of the environment, that an engine reads.
        elsewhere: names that other trainers give such strategies: what to use instead.
        older_modes: strategies that ``accelerator`` and ``distributed_backend`` once named.
        spawned_plugins: what ``plugins`` once made of ``ddp_spawn``: strategies by plugin.
    """

    strategies: Mapping[str, Entry]
    cluster_sources: Sequence[Source] = ()
    variables: Sequence[str] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    older_modes: Mapping[str, Mode] = field(default_factory=dict)
    spawned_plugins: Mapping[str, str] = field(default_factory=dict)
