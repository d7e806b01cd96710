"""Parameters that a step uses on some ranks only: what a run says where it cannot train them.

That they are trained right with ``find_unused_parameters`` is shown by the conformance matrix.
"""

import json
import subprocess
import time

import pytest
import torch.distributed as dist
from my_project_trainer.errors import UserError
from my_project_trainer.launch import collectives
from my_project_trainer.strategies.gradients.same_use import SameUse
from test_fairscale import difference
from tests.project import missing, require, run

OPTION = "set --trainer.strategy_options.find_unused_parameters true"
ELSEWHERE = "use strategy='fsdp' or 'ddp', with --trainer.strategy_options.find_unused_parameters"
TIMEOUT = {"timeout_seconds": 600}
FSDP_UNITS = {"unit_parameters": 1}
STAGES = [f"deepspeed_stage_{stage}" for stage in (1, 2, 3)]
ENGINES = {"ddp_sharded": "fairscale"}
slow = pytest.mark.slow


def fit(folder, subject, strategy, options, devices=2) -> "subprocess.CompletedProcess[str]":
    """Six steps of a subject of odd_subject."""
    engine = "deepspeed" if strategy in STAGES else ENGINES.get(strategy, "torch")
    require(missing(engine))
    folder.mkdir()
    arguments = {"max_steps": 6, "global_batch_size": 4, "devices": devices, "strategy": strategy}
    if strategy != "single_device":
        arguments["strategy_options"] = {**TIMEOUT, **options}
    return run(["-m", "odd_subject", folder, subject, json.dumps(arguments)], engine=engine)


def refusal(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line of a run that has ended with a mistake of the user's."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


exhaustive = [slow, pytest.mark.exhaustive]
SHARDED = [
    ("fsdp", {}, OPTION),
    pytest.param("fsdp", FSDP_UNITS, OPTION, marks=exhaustive),
    pytest.param("ddp_sharded", {}, OPTION, marks=slow),
    *(pytest.param(stage, {}, ELSEWHERE, marks=exhaustive) for stage in STAGES[:2]),
    pytest.param(STAGES[2], {}, ELSEWHERE, marks=slow),
]


@pytest.mark.parametrize(("strategy", "options", "advice"), SHARDED)
@pytest.mark.parametrize("subject", ["Routed", pytest.param("RoutedLater", marks=exhaustive)])
def test_one_line_names_what_ranks_use_differently(tmp_path, subject, strategy, options, advice):
    begun = time.monotonic()
    line = refusal(fit(tmp_path / "run", subject, strategy, options))
    # Long before a collective would have given up.
    assert time.monotonic() - begun < TIMEOUT["timeout_seconds"] / 2
    assert "ranks use different parameters in a step" in line
    assert advice in line
    expected = ["experts.1"] if subject == "RoutedLater" else ["experts.0", "experts.1"]
    assert all(name in line for name in expected), line


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp", FSDP_UNITS),
        pytest.param("ddp_sharded", {}, marks=exhaustive),
        pytest.param("deepspeed_stage_2", {}, marks=slow),
        pytest.param("deepspeed_stage_3", {}, marks=exhaustive),
    ],
)
def test_what_all_ranks_leave_out_is_no_difference(tmp_path, strategy, options):
    done = fit(tmp_path / "run", "RoutedTogether", strategy, options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_units_that_are_called_several_times_are_compared_in_the_first_steps_only(tmp_path):
    done = fit(tmp_path / "run", "Recalled", "fsdp", FSDP_UNITS)
    assert done.returncode == 0, done.stderr
    paths = (tmp_path / "run" / f"notes-{rank}.json" for rank in range(2))
    notes = [json.loads(path.read_text())["notes"] for path in paths]
    operations = [[step["operations"] for step in steps] for steps in notes]
    for counts in operations:
        assert counts[0] > 0
        assert counts[2:] == counts[2:3] * 4, operations
    keys = [steps[-1]["keys"] for steps in notes]
    known, deleted = ({key for rank in keys for key in rank[which]} for which in ("set", "deleted"))
    assert len(known) > 9
    assert len(known - deleted) == 3, sorted(known - deleted)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The store of two ranks, of which this process is the first."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    return store


def step(compared: SameUse, *names: str) -> int:
    """Do what these names say in a step; how often its peers were asked."""
    before = compared._asked
    compared.begin("training")
    for name in names:
        compared.note(f"uses {name}")
    return compared._asked - before


def test_peers_are_asked_where_a_step_leaves_those_before(store, monkeypatch):
    compared = SameUse(list, "", 60)
    monkeypatch.setattr(dist.PrefixStore, "add", lambda *_: 2)  # the other rank does the same
    steps = ["aab", "aab", "aac", "aac", "aab", "ab", "aab"]
    assert [step(compared, *names) for names in steps] == [3, 0, 1, 0, 1, 1, 1]
    compared.begin("validation")
    compared.note("uses a")
    assert compared._asked == 8


def test_a_rank_that_alone_does_something_new_says_so_before_the_timeout(store):
    # Where nothing is expected, all ranks ask, and one that does not come is lost.
    with pytest.raises(dist.DistStoreError, match="timeout after"):
        step(SameUse(list, "", 0.4), "a")
    compared = SameUse(list, "advice", 0.4)
    assert step(compared, "a") == 1  # as the one before
    with pytest.raises(UserError, match="rank 0 uses b, another rank uses a; advice"):
        step(compared, "b")


@slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "ddp_sharded", "deepspeed_stage_2"])
def test_parameters_of_no_module_are_compared_too(tmp_path, strategy):
    line = refusal(fit(tmp_path / "run", "RoutedRaw", strategy, {}))
    assert "rank 0 does not use weights.1, rank 1 does not use weights.0" in line or (
        "rank 1 does not use weights.0, rank 0 does not use weights.1" in line
    )


@pytest.mark.parametrize(
    "subject",
    # The last: torch's DDP would say so in the next step, and there is none.
    ["Routed", *(pytest.param(name, marks=slow) for name in ("RoutedLater", "RoutedLast"))],
)
def test_ddp_names_them_and_our_option(tmp_path, subject):
    line = refusal(fit(tmp_path / "run", subject, "ddp", {}))
    assert "does not use experts." in line
    assert f"may leave parameters out, or freezes them later, {OPTION}" in line
    assert "torch" not in line


@slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("ddp_zero1", {}, marks=exhaustive),
        ("ddp_sharded", {}),
        ("fsdp", {"offload": True}),
    ],
)
def test_with_the_option_an_odd_model_is_that_of_one_process(tmp_path, strategy, options):
    unused = {"find_unused_parameters": True, **options}
    assert fit(tmp_path / "alone", "Odd", "single_device", {}, devices=1).returncode == 0
    done = fit(tmp_path / "run", "Odd", strategy, unused)
    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-5
