"""Rows 23, 24, 30 to 32: values that are not finite, bits that flip, parameters that nothing reaches."""

from __future__ import annotations

import csv
import math
import re

from checkpoint import Checkpoint, differing, expect_finite
from job import Trial, expect
from registry import row

NO_CLIP = ["-u", "clip_max_norm=0"]
STATE = ["model.", "ema.", "optim.exp_avg.", "optim.exp_avg_sq.", "optim.step."]


def a_parameter(t: Trial, checkpoint: Checkpoint) -> str:
    return t.random.choice(checkpoint.parameters())


def exactly(name: str) -> str:
    """A regular expression for the name, without commas and semicolons."""
    return "^" + re.escape(name) + "$"


def train_to(t: Trial, ranks: int, step: int, more: list[str], fault: str = "") -> Checkpoint:
    """Goes on with the run in the folder to the step."""
    t.train(ranks, ["-r", "auto", "--max-steps", str(step), *more], fault=fault).expect_end(0)
    checkpoint = Checkpoint(t.folder / "run" / "last.safetensors")
    expect(checkpoint.step() == step, f"the checkpoint is of step {checkpoint.step()}, wanted {step}")
    return checkpoint


@row(23, "used nowhere, with weight decay", "bits changed")
def used_nowhere(t: Trial) -> float:
    ranks, more = t.random.choice([1, 2, 3]), ["-u", "optimizer.weight_decay=0.1"]
    before = train_to(t, ranks, 2, more)
    name = a_parameter(t, before)
    after = train_to(t, ranks, 4, more, f"drop:step=2-,param={exactly(name)}")
    own = [prefix + name for prefix in STATE if prefix != "ema."]
    changed = differing(before, after, own)
    expect(not changed, f"changed: {changed}")
    others = [prefix + other for prefix in ("model.", "optim.exp_avg.", "optim.step.") for other in before.parameters() if other != name]
    same = len(others) - len(differing(before, after, others))
    expect(same == 0, f"{same} tensors of other parameters have not changed")
    return 0


@row(24, "first used late", "largest error, of the update")
def first_used_late(t: Trial) -> float:
    """AdamW as PyTorch has it: w' = w - lr (m_hat / (sqrt(v_hat) + eps) + decay w), with the parameter's own count of steps."""
    ranks, decay, late = t.random.choice([1, 2, 3]), 0.1, t.random.randrange(3, 8)
    more = [*NO_CLIP, "-u", f"optimizer.weight_decay={decay}", "-u", "print_freq=1", "-u", "lr_warmup_scheduler.warmup_duration=1"]
    name = a_parameter(t, names_of(t))
    fault = f"drop:step=0-{late - 1},param={exactly(name)}"
    before = train_to(t, ranks, late, more, fault)
    expect(before.values("optim.step." + name)[0] == 0, "it has been updated already")
    expect(not any(before.values("optim.exp_avg." + name)), "it has moments already")
    after = train_to(t, ranks, late + 1, more, fault)
    expect(after.values("optim.step." + name)[0] == 1, f"its count of steps is {after.values('optim.step.' + name)[0]}, wanted 1")
    with open(t.folder / "run" / "steps.csv", encoding="utf-8") as file:
        rows = {int(line["step"]): line for line in csv.DictReader(file)}
    lr = float(rows[late + 1]["lr"])
    worst = 0.0
    old, new = before.values("model." + name), after.values("model." + name)
    for w, seen, m, v in zip(old, new, after.values("optim.exp_avg." + name), after.values("optim.exp_avg_sq." + name), strict=True):
        update = lr * (m / (1 - 0.9) / (math.sqrt(v / (1 - 0.999)) + 1e-8))
        wanted = [w - update - lr * d * w for d in (decay, 0.0)]   # norms and biases are not decayed
        rounding = 2e-7 * max(abs(w), abs(update))
        worst = max(worst, (min(abs(seen - x) for x in wanted) - rounding) / max(lr, 1e-12))
    expect(worst <= 1e-4, f"{name}: the update differs from AdamW's by {worst:g} of the learning rate")
    return worst


def names_of(t: Trial) -> Checkpoint:
    """Any checkpoint of the model, for the names in it."""
    t.train(1, ["--max-steps", "1"], output="names").expect_end(0)
    return Checkpoint(t.folder / "names" / "last.safetensors")


@row(30, "NaN in one rank's gradient", "bits changed")
def not_finite_once(t: Trial) -> float:
    ranks = t.random.choice([2, 3])
    before = train_to(t, ranks, 2, [])
    rank, name, value = t.random.randrange(ranks), a_parameter(t, before), t.random.choice(["nan", "inf", "-inf"])
    index = t.random.randrange(len(before.values("model." + name)))
    after = train_to(t, ranks, 3, [], f"set:param={name},index={index},value={value},rank={rank},step=2")
    warned = rf"warning: step 3 is not finite .*first in rank {rank}: gradient of {re.escape(name)}\[{index}\]; images [\d, ]+; skipped"
    job = t.jobs[-1]
    expect(re.search(warned, job.err()) is not None, f"there is no '{warned}'")
    changed = differing(before, after, before.entries)
    expect(not changed, f"{len(changed)} tensors changed in a step that was skipped, first {changed[:3]}")
    again = train_to(t, ranks, 4, [])
    expect(differing(after, again, ["model." + name]) != [], "the next step does nothing")
    return 0


@row(31, "NaN in every step", "steps")
def not_finite_always(t: Trial) -> float:
    ranks, budget, first = t.random.choice([1, 2, 3]), t.random.randrange(0, 5), t.random.randrange(1, 5)
    name = a_parameter(t, names_of(t))
    rank = t.random.randrange(ranks)
    job = t.train(ranks, ["--save-every", "1s", "--max-skips", str(budget)], fault=f"set:param={name},index=0,value=nan,rank={rank},step={first}-")
    where = "" if ranks == 1 else f"rank {rank}: "
    blamed = rf"first in {where}gradient of {re.escape(name)}.*; images [\d, ]+; {budget + 1} such steps in a row"
    job.expect_failure(5, rf"(rank \d: )?step {first + budget + 1} is not finite .*{blamed}")
    expect_finite(t.folder / "run" / "last.safetensors")
    return budget + 1


@row(32, "one bit flipped on one rank", "steps to notice")
def flipped(t: Trial) -> float:
    ranks, period = t.random.choice([2, 3, 4]), t.random.choice([2, 3, 5])
    rank, step, buffer = t.random.randrange(ranks), t.random.randrange(1, 8), t.random.choice(["weights", "weights", "moments", "ema"])
    # Low bits can round away again before anybody looks; in the moving averages a difference also fades, slowly where the ramp of the decay is over.
    bit = t.random.randrange(4 if buffer == "weights" else 16, 23)
    fault = f"flip:buffer={buffer},index={t.random.randrange(500000)},bit={bit},rank={rank},step={step}"
    job = t.train(ranks, ["--check-replicas", str(period), "-u", "ema.warmups=1"], fault=fault)
    who = rf"rank {rank} differs from the others" if ranks > 2 else "(rank 0: )?ranks 0, 1 differ from each other"
    job.expect_failure(6, rf"{who}.* at step \d+")
    found = re.search(r"at step (\d+)", job.last_line())
    assert found is not None
    late = int(found.group(1)) - step
    expect(0 <= late <= period, f"noticed {late} steps later, and it is looked for every {period} steps")
    return late
