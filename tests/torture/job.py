"""The binary as a process: started in a folder of its own, watched, made to fail, and looked after."""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

HANG_S = 120.0   # a process that is still there after so long, and the slack, hangs
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
MARK = "DETRTRAIN_TORTURE"   # a variable that every process of a job has, and nobody else
INHERITED = ["PATH", "HOME", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "LSAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"]


class Failure(Exception):
    """The product does not do what it promises."""


class Skip(Exception):
    """This machine cannot run the row."""


def expect(condition: bool, *parts: object) -> None:
    if not condition:
        raise Failure("".join(str(part) for part in parts))


def processes_with(mark: str) -> list[int]:
    """The processes that have the mark in their environment. One that has ended has none, whether anybody has waited for it or not."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:  # it has just ended, or is another user's
            pass
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Job:
    """One process of the binary (the launcher with its ranks, or a rank started by hand)."""

    def __init__(self, words: list[str], folder: Path, mark: str, variables: Mapping[str, str], wrapper: Iterable[str],
                 files: tuple[int, int] | None, hang_s: float) -> None:
        """variables: of its environment; wrapper: the words of a program that starts it; files: soft and hard limit of open files."""
        folder.mkdir(parents=True)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = mark
        self.words = [*wrapper, *words]
        self.variables = dict(variables)
        self.hang_s = hang_s
        self.output, self.errors = folder / "out", folder / "err"
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment |= {"TMPDIR": str(self.temporary), MARK: mark} | self.variables
        self.shared_before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

        def prepare() -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)   # a driver that is killed leaves no job
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):   # a driver in a script's background ignores SIGINT
                signal.signal(number, signal.SIG_DFL)
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, files)

        with open(self.output, "wb") as out, open(self.errors, "wb") as err:
            self.process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True,
                                            preexec_fn=prepare)
        self.started = time.monotonic()
        self.ended = 0.0

    # What it says.

    def err(self) -> str:
        return self.errors.read_text(errors="replace")

    def out(self) -> str:
        return self.output.read_text(errors="replace")

    def last_line(self) -> str:
        lines = self.err().rstrip("\n").splitlines()
        return lines[-1] if lines else ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until stderr has the pattern; fails where the process ends before."""
        deadline = time.monotonic() + self.hang_s
        while True:
            running = self.running()
            if found := re.search(pattern, self.err(), re.MULTILINE):
                return found
            expect(running, f"it ended with code {self.process.returncode} before it said '{pattern}'")
            expect(time.monotonic() < deadline, f"it has not said '{pattern}' for {self.hang_s:.0f} s")
            time.sleep(0.002)

    def pid(self, rank: int) -> int:
        return int(self.wait_for(rf"^rank {rank} pid (\d+) device cpu$").group(1))

    def wait_until_it_trains(self) -> None:
        self.wait_for(r" step 1 epoch ")

    # What is done to it.

    def running(self) -> bool:
        if self.process.poll() is not None and not self.ended:
            self.ended = time.monotonic()
        return not self.ended

    def send(self, number: int, rank: int | None = None) -> float:
        """A signal to the process, or to one of its ranks; returns the time."""
        try:
            os.kill(self.process.pid if rank is None else self.pid(rank), number)
        except ProcessLookupError:
            raise Failure(f"{'it' if rank is None else f'rank {rank}'} ended before signal {number} was sent") from None
        return time.monotonic()

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        deadline = time.monotonic() + self.hang_s
        while self.running():
            expect(time.monotonic() < deadline, f"it is still there after {self.hang_s:.0f} s; processes left: {processes_with(self.mark)}")
            time.sleep(0.002)
        return int(self.process.returncode)

    def kill(self) -> None:
        for pid in processes_with(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    # What it leaves.

    def expect_nothing_left(self, within_s: float = 0.0) -> float:
        """No process, no file in the temporary folder, nothing of ours in /dev/shm; returns when the last process was seen, after the call."""
        begin = time.monotonic()
        while left := processes_with(self.mark):
            expect(time.monotonic() - begin <= within_s, f"processes left after {within_s:.1f} s: {left}")
            time.sleep(0.005)
        took = time.monotonic() - begin
        expect(not os.listdir(self.temporary), f"left in the temporary folder: {os.listdir(self.temporary)}")
        if os.path.isdir("/dev/shm"):
            fresh = [name for name in os.listdir("/dev/shm") if name not in self.shared_before and re.search("detr|gloo|nccl", name)]
            expect(not fresh, f"left in /dev/shm: {fresh}")
        return took

    def expect_end(self, code: int) -> None:
        """It ends with the code and leaves nothing."""
        seen = self.wait()
        expect(seen == code, f"exit code {seen}, wanted {code}")
        self.expect_nothing_left()

    def expect_failure(self, code: int, pattern: str) -> None:
        """It ends with the code, and with one error, in the last line of stderr, in which the pattern follows 'detrtrain: error: '."""
        self.expect_end(code)
        errors = [line for line in self.err().splitlines() if line.startswith("detrtrain: error: ")]
        expect(len(errors) == 1, f"{len(errors)} lines of error, wanted one")
        expect(re.match("detrtrain: error: " + pattern, self.last_line()) is not None, f"the last line does not say '{pattern}'")

    def describe(self) -> str:
        settings = "".join(f"{name}={shlex.quote(value)} " for name, value in self.variables.items())
        code = self.process.returncode if not self.running() else "still running"
        lines = "\n".join("    " + line for line in self.err().splitlines()[-25:])
        return f"  $ {settings}{shlex.join(self.words)}\n  exit code: {code}\n  stderr:\n{lines}"


class Trial:
    """One trial of a row: random numbers, a folder, and the jobs that were started in it."""

    def __init__(self, binary: Path, data: Path, folder: Path, name: str, seed: int, number: int, slack_s: float,
                 timeout_s: float) -> None:
        """timeout_s: T of its jobs, after which a rank that others wait for counts as stalled."""
        self.binary, self.data, self.folder, self.name, self.number = binary, data, folder, name, number
        self.slack_s, self.timeout_s = slack_s, timeout_s
        self.random = random.Random(f"{seed}/{name}/{number}")
        self.jobs: list[Job] = []
        folder.mkdir(parents=True)

    def start(self, words: Iterable[str], fault: str = "", variables: Mapping[str, str] | None = None, wrapper: Iterable[str] = (),
              files: tuple[int, int] | None = None, binary: Path | None = None) -> Job:
        """The binary with the arguments."""
        settings = dict(variables or {})
        if fault:
            settings["DETRTRAIN_FAULT"] = fault
        number = len(self.jobs)
        mark = f"{os.getpid()}-{self.name}-{self.number}-{number}"
        job = Job([str(binary or self.binary), *words], self.folder / f"job{number}", mark, settings, wrapper, files, HANG_S + self.slack_s)
        self.jobs.append(job)
        return job

    def words(self, ranks: int, output: str = "run", data: Path | None = None, batch: int | None = None, more: Iterable[str] = ()) -> list[str]:
        """The arguments of a small training; `more` wins over what is here. ranks 0: started by hand; batch: of all ranks (one image each)."""
        own = {"--imgsz": "96", "--batch-size": str(batch or max(ranks, 1)), "--num-workers": "1", "--threads": "1", "--eval-every": "0",
               "--epochs": "1000", "--comm-timeout": f"{self.timeout_s:g}", "--data": str(data or self.data), "--output-dir": str(self.folder / output)}
        further = list(more)
        words = ["train", "-c", "tiny", "-d", "cpu", "-u", "RTDETRTransformerv2.num_queries=30"]
        if ranks > 1:
            words += ["--ranks", str(ranks)]
        for flag, value in own.items():
            if flag not in further:
                words += [flag, value]
        return words + further

    def train(self, ranks: int, more: Iterable[str] = (), *, fault: str = "", output: str = "run", data: Path | None = None, batch: int | None = None,
              wrapper: Iterable[str] = (), files: tuple[int, int] | None = None) -> Job:
        return self.start(self.words(ranks, output, data, batch, more), fault, None, wrapper, files)

    def rank_by_hand(self, rank: int, size: int, port: int, more: Iterable[str] = (), fault: str = "", data: Path | None = None,
                     binary: Path | None = None) -> Job:
        """A rank as torchrun would start it."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": self.name}
        return self.start(self.words(0, "run", data, size, more), fault, place, binary=binary)

    def pause(self, longest_s: float) -> None:
        time.sleep(self.random.uniform(0, longest_s))

    def expect_within(self, seconds: float, bound_s: float) -> float:
        expect(seconds <= bound_s + self.slack_s, f"it took {seconds:.2f} s, wanted at most {bound_s:g} s (and a slack of {self.slack_s:g} s)")
        return seconds

    def end(self, keep: bool) -> None:
        for job in self.jobs:
            job.kill()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        expect(time.monotonic() < deadline, f"{what}: not within {limit_s:g} s")
        time.sleep(0.005)
