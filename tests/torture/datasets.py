"""Small data sets made from the one that all rows share, and which rank gets which of their images."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint
from job import Trial, expect

Coco = dict[str, Any]


def rewritten(source: Path, folder: Path, change: Callable[[Coco], None]) -> Path:
    """A copy of the data set with `change` applied to its annotation files."""
    shutil.copytree(source, folder)
    for file in (folder / "annotations").glob("*.json"):
        coco = json.loads(file.read_text())
        change(coco)
        file.write_text(json.dumps(coco))
    return folder


def without_boxes(source: Path, folder: Path, images: set[int] | None = None) -> Path:
    """No annotations for the images with these ids; None: for none at all."""

    def change(coco: Coco) -> None:
        coco["annotations"] = [] if images is None else [a for a in coco["annotations"] if a["image_id"] not in images]

    return rewritten(source, folder, change)


def with_images(source: Path, folder: Path, count: int) -> Path:
    """Both splits with `count` images, those of the training split."""
    whole = json.loads((source / "annotations" / "instances_train.json").read_text())
    images = whole["images"][: min(count, len(whole["images"]))]
    expect(len(images) == count, f"the shared data set has {len(images)} images, wanted {count}")
    ids = {image["id"] for image in images}

    def change(coco: Coco) -> None:
        coco["images"] = images
        coco["annotations"] = [a for a in whole["annotations"] if a["image_id"] in ids]

    rewritten(source, folder, change)
    shutil.rmtree(folder / "images" / "val")
    shutil.copytree(source / "images" / "train", folder / "images" / "val")
    return folder


def images_of_ranks(t: Trial, ranks: int, batch: int, steps: int) -> list[dict[int, list[int]]]:
    """For each of the first steps: the ids of the images of each rank. From what is said of steps that are not finite on any of them."""
    t.train(ranks, ["--max-steps", "1"], output="name", batch=batch).expect_end(0)
    name = Checkpoint(t.folder / "name" / "last.safetensors").parameters()[0]
    job = t.train(ranks, ["--max-steps", str(steps), "--max-skips", str(steps)], fault=f"set:param={name},index=0,value=nan", output="who", batch=batch)
    job.expect_end(0)
    found: list[dict[int, list[int]]] = []
    for line in re.findall(r"warning: step \d+ is not finite .*", job.err()):
        parts = re.findall(r"rank (\d+): gradient of [^;]*; images ([\d, ]+)", line)
        found.append({int(rank): [int(image) for image in images.split(",")] for rank, images in parts})
        expect(sorted(found[-1]) == list(range(ranks)), f"'{line}' does not name each rank")
    expect(len(found) == steps, f"{len(found)} of {steps} steps are told to be not finite")
    return found
