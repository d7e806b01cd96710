"""A covering array: few rows in which each value of a factor meets each value of every other one.

The greedy algorithm of AETG (Cohen and others 1997, https://doi.org/10.1109/32.605761). Nothing is
said about values that exclude each other: a row that is refused is asked about again with one value
changed at a time, and those that are to blame never come together again.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Atom = tuple[str, int]
"""A factor, and the index of one of its values."""
Row = dict[str, int]
Refusals = Callable[[Row], tuple[int, Sequence[str]]]
"""Asks why a row is refused: by which check, of several that follow each other, and its lines."""


TRIED = 4
"""First values of a factor that are asked about when a row was refused."""


@dataclass
class Array:
    """Rows that hold all pairs of the factors' values but those that ``refusals`` refuses."""

    sizes: Mapping[str, int]
    refusals: Refusals
    rows: list[Row] = field(default_factory=list)
    refused: dict[frozenset[Atom], str] = field(default_factory=dict)
    """Values that cannot be together, which may be more than two or a single one, with a reason."""

    def complete(self, missing: set[frozenset[Atom]]) -> set[frozenset[Atom]]:
        """Add rows until each of these pairs is in one; give those that are in none."""
        missing, left = set(missing), set()
        while missing:
            seed = min(missing, key=sorted)
            row = self._fill(seed, missing)
            if row is None:
                missing.remove(seed)
                left.add(seed)
            elif lines := self.refusals(row)[1]:
                for line in lines:
                    self.refused.setdefault(self._blamed(row, line), line)
            else:
                self.rows.append(row)
                missing -= pairs(row)
        return left

    def _fill(self, seed: frozenset[Atom], missing: set[frozenset[Atom]]) -> Row | None:
        """A row with a pair and many other missing ones; ``None``: the pair is refused."""
        while not self._conflicts(seed):
            row = dict(seed)
            for name in sorted(self.sizes.keys() - row.keys(), key=lambda each: -self.sizes[each]):
                taken = frozenset(row.items())
                values = range(self.sizes[name])
                conflicts_of = {value: self._conflicts(taken | {(name, value)}) for value in values}
                allowed = [value for value, conflicts in conflicts_of.items() if not conflicts]
                if not allowed:  # what has excluded all values of this factor excludes itself
                    parts = [conflicts[0] for conflicts in conflicts_of.values()]
                    learned = frozenset().union(*parts) - {(name, value) for value in conflicts_of}
                    self.refused[learned] = self.refused[parts[-1]]
                    break
                row[name] = max(
                    allowed,
                    key=lambda value: sum(
                        frozenset((atom, (name, value))) in missing for atom in taken
                    ),
                )
            else:
                return row
        return None

    def _conflicts(self, atoms: frozenset[Atom]) -> list[frozenset[Atom]]:
        return [refused for refused in self.refused if refused <= atoms]

    def _blamed(self, row: Row, line: str) -> frozenset[Atom]:
        """The values of a row without any of which a line is not there."""
        simple = dict(row)
        for name in row:  # other lines, which might hide it, are left out first
            simpler = {**simple, name: 0}
            simple = simpler if line in self.refusals(simpler)[1] else simple
        check, _ = self.refusals(simple)
        return frozenset(
            (name, value)
            for name, value in row.items()
            if any(
                line not in lines
                for other in range(min(self.sizes[name], TRIED))
                if other != simple[name]
                for at, lines in [self.refusals({**simple, name: other})]
                if at >= check  # an earlier check hides it
            )
        )


def pairs(row: Mapping[str, int]) -> set[frozenset[Atom]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def all_pairs(sizes: Mapping[str, int]) -> set[frozenset[Atom]]:
    return {
        frozenset([(one, first), (other, second)])
        for one, other in itertools.combinations(sizes, 2)
        for first in range(sizes[one])
        for second in range(sizes[other])
    }
