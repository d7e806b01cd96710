"""Starts and stops 8 to 64 ranks on this machine, and writes docs/scale.md: what grows with ranks.

PYTHONPATH=PROJECT/src:PROJECT python benchmarks/scale.py           all of it: half an hour
PYTHONPATH=PROJECT/src:PROJECT python benchmarks/scale.py --quick   2 and 4 ranks; writes nothing

It runs in the environment of a rendered project, whose fork servers start the ranks: `make
bench-scale`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from tests import fork_server
from tests.project import free_port, start

import scale_order
import scale_report
from folders import writable
from scale_one import Job, entries
from scale_report import Found, Process, Start
from scale_store import server_microseconds

HERE = Path(__file__).parent
TIMEOUT = 1800  # seconds; 64 ranks on two cores take minutes
MIB_OF_A_RANK, MIB_SPARED = 110, 1024
LAUNCHES = {
    "own launcher": ("ddp", "fsdp"),
    "torchrun": ("ddp", "fsdp"),
    "own launcher, 2 nodes": ("ddp", "fsdp"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 and 4 ranks, one second each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=[*LAUNCHES])
    parser.add_argument("--seconds", type=float, default=10.0, help="of training")
    parser.add_argument("--out", type=writable, default=HERE.parent / "docs", help="of the report")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.seconds = [2, 4], 1.0
    costs = server_microseconds(300 if options.quick else 3_000)
    held = 10**5 if options.quick else 10**7
    sizes = [(held, True), (held, False), (10**9, False)]
    orders = [scale_order.measure(samples, is_held) for samples, is_held in sizes]
    step_us = scale_order.smallest_step_us()
    found: list[Found] = []
    with fork_server.serving():
        for seed in range(fork_server.SEEDS):  # now they import, not in the first start
            start(["-c", ""], extra={"RANK": str(seed)}).communicate(timeout=TIMEOUT)
        for launch in options.launches:
            for strategy in LAUNCHES[launch]:
                for ranks in options.ranks:
                    found.append(measure(Start(launch, strategy, ranks), options.seconds))
                    print(json.dumps(dataclasses.asdict(found[-1])), file=sys.stderr, flush=True)
    report = scale_report.markdown(found, costs, orders, step_us)
    print(report)
    print(*scale_report.verdict(found), sep="\n")
    if not options.quick:
        (options.out / "scale.md").write_text(report)
        (options.out / "scale.svg").write_text(scale_report.plot(found))


def await_memory(ranks: int) -> None:
    """Wait until there is memory for so many ranks: other work on this machine may need it."""
    deadline = time.monotonic() + TIMEOUT
    while psutil.virtual_memory().available < (MIB_SPARED + ranks * MIB_OF_A_RANK) << 20:
        if time.monotonic() > deadline:
            raise SystemExit(f"{ranks} ranks: there is too little memory; give fewer by --ranks")
        time.sleep(1)


def measure(wanted: Start, seconds: float) -> Found:
    """Start the ranks, let them train for some seconds, and stop them by a SIGTERM."""
    await_memory(wanted.ranks)
    with tempfile.TemporaryDirectory(prefix="bench-") as place, ThreadPoolExecutor(2) as executor:
        folder = Path(place)
        began = time.monotonic()
        launchers = _start(wanted, seconds, folder)
        outputs = [executor.submit(each.communicate) for each in launchers]
        try:
            _await_ranks(wanted, folder, launchers)
            launcher = Process(
                threads=entries(f"/proc/{launchers[0].pid}/task"),
                descriptors=entries(f"/proc/{launchers[0].pid}/fd"),
            )
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
        ranks = [json.loads((folder / f"rank-{n}.json").read_text()) for n in range(wanted.ranks)]
        checkpoints = [*folder.glob("runs/run/checkpoints/step-*")]
    if not checkpoints or any("end" not in rank for rank in ranks):
        raise SystemExit(f"{wanted}: was stopped, but did not save; last words:\n{errors}")
    return _found(wanted, began, stopped, launcher, ranks)


def _start(wanted: Start, seconds: float, folder: Path) -> list[subprocess.Popen[str]]:
    nodes = 2 if "nodes" in wanted.launch else 1
    job = Job(wanted.strategy, wanted.ranks // nodes, nodes, seconds)
    script: list[str | Path] = [HERE / "scale_one.py", json.dumps(dataclasses.asdict(job)), folder]
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    variables = {
        "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths),
        "TRAINER_SAVE_SECONDS": str(TIMEOUT),
    }
    if wanted.launch == "torchrun":
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}"]
        torchrun += ["--standalone", f"--shutdown-timeout={TIMEOUT}"]
        return [start([*torchrun, *script], cwd=folder, extra=variables)]
    if nodes == 1:
        return [start(script, cwd=folder, extra=variables)]
    shared = {"NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    each_node = [{**variables, **shared, "NODE_RANK": str(node)} for node in range(nodes)]
    return [start(script, cwd=folder, extra=extra) for extra in each_node]


def _await_ranks(wanted: Start, folder: Path, launchers: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while sum(1 for _ in folder.glob("rank-*.json")) < wanted.ranks:
        if time.monotonic() > deadline or any(each.poll() is not None for each in launchers):
            words = [each.communicate()[1] for each in launchers if each.poll() is not None]
            raise SystemExit(f"{wanted}: ranks failed, or hang, before they trained:\n{words}")
        time.sleep(0.1)


def _found(
    wanted: Start, began: float, stopped: float, launcher: Process, ranks: list[dict[str, Any]]
) -> Found:
    def operations(name: str) -> list[int]:
        return [sum(each[name]["operations"].values()) for each in ranks]

    warm, steady = operations("warm"), operations("steady")
    seconds = [rank["steady"]["at"] - rank["warm"]["at"] for rank in ranks]
    rates = [(b - a) / s for a, b, s in zip(warm, steady, seconds, strict=True)]
    processes = [
        Process(
            threads=each["steady"]["threads"],
            descriptors=each["steady"]["descriptors"],
            resident_mib=each["steady"]["resident_mib"],
            own_mib=each["steady"]["own_mib"],
            cpu_s=each["first"]["cpu_s"],
            cpu_stop_s=each["end"]["cpu_s"] - each["steady"]["cpu_s"],
        )
        for each in ranks
    ]
    median = Process(
        **{
            field.name: statistics.median(getattr(process, field.name) for process in processes)
            for field in dataclasses.fields(Process)
        }
    )
    stopping = [b - a for a, b in zip(steady, operations("end"), strict=True)]
    return Found(
        start=wanted,
        first_step_s=max(each["first"]["at"] for each in ranks) - began,
        stop_s=stopped,
        launcher=launcher,
        rank_0=processes[0],
        median=median,
        kinds_0=ranks[0]["first"]["operations"],
        first_0=operations("first")[0],
        first_median=statistics.median(operations("first")),
        first_all=sum(operations("first")),
        rate_0=rates[0],
        rate_all=sum(rates),
        steps_per_s=statistics.median(
            (each["steady"]["step"] - each["warm"]["step"]) / s
            for each, s in zip(ranks, seconds, strict=True)
        ),
        stop_all=sum(stopping),
    )


if __name__ == "__main__":
    main()
