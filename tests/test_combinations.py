"""Renders in which every value of an option meets every value of every other option."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from linters import lint_all
from rendering import DEFAULTS, braces_left, check_works, expected_files, render

from local_extensions import RULES, contradiction

# All choices there are, and for the rest what takes another way through some file.
VALUES: dict[str, tuple[str, ...]] = {
    name: rule.choices for name, rule in RULES.items() if rule.choices
} | {
    "project_slug": ("my-project", "size_5"),
    "package_name": ("my_project", "false"),
    "description": ("What it is.", ""),
    "author_name": ("Your Name", 'O\'Brien "x" \\'),
    "author_email": ("", "o'brien@example.ie"),
    "slurm_partition": ("", "long,a100.short"),
    "slurm_account": ("", "my-lab_1"),
    "gpus_per_node": ("1", "0", "64"),
}

Pair = frozenset[tuple[str, str]]


def pairs(answers: dict[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(answers.items(), 2)}


def go_together(answers: dict[str, str]) -> bool:
    return not any(contradiction(name, answers) for name in answers)


def all_pairs() -> set[Pair]:
    return {
        frozenset([(one, x), (other, y)])
        for one, other in itertools.combinations(VALUES, 2)
        for x in VALUES[one]
        for y in VALUES[other]
        if go_together({one: x, other: y})
    }


def combinations() -> list[dict[str, str]]:
    """Return few sets of answers that hold all pairs, the same ones each time."""
    missing, chosen = all_pairs(), []
    order = sorted(VALUES, key=lambda name: -len(VALUES[name]))
    while missing:
        # Begun with a pair that is missing; each further option takes what adds the most.
        answers = dict(sorted(min(missing, key=sorted)))
        for name in order:
            if name not in answers:
                allowed = [value for value in VALUES[name] if go_together(answers | {name: value})]
                answers[name] = max(
                    allowed, key=lambda value: len(pairs(answers | {name: value}) & missing)
                )
        missing -= pairs(answers)
        chosen.append(answers)
    return chosen


COMBINATIONS = combinations()


def test_every_pair_is_there_and_they_are_few() -> None:
    assert set().union(*map(pairs, COMBINATIONS)) == all_pairs()
    assert len(COMBINATIONS) < 30
    open_answers = {"project_name", "version"}  # neither changes what is rendered around it
    assert set(VALUES) == set(RULES) - open_answers


@pytest.mark.parametrize("answers", COMBINATIONS, ids=range(1, len(COMBINATIONS) + 1))
def test_it_renders_a_project_that_is_clean(tmp_path: Path, answers: dict[str, str]) -> None:
    project = render(tmp_path, answers, hooks=True)
    check_works(project, DEFAULTS | answers)
    assert braces_left(project, expected_files(DEFAULTS | answers)) == []
    assert lint_all(project) == ""
