"""Starts and stops 8 to 64 ranks on this machine, and writes docs/scale.md: what grows with ranks.

PYTHONPATH=PROJECT/src:PROJECT python benchmarks/scale.py           all of it: half an hour
PYTHONPATH=PROJECT/src:PROJECT python benchmarks/scale.py --quick   2 and 4 ranks; writes nothing

It runs in the environment of a rendered project, whose fork servers start the ranks: `make
bench-scale`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests import fork_server
from tests.project import free_port, start

import report
import scale_report
from child import HERE, require_memory
from scale_costs import order_of, server_us, smallest_step_us
from scale_rank import Job, entries
from scale_report import Found

TIMEOUT = 1800  # seconds; 64 ranks on two cores take minutes
BYTES_OF_A_RANK, BYTES_SPARED = 110 << 20, 1 << 30
LAUNCHES = ("own launcher", "torchrun", "own launcher, 2 nodes")
STRATEGIES = ("ddp", "fsdp")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="two or more")
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=LAUNCHES)
    parser.add_argument("--seconds", type=float, default=10.0, help="of training")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.seconds = [2, 4], 1.0
    if len(options.ranks) < 2:
        parser.error("--ranks: growth is that between two numbers of ranks; give two or more")
    page = report.Page(options, "scale")
    require_memory(BYTES_SPARED + max(options.ranks) * BYTES_OF_A_RANK, "--ranks")
    costs = server_us(300 if options.quick else 3_000)
    held = 10**5 if options.quick else 10**7
    sizes = [(held, True), (held, False), (10**9, False)]
    orders = [order_of(samples, is_held) for samples, is_held in sizes]
    step_us = smallest_step_us()
    found: list[Found] = []
    with fork_server.serving():
        for seed in range(fork_server.SEEDS):  # now they import, not in the first start
            start(["-c", ""], extra={"RANK": str(seed)}).communicate(timeout=TIMEOUT)
        for launch in options.launches:
            for strategy in STRATEGIES:
                for ranks in options.ranks:
                    nodes = 2 if "nodes" in launch else 1
                    job = Job(strategy, ranks // nodes, nodes, options.seconds)
                    found.append(measure(job, launch))
                    print(json.dumps(asdict(found[-1])), file=sys.stderr, flush=True)
    groups = scale_report.by_name(found)
    parts = {
        "machine": report.machine("torch", more="Over gloo."),
        "starts": scale_report.starts(groups),
        "operations": scale_report.operations(groups),
        "growth": scale_report.growths(groups),
        "server": scale_report.server(costs),
        "extrapolated": scale_report.extrapolation(groups, costs),
        "order": scale_report.order(orders, step_us),
    }
    page.publish(parts, scale_report.plot(groups))


def measure(job: Job, launch: str) -> Found:
    """Start the ranks, let them train for some seconds, and stop them by a SIGTERM."""
    wanted = job.ranks * job.nodes
    with tempfile.TemporaryDirectory(prefix="bench-") as place, ThreadPoolExecutor(2) as executor:
        folder = Path(place)
        began = time.monotonic()
        launchers = _start(job, launch, folder)
        outputs = [executor.submit(each.communicate) for each in launchers]
        try:
            _await_ranks(wanted, folder, launchers)
            of_launcher = f"/proc/{launchers[0].pid}"
            launcher = {
                "threads": entries(f"{of_launcher}/task"),
                "descriptors": entries(f"{of_launcher}/fd"),
            }
            told = time.monotonic()
            for each in launchers:
                each.terminate()
            for each in launchers:
                each.wait(TIMEOUT)
            stopped = time.monotonic() - told
        finally:
            for each in launchers:
                each.kill()
            errors = [output.result(TIMEOUT)[1] for output in outputs]
        ranks = [json.loads((folder / f"rank-{n}.json").read_text()) for n in range(wanted)]
        checkpoints = [*folder.glob("runs/run/checkpoints/step-*")]
    if not checkpoints or any("end" not in rank for rank in ranks):
        raise SystemExit(f"{job}: was stopped, but did not save; last words:\n{errors}")
    return Found(
        f"{job.strategy}, {launch}",
        wanted,
        first_step_s=max(each["first"]["at"] for each in ranks) - began,
        stop_s=stopped,
        launcher=launcher,
        each=_each(ranks),
        kinds=ranks[0]["first"]["operations"],
    )


def _start(job: Job, launch: str, folder: Path) -> list[subprocess.Popen[str]]:
    script: list[str | Path] = [HERE / "scale_rank.py", json.dumps(asdict(job)), folder]
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    variables = {
        "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths),
        "TRAINER_SAVE_SECONDS": str(TIMEOUT),
    }
    if launch == "torchrun":
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}"]
        torchrun += ["--standalone", f"--shutdown-timeout={TIMEOUT}"]
        return [start([*torchrun, *script], cwd=folder, extra=variables)]
    if job.nodes == 1:
        return [start(script, cwd=folder, extra=variables)]
    shared = {"NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    each_node = [{**variables, **shared, "NODE_RANK": str(node)} for node in range(job.nodes)]
    return [start(script, cwd=folder, extra=extra) for extra in each_node]


def _await_ranks(ranks: int, folder: Path, launchers: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while sum(1 for _ in folder.glob("rank-*.json")) < ranks:
        if time.monotonic() > deadline or any(each.poll() is not None for each in launchers):
            words = [each.communicate()[1] for each in launchers if each.poll() is not None]
            raise SystemExit(f"{ranks} ranks failed, or hang, before they trained:\n{words}")
        time.sleep(0.1)


def _each(ranks: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What each rank has used, by quantity."""
    found: dict[str, list[float]] = {
        name: [rank["steady"][name] for rank in ranks]
        for name in ("threads", "descriptors", "resident_mib", "own_mib")
    }

    def between(start: str, end: str, name: str) -> list[float]:
        return [rank[end][name] - rank[start][name] for rank in ranks]

    def operations(name: str) -> list[int]:
        return [sum(rank[name]["operations"].values()) for rank in ranks]

    first, warm, steady, end = map(operations, ("first", "warm", "steady", "end"))
    seconds = between("warm", "steady", "at")
    return found | {
        "cpu_s": [rank["first"]["cpu_s"] for rank in ranks],
        "cpu_stop_s": between("steady", "end", "cpu_s"),
        "operations": [*first],
        "rate": [(b - a) / s for a, b, s in zip(warm, steady, seconds, strict=True)],
        "stopping": [b - a for a, b in zip(steady, end, strict=True)],
        "steps_per_s": [
            n / s for n, s in zip(between("warm", "steady", "step"), seconds, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
