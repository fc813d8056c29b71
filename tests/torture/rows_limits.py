"""Rows 34 and 39 to 41: sizes that do not divide, and things that run out or go away."""

from __future__ import annotations

import json
import os
import re
import resource
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
    found = {}
    for ranks in (1, 2, 4):
        run = t.folder / f"ranks{ranks}"
        shutil.copytree(t.folder / "base", run)
        # Ends after that evaluation, whose detections would be replaced by the next one's.
        job = t.train(ranks, [*words, "-r", "auto"], output=run.name, data=data, batch=batch, fault=f"throw:phase=load,step={steps},rank=0")
        job.expect_failure(1, r"(rank 0: )?DETRTRAIN_FAULT")
        expect(re.search(rf"3 epochs x {steps} steps( \(.*\))?; batch {batch}\b", job.err()) is not None, f"it does not say that an epoch has {steps} steps")
        rest = count - steps * batch
        expect(rest <= 0 or f"leaves out {rest} of {count} pictures" in job.err(), "it does not say what is left out")
        expect(rest >= 0 or f"has {count} pictures, and takes {-rest} again" in job.err(), "it does not say what comes twice")
        found[ranks] = scores(run / "log.txt"), json.loads((run / "eval" / "predictions.json").read_text())
        expect(len(found[ranks][0]) == 12 and len(found[ranks][1]) >= count, f"{len(found[ranks][0])} scores of {len(found[ranks][1])} detections")
        expect(found[ranks] == found[1], f"the scores of {ranks} ranks are {found[ranks][0]}, of one process {found[1][0]}; or their detections differ")
    for ranks in (2, 4):
        job = t.train(ranks, words, output=f"whole{ranks}", data=data, batch=batch)
        job.expect_end(0)
        expect(f"at step {3 * steps}" in job.err(), f"it has not made {3 * steps} steps")


@row(39, "descriptors or memory run out")
def out_of_things(t: Trial) -> None:
    ranks, kind = t.random.choice([2, 3]), t.number % 4
    if kind == 0:
        job = t.train(ranks, files=(32, 32))
        job.expect_failure(2, rf"the limit of open files is 32, and {ranks} ranks need \d+")
    elif kind == 2:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        t.train(ranks, ["--max-steps", "2"], files=(32, most)).expect_end(0)
    else:
        # The first allocations are the model's, later ones a step's; after some steps there are none.
        rank = t.random.randrange(ranks)
        job = t.train(ranks, ["--max-steps", "20"], fault=f"allocfail:n={t.random.randrange(1, t.random.choice([10, 400]))},rank={rank}")
        job.expect_failure(4, rf"rank {rank}: out of memory on cpu: \d+ bytes asked, \d+ in use")


@row(40, "more ranks than cores", "steps/s")
def many_ranks(t: Trial) -> float:
    ranks, steps = 8, 4
    job = t.train(ranks, ["--max-steps", str(steps), "--check-replicas", "2"])
    job.wait_until_it_trains()
    job.expect_end(0)
    expect(re.search("while others wait|no sign of life", job.err()) is None, "a warning of a stall")
    return steps / (job.ended - job.started)


@row(41, "an image vanishes or is cut short")
def image_vanishes(t: Trial) -> None:
    ranks = t.random.choice([2, 3])
    images = json.loads((t.data / "annotations" / "instances_train.json").read_text())["images"]
    names = {image["id"]: image["file_name"] for image in images}
    steps = len(images) // ranks
    owners = images_of_ranks(t, ranks, ranks, steps)
    forgiven, vanishes = t.number % 3 > 0, t.random.random() < 0.5
    # One image may always be bad, whichever rank reads it; the last ones of the epoch have not been read when the first step is done.
    victims = [owners[step][t.random.randrange(ranks)][0] for step in ([-1] if forgiven else [-1, -2])]
    hashes = []
    for attempt in range(2 if forgiven else 1):
        data = rewritten(t.data, t.folder / f"data{attempt}", lambda coco: None)
        job = t.train(ranks, ["--max-steps", str(steps + 1)], data=data, output=f"run{attempt}", fault=paced(200))
        job.wait_until_it_trains()
        for file in [data / "images" / "train" / names[victim] for victim in victims]:
            whole = file.read_bytes()
            os.unlink(file)
            if not vanishes:
                file.write_bytes(whole[: len(whole) // 2])
        if not forgiven:
            job.expect_failure(3, rf"rank \d: 2 of {len(images)} images cannot be read, more than data.max_bad_share allows")
            return
        hashes.append(hash_at_end(job))
        expect(re.search(rf"warning: image {victims[0]} left out: ", job.err()) is not None, f"image {victims[0]} is not named")
    expect(hashes == [hashes[0]] * 2, f"the same image lost twice gives the state hashes {hashes}")
