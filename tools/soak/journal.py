"""The journal: a file with a JSON line for each fault, and one for each journey's time."""

import json
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["equal", "finished", "differs", "lost", "hung", "leftover", "open"]
"""``equal``: to the undisturbed run, bit for bit; ``finished``: with the same steps, after attempts
with different numbers of ranks, which draw other random numbers; ``open``: a later fault failed."""
GOOD = ("equal", "finished")


class Failed(Exception):
    """Something that must not happen has happened."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome


class Late(Exception):
    """A slice ends before a run has: it says nothing."""


@dataclass
class Entry:
    """A fault that struck.

    Args:
        seed: of the soak.
        journey: number of the way's journey.
        way: what it struck.
        fault: its name.
        step: the newest step then.
        seconds: from the fault to the next step that had not been made before; ``None``: the run
            failed before.
        lost: steps that had to be made again.
        outcome: see :data:`Outcome`.
        error: what was wrong.
        ended: seconds from the fault to the end of all launchers of the attempt.
    """

    seed: int
    journey: int
    way: str
    fault: str
    step: int
    seconds: float | None = None
    lost: int = 0
    outcome: Outcome = "open"
    error: str = ""
    ended: float | None = None


@dataclass(frozen=True)
class Journey:
    """A run that has finished; its seconds from the first start to the end.

    ``waited``: those from a fault to the next new step; ``None``: not measured.
    """

    seed: int
    journey: int
    way: str
    seconds: float
    outcome: Outcome
    waited: float | None = None


class Journal:
    """Reads the lines that are there, and appends others; threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.entries: list[Entry] = []
        self.journeys: list[Journey] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            record = json.loads(line)
            if "fault" in record:
                self.entries.append(Entry(**record))
            else:
                self.journeys.append(Journey(**record))

    def add(self, journey: Journey, entries: list[Entry]) -> None:
        """Append a journey and its faults in one write."""
        lines: list[Entry | Journey] = [*entries, journey]
        text = "".join(f"{json.dumps(asdict(line))}\n" for line in lines)
        with self._lock:
            with self._path.open("a") as file:
                file.write(text)
            self.entries += entries
            self.journeys.append(journey)

    def journeys_of(self, way: str) -> int:
        return sum(journey.way == way for journey in self.journeys)

    def faults_of(self, way: str) -> Counter[str]:
        return Counter(entry.fault for entry in self.entries if entry.way == way)

    def bad(self) -> list[Entry]:
        """Faults that lost, changed, hung or left something."""
        return [entry for entry in self.entries if entry.outcome not in (*GOOD, "open")]

    def summary(self) -> str:
        count = Counter(entry.outcome for entry in self.entries)
        outcomes = ", ".join(f"{number} {name}" for name, number in sorted(count.items()))
        ways = len({entry.way for entry in self.entries})
        kinds = len({entry.fault for entry in self.entries})
        return (
            f"{len(self.entries)} faults of {kinds} kinds in {len(self.journeys)} runs under "
            f"{ways} strategies and launchers: {outcomes or 'none'}"
        )
