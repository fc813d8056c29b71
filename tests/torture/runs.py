"""Runs that several rows compare with."""

from __future__ import annotations

import re
from pathlib import Path

from job import Failure, Job, Trial, expect


def paced(milliseconds: int) -> str:
    """A fault under which each step takes at least so long, and gives the same bits."""
    return f"sleep:ms={milliseconds},phase=load"


def hash_at_end(job: Job) -> str:
    job.expect_end(0)
    found = re.search(r"state hash (\w+) at step \d+", job.err())
    if found is None:
        raise Failure("it has told no state hash")
    return found.group(1)


_hashes: dict[tuple[Path, int, int], str] = {}


def undisturbed_hash(t: Trial, ranks: int, steps: int) -> str:
    """The state hash after a run of so many steps that nothing disturbs, of a batch of one image a rank."""
    key = (t.data, ranks, steps)
    if key not in _hashes:
        _hashes[key] = hash_at_end(t.train(ranks, ["--max-steps", str(steps)], output="undisturbed"))
    return _hashes[key]


def expect_resumes(t: Trial, ranks: int, steps: int, output: str = "run", more: tuple[str, ...] = ()) -> None:
    """The run in the folder goes on to the state that it has without a break, and no temporary file is left."""
    wanted = undisturbed_hash(t, ranks, steps)
    job = t.train(ranks, ["-r", "auto", "--max-steps", str(steps), *more], output=output)
    found = hash_at_end(job)
    expect(found == wanted, f"after the resume the state hash at step {steps} is {found}, without a break {wanted}")
    expect_no_temporaries(t.folder / output)


def expect_no_temporaries(folder: Path) -> None:
    left = [entry.name for entry in folder.iterdir() if entry.name.endswith(".tmp")]
    expect(not left, f"temporary files are left: {left}")
