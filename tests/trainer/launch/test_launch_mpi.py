"""Real launches by mpirun, and by hydra, the mpiexec of MPICH."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.project import fit, free_port, mpirun, succeed

from fitting import logged
from processes import at_root

pytestmark = pytest.mark.slow


def arguments(folder: Path, name: str, *more: str) -> list[str | Path]:
    """A short fit with ddp, as a named run in a folder."""
    short = ["--trainer.max_epochs", "1", "--trainer.loggers", "[csv]", "--model.dropout", "0"]
    into = ["--trainer.default_root_dir", folder, "--trainer.run_name", name]
    log = ["--trainer.log_every_n_steps", "1"]
    return fit("--trainer.strategy", "ddp", *short, *log, *into, *more)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("openmpi", marks=pytest.mark.needs("mpirun")),
        pytest.param("hydra", marks=pytest.mark.needs("mpiexec.hydra")),
    ],
)
def test_ddp_trains_as_it_does_by_our_own_launcher(tmp_path, source):
    main = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", str(free_port())]
    by = mpirun(2) if source == "openmpi" else ["mpiexec.hydra", "-n", "2", *main]
    done = succeed(arguments(tmp_path, source), cwd=tmp_path, extra=at_root(), by=by)
    (attempt,) = json.loads((tmp_path / source / "run.json").read_text())["attempts"]
    layout = attempt["layout"]
    assert (layout["source"], layout["world_size"], layout["num_nodes"]) == (source, 2, 1)
    assert [path.name for path in (tmp_path / source / "logs").iterdir()] == ["rank-1.log"]
    assert "effective batch size 64 (32 per device, 2 replicas" in done.stdout
    succeed(arguments(tmp_path, "ours", "--trainer.devices", "2"))
    assert len(logged(tmp_path / source)) == 22
    assert logged(tmp_path / source) == logged(tmp_path / "ours")


@pytest.mark.needs("mpirun")
def test_two_launches_in_one_folder_do_not_meet(tmp_path):
    def launch(name: str) -> None:
        succeed(arguments(tmp_path, name), cwd=tmp_path, extra=at_root(), by=mpirun(2))

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(launch, ("one", "other")))
    assert logged(tmp_path / "one") == logged(tmp_path / "other")
    assert not list(tmp_path.glob(".rendezvous*"))
