"""Rows 34 and 39 to 41: sizes that do not divide, and things that run out or go away."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

from datasets import images_of_ranks, rewritten, with_images
from job import Trial, expect
from registry import row
from runs import hash_at_end, paced


def scores(log: Path) -> list[float]:
    """The twelve numbers of the first epoch."""
    with open(log, encoding="utf-8") as file:
        return json.loads(file.readline())["test_coco_eval_bbox"]


@row(34, "awkward sizes")
def awkward_sizes(t: Trial) -> None:
    count, batch = [1, 3, 21][t.number % 3], 4
    data = with_images(t.data, t.folder / "data", count)
    steps = max(1, count // batch)
    words = ["--epochs", "3", "--eval-every", "1"]
    # A run that stops inside its first evaluation: those that go on from there score the same weights.
    base = t.train(1, [*words, "-u", "print_freq=1"], output="base", data=data, batch=batch, fault="sleep:ms=2000,phase=eval")
    base.wait_for(rf" step {steps} epoch 0 {steps}/{steps} ")
    base.send(signal.SIGTERM)
    base.expect_end(75)
    results = {}
    for ranks in (1, 2, 4):
        shutil.copytree(t.folder / "base", t.folder / f"ranks{ranks}")
        job = t.train(ranks, [*words, "-r", "auto"], output=f"ranks{ranks}", data=data, batch=batch)
        job.expect_end(0)
        expect(f"3 epochs x {steps} steps; batch {batch}" in job.err(), f"it does not say that an epoch has {steps} steps")
        expect(f"at step {3 * steps}" in job.err(), f"it has not made {3 * steps} steps")
        results[ranks] = scores(t.folder / f"ranks{ranks}" / "log.txt")
        expect(len(results[ranks]) == 12 and results[ranks] == results[1], f"the scores of {ranks} ranks are {results[ranks]}, of one process {results[1]}")


@row(39, "descriptors or memory run out")
def out_of_things(t: Trial) -> None:
    ranks, kind = t.random.choice([2, 3]), t.number % 3
    if kind == 0:
        job = t.train(ranks, files=(32, 32))
        job.expect_failure(2, rf"the limit of open files is 32, and {ranks} ranks need \d+")
    elif kind == 1:
        t.train(ranks, ["--max-steps", "2"], files=(32, 4096)).expect_end(0)
    else:
        rank = t.random.randrange(ranks)
        job = t.train(ranks, ["--max-steps", "20"], fault=f"allocfail:n={t.random.randrange(1, 400)},rank={rank}")
        job.expect_failure(4, rf"rank {rank}: ")


@row(40, "more ranks than cores", "steps/s")
def many_ranks(t: Trial) -> float:
    ranks, steps = 8, 4
    job = t.train(ranks, ["--max-steps", str(steps), "--check-replicas", "2"])
    job.wait_until_it_trains()
    job.expect_end(0)
    expect("while others wait" not in job.err(), "a warning of a stall")
    return steps / (job.ended - job.started)


@row(41, "an image vanishes or is cut short")
def image_vanishes(t: Trial) -> None:
    ranks = t.random.choice([2, 3])
    steps = len(json.loads((t.data / "annotations" / "instances_train.json").read_text())["images"]) // ranks
    owners = images_of_ranks(t, ranks, ranks, steps)
    victim = t.random.choice([image for images in owners[-1].values() for image in images])
    names = {image["id"]: image["file_name"] for image in json.loads((t.data / "annotations" / "instances_train.json").read_text())["images"]}
    forgiving, vanishes = t.number % 3 > 0, t.random.random() < 0.5
    hashes = []
    for attempt in range(2 if forgiving else 1):
        data = rewritten(t.data, t.folder / f"data{attempt}", lambda coco: None)
        more = ["--max-steps", str(steps + 1), "-u", "data.max_bad_share=0.1"] if forgiving else []
        job = t.train(ranks, more, data=data, output=f"run{attempt}", fault=paced(200))
        job.wait_until_it_trains()
        file = data / "images" / "train" / names[victim]
        whole = file.read_bytes()
        os.unlink(file)
        if not vanishes:
            file.write_bytes(whole[: len(whole) // 2])
        if not forgiving:
            job.expect_failure(3, rf"rank \d: .*{re.escape(names[victim])}")
            return
        hashes.append(hash_at_end(job))
        expect(re.search(rf"warning: image {victim} left out: ", job.err()) is not None, f"image {victim} is not named")
    expect(len(set(hashes)) == 1, f"the same loss of an image gives the state hashes {hashes}")
