"""The rows of the table of torture tests, by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from job import Trial


@dataclass(frozen=True)
class Row:
    """run() fails with Failure, or returns the trial's figure in `unit` (None: it has none); Skip says what the machine lacks."""

    number: int
    what: str
    unit: str
    run: Callable[[Trial], float | None]


ROWS: dict[int, Row] = {}


def row(number: int, what: str, unit: str = "") -> Callable[[Callable[[Trial], float | None]], Callable[[Trial], float | None]]:
    def add(run: Callable[[Trial], float | None]) -> Callable[[Trial], float | None]:
        assert number not in ROWS
        ROWS[number] = Row(number, what, unit, run)
        return run

    return add
