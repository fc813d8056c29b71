"""Rows 1 to 12, 42 and 45: a rank, or the launcher, dies, throws, stops or crawls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from job import Job, Skip, Trial, expect
from registry import row
from runs import paced, undisturbed_hash

SAVING = ["--save-every", "3s"]
GONE_S = 2.0  # from a loss to the end of the job


def start_training(t: Trial, ranks: int) -> Job:
    job = t.train(ranks, SAVING)
    job.wait_until_it_trains()
    return job


def kill_in_training(t: Trial, ranks: int, rank: int) -> float:
    job = start_training(t, ranks)
    t.pause(1.0)
    begin = job.send(signal.SIGKILL, rank)
    job.expect_failure(6, rf"rank {rank}: killed by signal 9 \(SIGKILL\)")
    return t.expect_within(job.ended - begin, GONE_S)


@row(1, "a rank killed in training", "s to the end")
def killed_in_training(t: Trial) -> float:
    ranks = t.random.choice([2, 3, 4])
    return kill_in_training(t, ranks, t.random.randrange(ranks))


@row(2, "a rank killed in start-up", "s to the end")
def killed_in_start_up(t: Trial) -> float:
    ranks = t.random.choice([2, 3, 4])
    rank = t.random.randrange(ranks)
    job = t.train(ranks)
    job.pid(ranks - 1)
    t.pause(0.06)
    begin = job.send(signal.SIGKILL, rank)
    job.expect_failure(6, rf"rank {rank}: killed by signal 9 \(SIGKILL\)")
    return t.expect_within(job.ended - begin, GONE_S)


@row(3, "rank 0 killed", "s to the end")
def rank_0_killed(t: Trial) -> float:
    return kill_in_training(t, t.random.choice([2, 3, 4]), 0)


@row(4, "two ranks killed at once", "s to the end")
def two_killed(t: Trial) -> float:
    ranks = t.random.choice([3, 4])
    a, b = t.random.sample(range(ranks), 2)
    job = start_training(t, ranks)
    pids = job.pid(a), job.pid(b)
    t.pause(0.5)
    begin = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.expect_failure(6, rf"rank ({a}|{b}): killed by signal 9 \(SIGKILL\).*; also lost: rank ({a}|{b})$")
    named = re.findall(r"rank (\d+)", job.last_line())
    expect(sorted(map(int, named)) == sorted([a, b]), f"ranks {a} and {b} were killed, and {named} named")
    return t.expect_within(job.ended - begin, GONE_S)


@row(5, "the launcher killed", "s until nobody is left")
def launcher_killed(t: Trial) -> float:
    job = start_training(t, t.random.choice([2, 3, 4])) if t.number % 2 else t.train(3)
    job.pid(1)
    t.pause(0.5)
    begin = job.send(signal.SIGKILL)
    job.expect_nothing_left(1.0 + t.slack_s)
    return time.monotonic() - begin


@row(6, "an exception in one rank's step")
def exception(t: Trial) -> None:
    ranks = t.random.choice([2, 3, 4])
    rank, step, phase = t.random.randrange(ranks), t.random.randrange(6), t.random.choice(["forward", "forward", "load", "backward", "reduce", "update"])
    place = "backward" if phase == "reduce" else phase   # the rank enters it with its first collective
    job = t.train(ranks, SAVING, fault=f"throw:rank={rank},step={step},phase={phase}")
    job.expect_failure(1, rf"rank {rank}: DETRTRAIN_FAULT: an error that was asked for \(step {step}, {phase}\); step {step}, {place}$")


@row(7, "a crash in one rank")
def crash(t: Trial) -> None:
    ranks, name = t.random.choice([2, 3, 4]), ["SEGV", "ABRT", "FPE", "BUS", "ILL"][t.number % 5]
    rank, step, phase = t.random.randrange(ranks), t.random.randrange(4), t.random.choice(["load", "forward", "backward", "reduce", "update"])
    job = t.train(ranks, fault=f"signal:sig={name},rank={rank},step={step},phase={phase}")
    job.expect_failure(1, rf"rank {rank}: killed by signal \d+ \(SIG{name}\)")
    expect(f"rank {rank}: crashed by signal {getattr(signal, 'SIG' + name)}" in job.err(), "the rank itself said nothing")


@row(8, "a rank ends with exit code 0")
def early_exit(t: Trial) -> None:
    ranks = t.random.choice([2, 3])
    rank, step = t.random.randrange(ranks), t.random.randrange(5)
    job = t.train(ranks, fault=f"exit:code=0,rank={rank},step={step},phase=forward")
    job.expect_failure(1, rf"rank {rank}: ended with exit code 0 and no word")


@row(9, "a rank stopped", "s beyond T")
def stopped(t: Trial) -> float:
    ranks = t.random.choice([2, 3])
    rank = t.random.randrange(ranks)
    if t.number % 3 == 2:   # nobody waits for it at first: the other one saves most of the time
        ranks, rank = 2, 1
        job = t.train(ranks, ["--save-every", "2s"], fault="sleep:ms=2500,phase=save,rank=0")
        job.wait_until_it_trains()
    else:
        job = start_training(t, ranks)
    t.pause(0.5)
    begin = job.send(signal.SIGSTOP, rank)
    job.expect_failure(6, rf"rank {rank}: no sign of life for ")
    took = job.ended - begin
    expect(took >= 0.7 * t.timeout_s, f"it took {took:.2f} s, and T is {t.timeout_s:g} s")
    return t.expect_within(took - t.timeout_s, GONE_S)


PHASES = ["start", "save", "rendezvous", "plan", "manifest", "connect", "load", "forward", "backward", "reduce", "update", "compare", "eval", "end"]


@row(45, "a rank hangs, in each phase", "s beyond T, with the run before")
def hangs(t: Trial) -> float:
    ranks, phase = t.random.choice([2, 3]), PHASES[t.number % len(PHASES)]
    rank = t.random.randrange(ranks)
    begin = time.monotonic()
    job = t.train(ranks, ["--epochs", "1", "--eval-every", "1", "--save-every", "3s", "-u", f"comm.start_timeout_s={t.timeout_s:g}"], fault=f"hang:phase={phase},rank={rank}")
    job.expect_failure(6, rf"rank {rank}: has not (moved|come) ")
    return t.expect_within(job.ended - begin - t.timeout_s, GONE_S + 3.0)   # a short run comes before the hang


@row(10, "a rank stopped for less than T")
def stopped_for_a_while(t: Trial) -> None:
    ranks, steps = t.random.choice([2, 3]), 14
    rank = t.random.randrange(ranks)
    wanted = undisturbed_hash(t, ranks, steps)
    job = t.train(ranks, ["--max-steps", str(steps)], fault=paced(50))
    job.wait_until_it_trains()
    t.pause(0.3)
    job.send(signal.SIGSTOP, rank)
    time.sleep(1.0)
    job.send(signal.SIGCONT, rank)
    job.expect_end(0)
    expect(f"state hash {wanted} at step {steps}" in job.err(), f"the state hash is not {wanted}, which the run has without a break")


@row(11, "a slow rank", "warnings")
def slow(t: Trial) -> float:
    ranks = t.random.choice([2, 3])
    rank, patient = t.random.randrange(ranks), t.number % 2 == 1
    # Where T / 3 is longer than the rank's sleep there is nothing to warn of either.
    job = t.train(ranks, ["--max-steps", "3", *(["--comm-timeout", "9"] if patient else [])], fault=f"sleep:ms=2000,phase=load,rank={rank}")
    job.expect_end(0)
    warnings = len(re.findall("while others wait|no sign of life", job.err()))
    expect(not patient or warnings == 0, "a warning of a stall")
    return warnings if patient else 0


def expect_namespaces(*more: str) -> None:
    command = ["unshare", "-rn", *(more or ["true"])]
    if any(shutil.which(name) is None for name in (command[0], command[2])) or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        raise Skip(f"no network namespace of its own ({' '.join(command)})")


@row(12, "the network goes down", "s beyond T")
def network_down(t: Trial) -> float:
    expect_namespaces()
    switch = t.folder / "down"
    job = t.train(t.random.choice([2, 3]), wrapper=["unshare", "-rn", sys.executable, str(Path(__file__).with_name("loopback.py")), str(switch)])
    job.wait_until_it_trains()
    t.pause(0.5)
    begin = time.monotonic()
    switch.touch()
    job.expect_failure(6, r"rank \d+: ")
    return t.expect_within(job.ended - begin - t.timeout_s, GONE_S)


@row(42, "two hosts")
def two_hosts(t: Trial) -> None:
    """The host beside the hub's has its own name on its loopback, as many have; each host's ranks must be reached from the other."""
    expect_namespaces("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
    kind = t.number % 4
    fault, code, error = [("", 0, ""), ("signal:sig=SEGV,rank=3,step=3", 1, r"rank 3: killed by signal 11 \(SIGSEGV\)"),
                          ("signal:sig=KILL,rank=2,step=3", 6, r"rank 2: killed by signal 9 \(SIGKILL\)"),
                          ("exit:code=0,rank=3,step=3", 1, "rank 3: ended with exit code 0 and no word")][kind]
    words = t.words(2, batch=4, more=["--max-steps", "6", "--nnodes", "2", "--rdzv", "10.77.0.1:29400"])
    job = t.start(words, fault, None, ["unshare", "-rn", sys.executable, str(Path(__file__).with_name("two_hosts.py")), str(t.folder)])
    job.expect_end(code)
    expect((t.folder / "codes").read_text() == f"{code} {code}", f"the hosts' exit codes are {(t.folder / 'codes').read_text()}, wanted {code} of both")
    first, second = ((t.folder / f"host{host}").read_text() for host in (0, 1))
    expect("4 ranks over gloo on 10.77.0.1, 10.77.0.2, " in first, f"host 0 does not say where the ranks are: {first}")
    expect("warning: without --rdzv-id" in first and "ranks meet at 10.77.0.1:29400\n" in first, f"host 0 does not say where ranks meet, and who can: {first}")
    for host, text in enumerate((first, second)):
        last = text.rstrip("\n").splitlines()[-1]
        expect(not error or re.match("detrtrain: error: " + error, last) is not None, f"host {host} ends with '{last}', wanted '{error}'")
