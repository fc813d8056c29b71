"""Rows 13 to 19, 27, 28 and 33: ranks that do not come, come twice, come from elsewhere, or want something else than the others."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

from job import Job, Trial, expect, free_port
from registry import row

START_TIMEOUT_S = 2.0
GONE_S = 2.0


@row(13, "a rank never starts", "s beyond R")
def never_starts(t: Trial) -> float:
    size, port = t.random.choice([2, 3, 4]), free_port()
    missing = t.random.randrange(1, size)   # without rank 0 there is no hub, and nobody who could say who is missing
    begin = time.monotonic()
    ranks = [t.rank_by_hand(rank, size, port, ["--start-timeout", f"{START_TIMEOUT_S:g}"]) for rank in range(size) if rank != missing]
    ranks[0].expect_failure(6, rf"rank {missing}: did not come within the start timeout")
    for rank in ranks[1:]:
        rank.expect_end(6)
    return t.expect_within(max(rank.ended for rank in ranks) - begin - START_TIMEOUT_S, GONE_S)


def expect_all_end_well(ranks: list[Job]) -> None:
    for rank in ranks:
        rank.expect_end(0)


@row(16, "two processes with one rank id")
def twice(t: Trial) -> None:
    port, doubled = free_port(), t.random.randrange(2)
    more = ["--max-steps", "12"]
    slow = "sleep:ms=150,phase=load"   # so that the job is still there when the second one comes
    ranks = [t.rank_by_hand(rank, 2, port, more, slow) for rank in (0, 1)]
    for rank in ranks:
        rank.wait_for(r"^rank \d pid \d+")
    t.pause(0.5)
    second = t.rank_by_hand(doubled, 2, port, more, slow)
    # Rank 0 holds the meeting point, so that a second one finds it taken, by whomever.
    second.expect_failure(2, r".*there is a rank 1 already" if doubled else r".*cannot listen on .*: Address already in use; another rank 0 of this job")
    expect_all_end_well(ranks)


@row(17, "a stranger at the meeting point")
def stranger(t: Trial) -> None:
    port = free_port()
    first = t.rank_by_hand(0, 2, port, ["--max-steps", "3"])
    guests: list[socket.socket] = []
    deadline = time.monotonic() + 30
    while len(guests) < 4:
        expect(time.monotonic() < deadline and first.running(), "rank 0 does not listen")
        try:
            guests.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        except OSError:
            time.sleep(0.01)
    try:
        guests[0].sendall(t.random.randbytes(t.random.randrange(1, 5000)))
        guests[1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        guests[2].close()   # the fourth says nothing, and stays
    except OSError:
        pass   # it has been shown the door
    second = t.rank_by_hand(1, 2, port, ["--max-steps", "3"])
    expect_all_end_well([first, second])
    for guest in guests:
        guest.close()


SETTINGS = [(["--lr", "0.002"], "lr"), (["--seed", "5"], "seed"), (["-u", "clip_max_norm=0.2"], "clip_max_norm"),
            (["--epochs", "7"], "steps of the run"), (["--imgsz", "128"], "size"),
            (["-u", "use_ema=false"], "use_ema"), (["--check-replicas", "5"], "check replicas"), (["--save-every", "7s"], "save every"),
            (["--accum", "2", "--batch-size", "4"], ""), (["another binary"], "binary"),
            (["--freeze", "backbone.conv1"], ""), (["-u", "HybridEncoder.hidden_dim=32"], ""), (["--max-steps", "9"], "steps of the run")]


def another_binary(t: Trial) -> Path:
    """A copy that differs in the linker's identity alone."""
    content = bytearray(t.binary.read_bytes())
    note = content.find(bytes.fromhex("040000001400000003000000") + b"GNU\0")   # name of 4, content of 20, NT_GNU_BUILD_ID
    expect(note >= 0, "the binary has no identity")
    content[note + 16] ^= 1
    copy = t.folder / "another"
    copy.write_bytes(content)
    copy.chmod(0o755)
    return copy


