"""A loader's worker does not destroy what earlier runs have left in its parent."""

import sys

import pytest
from tests.project import run

from torch_versions import quiet_gloo


@quiet_gloo
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_workers_of_a_second_fit_leave_the_first_one_s_process_group_alone(tmp_path):
    # Destroyed in a worker it would wait, without an end, for a thread of its parent.
    done = run(["-m", "twice_subject", tmp_path], timeout=120)
    assert done.returncode == 0, done.stderr
    left = [line for line in done.stdout.splitlines() if line.endswith("left")]
    assert len(left) == 2
    assert left[0] != "first: 0 left"  # there was something to destroy
