"""Asynchronous saves write in the background; their files are the same."""

import pytest
from tests.project import succeed

from background_subject import CASES, STEPS

AUTOMATIC, SHARDED = ([n for n in CASES if n != name] for name in ("manual", "clamped"))
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "ranks", "cases"),
    [
        pytest.param("single_device", 1, CASES, id="single_device"),
        pytest.param("ddp", 2, CASES, id="ddp", marks=slow),
        pytest.param("fsdp", 2, SHARDED, id="fsdp", marks=slow),
        pytest.param("ddp_zero1", 2, AUTOMATIC, id="ddp_zero1", marks=slow),
    ],
)
def test_files_equal_those_of_synchronous_saves(tmp_path, strategy, ranks, cases):
    succeed(["-m", "background_subject", tmp_path, str(ranks), strategy, *cases])
    for case in cases:
        paths = sorted(tmp_path.glob(f"{case}-sync/checkpoints/step-*/rank-*"))
        assert len(paths) == STEPS * ranks
        for path in paths:
            step, file = path.parts[-2:]
            other = tmp_path / f"{case}-async" / "checkpoints" / step / file
            assert path.read_bytes() == other.read_bytes(), (case, step, file)
