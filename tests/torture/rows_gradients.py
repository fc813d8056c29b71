"""Rows 20 to 22, 29 and 43: several ranks compute what one process computes, whatever a rank's images and its loss leave out."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from checkpoint import Checkpoint, Gradient, gradient_error, norm
from datasets import images_of_ranks, without_boxes
from job import Skip, Trial, expect
from registry import row

MOST = 1e-5   # relative, f32
ONE_STEP = ["--max-steps", "1", "-u", "clip_max_norm=0", "-u", "print_freq=1"]


def gradient(t: Trial, ranks: int, batch: int, output: str, fault: str = "", data: Path | None = None) -> Gradient:
    t.train(ranks, ONE_STEP, output=output, batch=batch, fault=fault, data=data).expect_end(0)
    return Gradient(t.folder / output / "last.safetensors")


def first_loss(t: Trial, output: str) -> float:
    with open(t.folder / output / "steps.csv", encoding="utf-8") as file:
        return float(next(csv.DictReader(file))["loss"])


@row(20, "a rank without boxes", "relative error of the gradient")
def one_without_boxes(t: Trial) -> float:
    ranks = 2 + t.number % 2
    batch = 2 * ranks
    empty = t.number // 2 % ranks
    owners = images_of_ranks(t, ranks, batch, 1)[0]
    data = without_boxes(t.data, t.folder / "data", set(owners[empty]))
    several, one = (gradient(t, n, batch, f"ranks{n}", data=data) for n in (ranks, 1))
    expect(one.norm() > 0, "the gradient is zero")
    error = gradient_error(several, one)
    expect(error <= MOST, f"the gradient of {ranks} ranks, where rank {empty} has no boxes, differs by {error:.2g} from that of one process")
    return error


@row(21, "all ranks without boxes", "relative error of the loss")
def all_without_boxes(t: Trial) -> float:
    ranks = t.random.choice([2, 3, 4])
    batch = ranks * t.random.randrange(1, 3)
    data = without_boxes(t.data, t.folder / "data")
    several, one = (gradient(t, n, batch, f"ranks{n}", data=data) for n in (ranks, 1))
    a, b = first_loss(t, f"ranks{ranks}"), first_loss(t, "ranks1")
    error = abs(a - b) / abs(b)
    expect(error <= MOST, f"the loss of {ranks} ranks is {a}, that of one process {b}")
    off = gradient_error(several, one)
    expect(off <= MOST, f"the gradient differs by {off:.2g}")
    t.train(ranks, ["--max-steps", "4"], output="more", batch=batch, data=data).expect_end(0)
    return error


ALL_BUT_THE_FIRST = "param=^(?!backbone.conv1.conv1_1.conv.weight$)"   # so that each layer's backward is needed


@row(22, "random unused parameters", "relative error of the gradient")
def random_unused(t: Trial) -> float:
    ranks, steps = t.random.choice([2, 3, 4]), 8
    long = t.train(ranks, ["--max-steps", str(steps), "--check-replicas", "2"], output="long", fault=f"drop:p=0.3,seed={t.random.randrange(1 << 30)}")
    long.expect_end(0)

    # What each of two ranks contributes, and then which of that is in the sum. The stem is left out: without a wish for its gradient a rank has
    # no need for that of the layers' statistics.
    own = [gradient(t, 2, 4, f"only{rank}", f"drop:{ALL_BUT_THE_FIRST},rank={1 - rank}") for rank in (0, 1)]
    mixed = gradient(t, 2, 4, "mixed", f"drop:p=0.3,seed={t.random.randrange(1 << 30)}")
    updates = Checkpoint(t.folder / "mixed" / "last.safetensors")
    names = [name for name in mixed.of if not name.startswith("backbone.conv1.")]
    least = 1e-3 * norm(v for one in own for values in one.of.values() for v in values)
    worst, counts = 0.0, {(a, b): 0 for a in (0, 1) for b in (0, 1)}
    for name in names:
        seen, parts = mixed.of[name], [one.of[name] for one in own]
        scale = max(norm(parts[0]), norm(parts[1]), least)
        errors = {(a, b): norm(s - a * x - b * y for s, x, y in zip(seen, *parts, strict=True)) / scale for a, b in counts}
        chosen = min(errors, key=lambda pair: errors[pair])
        worst = max(worst, errors[chosen])
        if not any(seen):
            chosen = (0, 0)
        counts[chosen] += 1
        used = updates.values("optim.step." + name)[0]
        if norm(parts[0]) > least and norm(parts[1]) > least:
            expect(used == (0 if chosen == (0, 0) else 1), f"{name}: {used} updates with the contributions {chosen}")
    expect(worst <= MOST, f"a gradient is {worst:.2g} away from any sum of the ranks' contributions")
    for (a, b), count in counts.items():
        share, wanted = count / len(names), (0.7 if a else 0.3) * (0.7 if b else 0.3)
        expect(abs(share - wanted) < 0.15, f"the contributions {(a, b)} are in {share:.2f} of the gradients, wanted about {wanted:.2f}")
    return worst


BRANCHES = ["^encoder", "^encoder.pan_blocks.1", "^backbone.res_layers.3", "^decoder", "norm.weight", "^backbone", "bias", "."]


@row(29, "branches missing between shared statistics")
def missing_branch(t: Trial) -> None:
    ranks = t.random.choice([2, 3])
    branch, rank = BRANCHES[t.number % len(BRANCHES)], t.random.randrange(ranks)
    fault = f"drop:param={branch},rank={rank}" + (f";constloss:rank={rank},step=2" if t.number // len(BRANCHES) % 2 else "")
    t.train(ranks, ["--max-steps", "4", "--check-replicas", "1"], fault=fault).expect_end(0)


@row(43, "the recipe with ResNet-101 on three ranks", "relative error of the loss")
def frozen_stem(t: Trial) -> float:
    """The stem is frozen, so that the first shared statistics have an input that needs no gradient; some pictures have no boxes."""
    if memory_available() < 12 << 30:
        raise Skip("12 GiB of memory")
    data = t.folder / "data"
    synth = ["synth", "--out", str(data), "--images", "9", "--classes", "80", "--size", "96x96", "--max-boxes", "3", "--empty-frac", "0.5", "--seed", "3"]
    t.start(synth).expect_end(0)
    found = {}
    for ranks in (3, 1):
        words = ["train", "-c", "rtdetrv2_r101vd_6x_coco", "-d", "cpu", "--data", str(data), "--output-dir", str(t.folder / f"ranks{ranks}"), "--imgsz", "96", "--batch-size", "3",
                 "--epochs", "1", "--num-workers", "1", "--threads", "1", "--comm-timeout", "60", "--start-timeout", "120", "-u", "RTDETRTransformerv2.num_queries=60", "-u", "print_freq=1"]
        job = t.start(words + (["--ranks", str(ranks)] if ranks > 1 else []))
        job.expect_end(0)
        model = re.search(r"model     .*", job.err())
        expect(model is not None and "frozen: 3 tensors, 28512 values" in model.group(0), "the convolutions of the stem are not frozen")
        expect("Average Precision" in job.out() and "at step 2" in job.err(), "it was not evaluated after two steps")
        found[ranks] = model.group(0), Checkpoint(t.folder / f"ranks{ranks}" / "last.safetensors").parameters(), first_loss(t, f"ranks{ranks}")
    expect(found[3][:2] == found[1][:2], f"three ranks have another model: {found[3][0]}, one process: {found[1][0]}")
    error = abs(found[3][2] - found[1][2]) / abs(found[1][2])
    expect(error <= MOST, f"the loss of three ranks is {found[3][2]}, that of one process {found[1][2]}: their layers are not the same")
    return error


def memory_available() -> int:
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found.group(1)) << 10 if found else 0
