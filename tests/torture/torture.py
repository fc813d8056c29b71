"""Makes ranks of real jobs die, hang, lie and run out of things, and checks that each job ends as promised.

Every random choice follows from --seed, the row and the number of the trial; when, counted in milliseconds, a signal meets the job depends on the machine.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.dont_write_bytecode = True   # the source tree stays as it is

import rows_agree  # noqa: F401  (each adds its rows)
import rows_end  # noqa: F401
import rows_gradients  # noqa: F401
import rows_limits  # noqa: F401
import rows_save  # noqa: F401
import rows_values  # noqa: F401
from job import Failure, Skip, Trial
from registry import ROWS, Row


def numbers_of(text: str) -> list[int]:
    """1,6,9-12 as numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [n for n in range(int(first), int(last or first) + 1) if n in ROWS or not last]
    unknown = [n for n in numbers if n not in ROWS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there are no rows {unknown}; see --list")
    return numbers


def parse_arguments() -> argparse.Namespace:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(prog="torture.sh", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of every random choice (1)")
    parser.add_argument("--trials", type=int, default=5, help="of each row (5)")
    parser.add_argument("--rows", type=numbers_of, default=sorted(ROWS), help="such as 1,6,9-12; default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat one")
    parser.add_argument("--binary", type=Path, default=root / "build" / "bin" / "detrtrain")
    parser.add_argument("--slack", type=float, default=0.0, help="seconds added to each bound on time, for a slow or busy machine (0)")
    parser.add_argument("--timeout", type=float, default=3.0, help="T of the jobs (--comm-timeout), longer where each step is slow (3)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials that failed")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    return parser.parse_args()


def figure(values: list[float], unit: str) -> str:
    if not values:
        return ""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return f"max {ordered[-1]:.3g}, p99 {p99:.3g}, median {ordered[len(ordered) // 2]:.3g} {unit}"


def report(trial: Trial, row: Row, options: argparse.Namespace, error: Exception) -> None:
    print(f"FAILED row {row.number} ({row.what}), trial {trial.number}: {error}")
    if not isinstance(error, Failure):
        traceback.print_exception(error, file=sys.stdout)
    print(f"  again: scripts/torture.sh --seed {options.seed} --rows {row.number} --first {trial.number} --trials 1 --slack {options.slack:g} "
          f"--timeout {options.timeout:g} --binary {options.binary}")
    for job in trial.jobs:
        print(job.describe())
    sys.stdout.flush()


def run_row(row: Row, options: argparse.Namespace, data: Path, work: Path) -> bool:
    values: list[float] = []
    passed, failed, begin = 0, 0, time.monotonic()
    for number in range(options.first, options.first + options.trials):
        folder = work / f"row{row.number}-{number}"
        trial = Trial(options.binary.resolve(), data, folder, f"row{row.number}", options.seed, number, options.slack, options.timeout)
        good = False
        try:
            value = row.run(trial)
            if value is not None:
                values.append(value)
            passed += 1
            good = True
        except Skip as missing:
            print(f"row {row.number:2}  {row.what:44}  skipped: {missing}", flush=True)
            return True
        except Exception as error:  # noqa: BLE001  (a trial that cannot be judged is a failed one, and the next rows go on)
            failed += 1
            if failed <= 3:
                report(trial, row, options, error)
        finally:
            trial.end(options.keep and not good)
    print(f"row {row.number:2}  {row.what:44}  {passed:3}/{options.trials:<3}  {time.monotonic() - begin:6.1f} s  {figure(values, row.unit)}", flush=True)
    return passed == options.trials


def main() -> int:
    options = parse_arguments()
    if options.list:
        for number in sorted(ROWS):
            print(f"{number:2}  {ROWS[number].what}")
        return 0
    work = Path(tempfile.mkdtemp(prefix="detr-torture-"))
    data = work / "data"
    try:
        synth = ["synth", "--out", data, "--images", "27", "--classes", "3", "--size", "96x96", "--max-boxes", "4", "--seed", str(options.seed)]
        subprocess.run([options.binary.resolve(), *synth], check=True, stdout=subprocess.DEVNULL)
        failed = [number for number in options.rows if not run_row(ROWS[number], options, data, work)]
    finally:
        if options.keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    print(f"torture: {len(options.rows) - len(failed)} of {len(options.rows)} rows hold" + (f"; failed: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
