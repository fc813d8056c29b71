"""Rows 14, 15, 35 to 38 and 44: stops, saves and resumes."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from checkpoint import Checkpoint, expect_same_state
from job import Job, Skip, Trial, expect
from registry import row
from runs import expect_no_temporaries, expect_resumes, hash_at_end, paced, undisturbed_hash


@row(14, "SIGTERM to the launcher or a rank")
def stop(t: Trial) -> None:
    ranks, steps = t.random.choice([2, 3]), 14
    target = t.random.choice([None, *range(ranks)])
    number = t.random.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    job = t.train(ranks, ["--max-steps", str(steps)], fault=paced(50))
    job.wait_until_it_trains()
    t.pause(0.3)
    job.send(number, target)
    job.expect_end(75)
    found = re.search(r"stopped after step (\d+), saved", job.err())
    expect(found is not None, "it does not say after which step it stopped")
    assert found is not None
    at = int(found.group(1))
    expect(Checkpoint(t.folder / "run" / "last.safetensors").step() == at, f"the checkpoint is not of step {at}")
    expect("state hash" in job.err() and "warning: not saved" not in job.err(), "no hash, or not saved")
    expect_resumes(t, ranks, steps)


@row(15, "SIGINT twice", "s from the second to the end")
def stop_twice(t: Trial) -> float:
    ranks, steps, saving = t.random.choice([2, 3]), 14, t.number % 2 == 0
    fault = paced(50) + (";sleep:ms=3000,phase=save,rank=0" if saving else "")
    job = t.train(ranks, ["--max-steps", str(steps)], fault=fault)
    job.wait_until_it_trains()
    t.pause(0.2)
    job.send(signal.SIGINT)
    time.sleep(0.8 if saving else t.random.uniform(0, 0.1))
    if saving:
        begin = job.send(signal.SIGINT)
        job.expect_failure(130, "ended at once by a second signal")
    else:
        begin = time.monotonic()
        if job.running():
            job.process.send_signal(signal.SIGINT)
        code = job.wait()
        expect(code in (75, 130), f"exit code {code}, wanted 130, or 75 where it was faster")
        job.expect_nothing_left()
    took = t.expect_within(job.ended - begin, 1.0)
    expect_resumes(t, ranks, steps)
    return took


@row(35, "killed while saving")
def killed_while_saving(t: Trial) -> None:
    ranks, steps = t.random.choice([1, 2]), 20
    job = t.train(ranks, ["--save-every", "1s", "--max-steps", str(steps)])
    job.wait_for(r"saved last.safetensors step 1\b")
    t.pause(0.3)
    if ranks == 1:
        job.send(signal.SIGKILL)
        job.wait()
    else:
        job.send(signal.SIGKILL, 0)
        job.expect_failure(6, r"rank 0: killed by signal 9 \(SIGKILL\)")
    announced = max(int(step) for step in re.findall(r"saved last.safetensors step (\d+)", job.err()))
    files = [t.folder / "run" / name for name in ("last.safetensors", "last.safetensors.previous")]
    there = [Checkpoint(file).step() for file in files if file.exists()]
    expect(max(there) >= announced, f"step {announced} was announced as saved, and there are steps {there}")
    expect_resumes(t, ranks, steps)


def calls_of_a_save(trace: Path) -> list[tuple[str, int]]:
    """The system calls of a run's first save, in order: the name, and the number among the calls of that name that the thread has made."""
    lines = [line.split(maxsplit=1) for line in trace.read_text(errors="replace").splitlines()]
    saver = next(thread for thread, call in lines if ".last.safetensors." in call)
    calls = [call for thread, call in lines if thread == saver and re.match(r"\w+\(", call)]
    begin = next(i for i, call in enumerate(calls) if ".last.safetensors." in call)
    end = next(i for i, call in enumerate(calls) if i > begin and re.match(r'rename.*"[^"]*/last\.safetensors"', call))
    end = next(i for i, call in enumerate(calls) if i > end and call.startswith("close("))   # of the folder, which is synced
    made: dict[str, int] = {}
    found = []
    for i, call in enumerate(calls[: end + 1]):
        name = call[: call.index("(")]
        made[name] = made.get(name, 0) + 1
        if i >= begin:
            found.append((name, made[name]))
    return found


