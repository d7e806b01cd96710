"""`slurm/cluster.sh`: it comes up, goes away whole, and nodes die and return."""

from __future__ import annotations

from pathlib import Path

import pytest
from rendering import ran

from .jobs import SCRIPT, Cluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]


def traces(folder: Path) -> list[str]:
    """Return what is there of a cluster of that folder, outside it too."""
    lines = [str(path) for path in folder.parent.glob(folder.name)]
    lines += [str(link) for link in Path("/run").glob("slurm-*") if link.resolve() == folder]
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = status.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = status.with_name("environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words or (names(folder)[0] in environment and "slurm" in words):
            lines.append(words)
    listed = ran(["ip", "netns", "list"]).stdout
    cards = ran(["ip", "link"]).stdout
    return lines + [text for text in names(folder) if text in listed + cards]


def names(folder: Path) -> list[str]:
    """Return the names that a cluster takes outside its folder."""
    digest = ran(["sha256sum"], input=str(folder), check=True).stdout[:6]
    return [f"slurm-{digest}", f"sl{digest}-"]


def test_it_comes_and_goes_whole(can_start: None, tmp_path: Path) -> None:
    # Longer than the name of a socket may be, with what a shell could misread.
    folder = tmp_path / ("long " * 12 + "$(touch canary)") / "it's"
    cluster = Cluster(folder)
    assert traces(folder) == []
    done = cluster.control("up", "2", "1")
    assert done.returncode == 0, done.stderr
    assert len(traces(folder)) > 2

    # A second one is refused, and the first goes on.
    done = cluster.control("up", "1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "it is up already" in done.stderr
    where = "srun --nodes=2 --gpus-per-node=1 --label printenv CUDA_VISIBLE_DEVICES SLURMD_NODENAME"
    assert sorted(cluster.slurm(*where.split()).splitlines()) == [
        "0: 0",
        "0: node1",
        "1: 0",
        "1: node2",
    ]

    # What a job has left running goes too.
    cluster.slurm("sbatch", "--output=/dev/null", "--wrap=trap '' TERM; setsid sleep 1000 & wait")
    until(lambda: "R" in cluster.slurm("squeue", "--noheader", "--format=%t"), "start")
    done = cluster.control("down")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    until(lambda: traces(folder) == [], "gone")  # the kernel removes a namespace's cards later
    assert not list(tmp_path.rglob("canary"))
    assert cluster.control("down").returncode == 0


def test_a_node_dies_and_returns(cluster: Cluster) -> None:
    def state() -> str:
        return cluster.slurm("sinfo", "--noheader", "--nodes=node3", "--format=%T").split()[0]

    until(lambda: state() == "idle", "idle")
    assert cluster.control("start", "node3").stderr == "cluster.sh: node3 is up\n"
    assert cluster.control("kill", "node3").returncode == 0
    until(lambda: state() == "down*", "down")
    assert cluster.control("start", "node3").returncode == 0
    until(lambda: state() == "idle", "idle again")
    assert "there is no node node9" in cluster.control("kill", "node9").stderr


@pytest.mark.parametrize("arguments", [("up",), ("up", "0"), ("up", "a[$(touch canary)]"), ("x",)])
def test_a_wrong_call_is_one_line(
    can_start: None, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = Cluster(tmp_path / "none").control(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "usage: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_others_is_left_alone(can_start: None, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    done = Cluster(tmp_path).control("up", "1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is not empty and no cluster's" in done.stderr
    assert Cluster(tmp_path).control("down").returncode == 0
    assert (tmp_path / "precious").read_text() == "x"


def test_others_than_root_are_told(can_start: None) -> None:
    # As a text, since others may not read what lies here.
    as_nobody = ("setpriv", "--reuid=65534", "--clear-groups", "bash", "-c", SCRIPT.read_text())
    done = ran([*as_nobody, "cluster.sh", "up", "1"], cwd="/")
    assert done.returncode == 1
    assert done.stderr == "cluster.sh: network namespaces need root; run it as root\n"