@row(18, "another setting on one rank", "s to the end")
def other_setting(t: Trial) -> float:
    setting, word = SETTINGS[t.number % len(SETTINGS)]
    port = free_port()
    first = t.rank_by_hand(0, 2, port)
    second = t.rank_by_hand(1, 2, port, binary=another_binary(t)) if word == "binary" else t.rank_by_hand(1, 2, port, setting)
    begin = second.started
    first.expect_failure(6, rf"rank \d: .*{word}.*rank [01]")
    second.expect_end(6)
    expect(" step 1 " not in first.err(), "a step was made")
    return t.expect_within(max(first.ended, second.ended) - begin, 5.0)   # start-up is in it


FIELDS = ["/train_dataloader/total_batch_size", "/accum", "training data", "/seed", "version", "binary", "ranks", "engine", "device", "compute dtype",
          "steps of an epoch", "steps of the run", "warm-up", "overfit", "save every", "check replicas every", "class", "validation data", "collectives",
          "/optimizer/lr", "/HybridEncoder/hidden_dim"]


@row(19, "another seed, batch, data set, ... on one rank", "")
def other_field(t: Trial) -> None:
    field, ranks = FIELDS[t.number % len(FIELDS)], t.random.choice([2, 3])
    rank = t.random.randrange(ranks)
    job = t.train(ranks, ["--seed", "0", "--accum", "1"], fault=f"manifest:field={field},rank={rank}")
    job.expect_failure(6, rf"rank \d: .*{re.escape(field.strip('/').split('/')[-1])}")
    expect(rank == 0 or f"rank {rank}" in job.last_line(), f"rank {rank} is not named")
    expect(" step 1 " not in job.err(), "a step was made")


@row(27, "random delays before collectives", "mismatches")
def delays(t: Trial) -> float:
    ranks, steps = t.random.choice([2, 3]), 6
    faults = []
    for step in range(steps):
        for _ in range(2):
            phase = t.random.choice(["forward", "backward", "reduce", "update"])
            faults.append(f"sleep:ms={t.random.randrange(5, 150)},rank={t.random.randrange(ranks)},step={step},phase={phase}")
    faults.append(f"throw:rank={t.random.randrange(ranks)},step={steps},phase=load")   # for the records that a failure leaves
    job = t.train(ranks, fault=";".join(faults))
    job.expect_failure(1, r"rank \d: DETRTRAIN_FAULT")
    records = [json.loads((t.folder / "run" / "fault" / f"collectives-rank{rank}.json").read_text())["collectives"] for rank in range(ranks)]
    seen = [{call["number"]: (call["tag"], call["phase"], call["bytes"]) for call in record} for record in records]
    common = set.intersection(*(set(one) for one in seen))
    expect(len(common) >= 50, f"the records of the ranks share {len(common)} collectives")
    mismatches = sum(1 for number in common if len({one[number] for one in seen}) > 1)
    expect(mismatches == 0, f"{mismatches} collectives are not the same on all ranks")
    return mismatches


@row(28, "collectives in another order or length", "s to the end")
def disorder(t: Trial) -> float:
    ranks = t.random.choice([2, 3])
    rank, step = t.random.randrange(ranks), t.random.randrange(3)
    if t.number % 3 < 2:
        job = t.train(ranks, ["--comm-timeout", "60"], fault=f"swap:a=0,b=1,rank={rank},step={step}")
        job.expect_failure(6, rf"rank {rank}: bucket 1 of step {step}: slot \d+ of the plan is to be sent where slot \d+ is due")
    else:
        slot = t.random.randrange(2)
        job = t.train(ranks, ["--comm-timeout", "60"], fault=f"short:slot={slot},rank={rank},step={step}")
        job.expect_failure(6, rf"rank {rank}: bucket {slot} of step {step}: slot \d+ of the plan has \d+ values, and \d+ are to be sent")
    expect(f"step {step + 1} epoch" not in job.err(), "the step had a result")
    return t.expect_within(job.ended - job.started, 10.0)   # start-up is in it; found before the engine is called, so nobody waits for T


@row(33, "uneven batches")
def uneven(t: Trial) -> None:
    ranks = t.random.choice([2, 3, 4])
    rank, step = t.random.randrange(ranks), t.random.randrange(1, 8)
    job = t.train(ranks, fault=f"nobatch:rank={rank},step={step}")
    job.expect_failure(6, rf"rank {rank} has no batch at step \d+ of epoch \d+ \({ranks - 1} of {ranks} ranks do\)|rank {rank}: .*no batch")
