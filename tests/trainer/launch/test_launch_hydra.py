"""Real launches by hydra, the mpiexec of MPICH."""

import json
from pathlib import Path

import pytest
from test_launch import losses
from test_launch_mpi import arguments
from tests.project import free_port, succeed

from processes import at_root


@pytest.mark.needs("mpiexec.hydra")
@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path) -> None:
    main = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", str(free_port())]
    hydra = ["mpiexec.hydra", "-n", "2", *main]
    done = succeed(arguments(tmp_path, "run"), cwd=tmp_path, extra=at_root(), by=hydra)
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    layout = attempt["layout"]
    assert (layout["source"], layout["world_size"], layout["num_nodes"]) == ("hydra", 2, 1)
    assert [path.name for path in (tmp_path / "run" / "logs").iterdir()] == ["rank-1.log"]
    assert "effective batch size 64 (32 per device, 2 replicas" in done.stdout
    assert len(losses(tmp_path / "run")) == 22
