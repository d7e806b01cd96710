"""Prints a plan."""

from collections.abc import Iterator
from typing import Any

from .planning import CPU_RESERVED, GPU_RESERVED, MARGIN, Planned, Row

_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buckets", "gathered", "host")


def text(planned: Planned) -> str:
    """The plan as lines."""
    return "\n".join([*_facts(planned.facts), "", *_rows(planned), "", *_remarks(planned)])


def _facts(facts: dict[str, Any]) -> Iterator[str]:
    reserved = CPU_RESERVED if facts["accelerator"] == "cpu" else GPU_RESERVED
    nodes, devices = facts["nodes"], facts["devices"]
    yield (
        f"{nodes} node{'s' * (nodes > 1)} x {devices} device{'s' * (devices > 1)} "
        f"({facts['accelerator']}), precision {facts['precision']}, strategy {facts['strategy']}"
    )
    yield f"model: {facts['parameters']:,} parameters, {facts['trained']:,} trained"
    yield (
        f"effective batch: {_known(facts['effective_batch'])} samples = {facts['micro_batch']} x "
        f"{facts['replicas']} replicas x {facts['accumulate']} micro-batches"
    )
    rates = ", ".join(f"{rate:.3g}" for rate in facts["scaled_learning_rates"]) or "unknown"
    factor, warmup = facts["learning_rate_factor"], facts["warmup_steps"]
    scaled = "" if factor == 1 else f", scaled by {factor:.4g}, after {warmup} warm-up steps"
    yield f"learning rate: {rates}{scaled}"
    yield (
        f"steps: {_known(facts['steps_per_epoch'])} per epoch, "
        f"{_known(facts['total_steps'])} in total"
    )
    if facts["step_seconds_at_least"]:
        seconds = facts["step_seconds_at_least"]
        yield f"step time, lower bound by FLOPs at peak_flops: {seconds:.4g} s"
    yield (
        f"memory of a device: {_size(facts['memory'])}; margin: {MARGIN:.0%} and "
        f"{_size(reserved)}; available: {_size(facts['available'])}"
    )


def _known(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _size(number: int) -> str:
    if abs(number) >= 100 * 2**30:
        return f"{number / 2**30:,.0f} G"
    if abs(number) >= 2**30:
        return f"{number / 2**30:.2f} G"
    if abs(number) >= 2**20:
        return f"{number / 2**20:.1f} M"
    return f"{number / 2**10:.1f} K" if number else "0"


def _rows(planned: Planned) -> Iterator[str]:
    shown = [
        name
        for name in _COLUMNS
        if name not in ("buckets", "gathered", "host")
        or any(getattr(row.memory, name) for row in planned.rows)
    ]
    heads = ["strategy", "peak", *shown, "fits", "batch", "largest batch", "", ""]
    lines = [heads, *([*_cells(row, shown)] for row in planned.rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    for line in lines:
        first, *rest = (
            cell.ljust(width) if place in (0, len(heads) - 2, len(heads) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def _cells(row: Row, shown: list[str]) -> Iterator[str]:
    yield row.name
    yield _size(row.memory.peak)
    for name in shown:
        yield _size(getattr(row.memory, name))
    yield "yes" if row.fits else "no"
    yield f"{row.batch_size:,}"
    yield f"{row.largest_batch_size:,}"
    yield row.memory.mark
    yield row.memory.note


def _remarks(planned: Planned) -> Iterator[str]:
    if planned.simplest is None:
        yield "no strategy fits: use a smaller batch, activation_checkpointing, or more devices"
    else:
        yield f"the simplest that fits: --trainer.strategy {planned.simplest}"
    for row in planned.rows:
        if row.also:
            yield f"as {row.name}: {', '.join(row.also)}"
    for reason, names in planned.left_out.items():
        yield f"left out: {', '.join(names)}: {reason}"
    for line in planned.notes:
        yield f"note: {line}"
    for line in planned.disagreements:
        yield f"disagrees: {line}"
