"""What the order of a billion samples costs one rank, beside a step of the trainer."""

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from my_project_trainer.data.sampling import BatchPlan, GlobalOrder

from child import STEADY_PEAKS, measure
from job import Job
from report import table

BATCH = 32
ROUNDS = 5  # of which the fastest counts: other work on the machine delays some
BATCHES = 2000
HEAD = ("samples", "order", "ms to the first", "ms to resume", "MiB", "µs per batch", "of a step")
# The smallest step: of the MLP of docs/benchmarks.md.
STEP = Job("bundled", warmup=500, steps=2000)


def section(held: int) -> str:
    """The table of an order of so many samples, held and computed, and of a billion."""
    step_us = 1e3 * measure("contestants.py", STEP, STEADY_PEAKS)[0]["cpu_ms"]
    rows = _rows([(held, True), (held, False), (10**9, False)], step_us)
    return f"The smallest step took {step_us:.0f} µs.\n\n{table(HEAD, rows)}"


def _rows(orders: Sequence[tuple[int, bool]], step_us: float) -> Iterator[list[str]]:
    for samples, is_held in orders:
        plan = BatchPlan(samples, BATCH)
        order = GlobalOrder(plan, 0, 0, shuffle=True, keyed=False, fill=True, is_held=is_held)
        first, resume = (_ms_to_batch(order, batch) for batch in (0, plan.batches // 2))
        batch_us = _us_per_batch(order)
        cells = [f"{samples:,}", "held" if is_held else "computed", f"{first:.1f}", f"{resume:.1f}"]
        # torch's memory is none of Python's.
        mib = 8 * samples / 2**20 if is_held else _traced_mib(order)
        yield [*cells, f"{mib:,.1f}", f"{batch_us:.1f}", f"{batch_us / step_us:.1%}"]


def processor_us(what: Callable[[], Any]) -> float:
    """Processor time that it takes: this does not depend on what else the machine does."""
    before = time.process_time()
    what()
    return (time.process_time() - before) * 1e6


def _batches(order: GlobalOrder, start: int) -> Iterator[Any]:
    order.epoch, order.start = 0, start
    return iter(order)


def _ms_to_batch(order: GlobalOrder, start: int) -> float:
    rounds = 1 if order.is_held else ROUNDS
    return min(processor_us(lambda: next(_batches(order, start))) for _ in range(rounds)) / 1000


def _us_per_batch(order: GlobalOrder) -> float:
    """Of each batch after the first."""
    later = _batches(order, 0)
    next(later)
    return min(processor_us(lambda: list(islice(later, BATCHES))) for _ in range(ROUNDS)) / BATCHES


def _traced_mib(order: GlobalOrder) -> float:
    tracemalloc.start()
    for _ in islice(_batches(order, order.plan.batches // 2), 500):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20