@row(36, "killed at each system call of a save", "calls covered")
def killed_at_each_call(t: Trial) -> float:
    """A trial takes one of the many writes and the next three of the other calls that a save makes."""
    if not shutil.which("strace"):
        raise Skip("no strace")
    t.train(1, ["--max-steps", "2", "--save-every", "1s"], output="base").expect_end(0)
    more, steps = ["-r", "auto", "--max-steps", "3"], 5
    wanted = undisturbed_hash(t, 1, steps)

    def resumed(name: str, options: list[str]) -> int:
        shutil.copytree(t.folder / "base", t.folder / name)
        return t.train(1, more, output=name, wrapper=["strace", "-f", "-qq", "-o", str(t.folder / "trace"), *options]).wait()

    expect(resumed("counted", ["-e", "trace=%file,%desc", "-e", "signal=none"]) == 0, "the run fails under strace")
    calls = calls_of_a_save(t.folder / "trace")
    writes = [call for call in calls if call[0].startswith(("write", "pwrite"))]
    others = [call for call in calls if call not in writes]
    expect(len(writes) > 0 and {"fsync", "close"} <= {name for name, _ in others}, f"the calls of a save are {others} and {len(writes)} writes")
    chosen = [t.random.choice(writes), *(others[(3 * t.number + i) % len(others)] for i in range(3))]
    for name, number in chosen:
        code = resumed("run", ["-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}"])
        expect(code in (-signal.SIGKILL, 128 + signal.SIGKILL), f"{name} {number}: exit code {code}, wanted a kill")
        found = hash_at_end(t.train(1, ["-r", "auto", "--max-steps", str(steps)]))
        expect(found == wanted, f"{name} {number}: after the resume the state hash is {found}, wanted {wanted}")
        expect_no_temporaries(t.folder / "run")
        shutil.rmtree(t.folder / "run")
    return len(chosen)


@row(37, "the disk is full")
def disk_full(t: Trial) -> None:
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    if not shutil.which("unshare") or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        raise Skip("no mounts of its own (unshare -rm)")
    run = t.folder / "run"
    run.mkdir()
    kept = t.folder / "kept"
    # What is in the small file system goes with it, so it is copied out at the end.
    script = 'mount -t tmpfs -o size=14m none "$0" && shift 0 && "$@"; code=$?; cp -a "$0" "$KEPT"; exit $code'
    ranks, last_fits = t.random.choice([1, 2]), t.number % 2 == 0
    words = t.words(ranks, more=["--save-every", "1s", "--max-steps", "2" if last_fits else "6"])
    job = t.start(words, variables={"KEPT": str(kept)}, wrapper=["unshare", "-rm", "sh", "-c", script, str(run)])
    code = job.wait()
    expect(code == 7, f"exit code {code}, wanted 7")
    job.expect_nothing_left()
    expect("warning: not saved: " in job.err(), "no warning")
    expect(re.search(r"No space left on device|free some space", job.last_line()) is not None, "the last line does not say why")
    expect(ranks == 1 or "error: rank 0: " in job.last_line(), "the last line does not name the rank that writes")
    expect(("three times in a row" in job.last_line()) == (not last_fits), "the wrong reason")
    expect(Checkpoint(kept / "last.safetensors").step() == 1, "the old checkpoint is gone")
    expect_no_temporaries(kept)


@row(38, "killed and resumed")
def killed_and_resumed(t: Trial) -> None:
    ranks, steps = 1 + t.number % 3, 12
    whole = t.train(ranks, ["--max-steps", str(steps)], output="whole")
    whole.expect_end(0)
    saved = t.random.randrange(1, 7)
    job = t.train(ranks, ["--save-every", f"{saved}s"])
    job.wait_for(rf"saved last.safetensors step {saved}\b")
    t.pause(0.3)
    if ranks == 1:
        job.send(signal.SIGKILL)
        job.wait()
    else:
        rank = t.random.randrange(ranks)
        job.send(signal.SIGKILL, rank)
        job.expect_failure(6, rf"rank {rank}: killed")
    t.train(ranks, ["-r", "auto", "--max-steps", str(steps)]).expect_end(0)
    expect_same_state(t.folder / "whole" / "last.safetensors", t.folder / "run" / "last.safetensors")
    expect_no_temporaries(t.folder / "run")


@row(44, "the disk is slow", "s a save took")
def slow_disk(t: Trial) -> float:
    """A checkpoint that is written, or read, slower than T is no stall while it moves on."""
    if not shutil.which("strace"):
        raise Skip("no strace")
    t.train(1, ["--max-steps", "1"], output="alone").expect_end(0)
    tensors = len(Checkpoint(t.folder / "alone" / "last.safetensors").entries)

    def slow(call: str, steps: int, more: list[str]) -> Job:
        """Each such call is late; a checkpoint has one for each tensor."""
        delay = int(1.5 * t.timeout_s / tensors * 1e6)
        wrapper = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:delay_enter={delay}"]
        job = t.train(2, ["--max-steps", str(steps), "--batch-size", "2", *more], wrapper=wrapper)
        job.wait_for(rf"stopped at step {steps}\b")
        return job

    saving = slow("write", 2, [])
    began = time.monotonic()
    saving.expect_end(0)
    took = saving.ended - began
    expect(took > t.timeout_s, f"the save took {took:.1f} s, less than the timeout")
    began = time.monotonic()
    reading = slow("pread64", 3, ["-r", "auto"])
    expect(time.monotonic() - began > t.timeout_s, "the load took less than the timeout")
    reading.expect_end(0)
    for job in (saving, reading):
        expect(re.search("while others wait|no sign of life", job.err()) is None, "slowness was taken for a stall")
    expect(Checkpoint(t.folder / "run" / "last.safetensors").step() == 3, "the checkpoint is not of step 3")
    return took
