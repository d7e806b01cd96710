"""1-bit Adam, number by number: against the algorithm written down in plain Python."""

import math

import pytest
from safetensors.torch import load_file

from group_worker import ADAM, ADAM_STEPS, FREEZE_STEP, SHAPES, draw, run_ranks

Numbers = list[float]


def compress(numbers: Numbers) -> Numbers:
    """Signs, with the one scale that keeps the norm."""
    norm = math.sqrt(sum(number * number for number in numbers))
    scale = norm / math.sqrt(max(len(numbers), 1))
    return [scale if number >= 0 else -scale for number in numbers]


def mean(lists: list[Numbers]) -> Numbers:
    return [sum(numbers) / len(lists) for numbers in zip(*lists, strict=True)]


class Simulation:
    """One parameter's way on so many processes: Tang et al. 2021, algorithm 1."""

    def __init__(self, name: str, processes: int) -> None:
        self.name, self.processes = name, processes
        self.weights = draw(name, -1, 0).flatten().tolist()
        size = len(self.weights)
        self.momentum, self.variance = [0.0] * size, [0.0] * size
        # Each process serves a chunk of whole bytes of signs.
        chunk = math.ceil(size / (8 * processes)) * 8
        self.chunks = [slice(rank * chunk, (rank + 1) * chunk) for rank in range(processes)]
        self.sent = [[0.0] * size for _ in range(processes)]
        self.served = [[0.0] * len(self.weights[chunk]) for chunk in self.chunks]

    def step(self, step: int) -> None:
        beta1, beta2 = ADAM["betas"]
        drawn = [draw(self.name, step, rank).flatten().tolist() for rank in range(self.processes)]
        moments = [
            [beta1 * old + (1 - beta1) * new for old, new in zip(self.momentum, grads, strict=True)]
            for grads in drawn
        ]
        if step < FREEZE_STEP:
            self.momentum = mean(moments)
            pairs = zip(self.variance, mean(drawn), strict=True)
            self.variance = [beta2 * old + (1 - beta2) * new**2 for old, new in pairs]
        else:
            self.momentum = self.compressed(moments)
        self.weights = [
            weight
            - ADAM["lr"]
            * (moment / (math.sqrt(variance) + ADAM["eps"]) + ADAM["weight_decay"] * weight)
            for weight, moment, variance in zip(
                self.weights, self.momentum, self.variance, strict=True
            )
        ]

    def compressed(self, moments: list[Numbers]) -> Numbers:
        sent = []
        for rank, moment in enumerate(moments):
            corrected = [a + b for a, b in zip(moment, self.sent[rank], strict=True)]
            sent.append(compress(corrected))
            self.sent[rank] = [a - b for a, b in zip(corrected, sent[-1], strict=True)]
        result: Numbers = []
        for rank, chunk in enumerate(self.chunks):
            average = mean([momentum[chunk] for momentum in sent])
            corrected = [a + b for a, b in zip(average, self.served[rank], strict=True)]
            result += compress(corrected)
            self.served[rank] = [a - b for a, b in zip(corrected, compress(corrected), strict=True)]
        return result


@pytest.mark.parametrize("processes", [2, 3])
def test_is_the_algorithm(tmp_path, processes):
    run_ranks("step_one_bit_adam", processes, tmp_path)
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(processes)]

    def check(key: str, rank: int, expected: Numbers) -> None:
        values = ranks[rank][key].flatten().tolist()
        assert values == pytest.approx(expected, rel=1e-9, abs=1e-12), key

    for name in SHAPES:
        simulation = Simulation(name, processes)
        for step in range(ADAM_STEPS):
            simulation.step(step)
            for rank in range(processes):
                check(f"{step}.{name}", rank, simulation.weights)
                check(f"{step}.{name}.momentum", rank, simulation.momentum)
                assert (f"{step}.{name}.sent" in ranks[rank]) == (step >= FREEZE_STEP)
                if step >= FREEZE_STEP:
                    check(f"{step}.{name}.sent", rank, simulation.sent[rank])
                    check(f"{step}.{name}.served", rank, simulation.served[rank])


def test_every_process_makes_the_same_step_to_the_last_bit(tmp_path):
    run_ranks("step_one_bit_adam", 3, tmp_path)
    first, *others = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(3)]
    for name in SHAPES:
        last = f"{ADAM_STEPS - 1}.{name}"
        assert all(other[last].equal(first[last]) for other in others)
