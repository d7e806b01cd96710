"""Traces of a fit: their files, their steps and their ranks."""

import json
import pickle
import re
from pathlib import Path

import my_project_trainer as trainer
import pytest
from my_project_trainer.callbacks import Profile

import callback_subject as subject
from fitting import quiet

pytestmark = pytest.mark.usefixtures("apart")


def fit(profile: Profile, steps: int) -> None:
    where = {"run_name": "run", "overwrite": True}
    made = quiet(max_steps=steps, callbacks=[profile], **where)
    with made.building():
        made.fit(subject.Net())


def steps_in(trace: Path) -> set[str]:
    """The profiler's steps that a trace has, counted from 0."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert "aten::linear" in names
    return {name for name in names if name.startswith("ProfilerStep#")}


def test_the_steps_of_the_schedule_are_recorded_and_no_others() -> None:
    fit(Profile(wait=1, warmup=1, active=2, repeat=2), steps=12)
    first, second = sorted(Path("runs/run/profile").iterdir())
    assert all(
        re.fullmatch(r"rank-00000\.\d+\.pt\.trace\.json", path.name) for path in (first, second)
    )
    assert steps_in(first) == {"ProfilerStep#2", "ProfilerStep#3"}
    assert steps_in(second) == {"ProfilerStep#6", "ProfilerStep#7"}


def test_a_fit_that_ends_early_keeps_what_it_has() -> None:
    fit(Profile(wait=0, warmup=1, active=5), steps=3)
    (trace,) = Path("runs/run/profile").iterdir()
    assert {"ProfilerStep#1", "ProfilerStep#2"} <= steps_in(trace)


def test_mistakes_are_refused() -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        Profile(wait=-1, active=0, ranks=[])
    assert caught.value.problems == [
        "Profile: give at least wait=0, warmup=0, active=1 and repeat=1",
        "Profile: ranks=(): give ranks, or None for all",
    ]
    with pytest.raises(trainer.ConfigurationError, match=r"ranks=\[0, 3\]: there are 1, counted"):
        fit(Profile(ranks=[0, 3]), steps=1)


def test_it_can_be_pickled_for_spawned_ranks() -> None:
    assert pickle.loads(pickle.dumps(Profile(wait=2)))._schedule()(2).name == "WARMUP"  # noqa: S301
