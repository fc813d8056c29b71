"""Reads checkpoints (safetensors) and compares what is in them."""

from __future__ import annotations

import array
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path

from job import expect


class Checkpoint:
    """The tensors of a file, as bytes or numbers."""

    def __init__(self, file: Path) -> None:
        self.bytes = file.read_bytes()
        (length,) = struct.unpack("<Q", self.bytes[:8])
        header: dict[str, dict] = json.loads(self.bytes[8 : 8 + length])
        self.metadata: dict[str, str] = header.pop("__metadata__")  # type: ignore[assignment]
        self.entries = header
        self.begin = 8 + length

    def raw(self, name: str) -> bytes:
        first, last = self.entries[name]["data_offsets"]
        return self.bytes[self.begin + first : self.begin + last]

    def values(self, name: str) -> array.array:
        """f32, f64 or i64."""
        code = {"F32": "f", "F64": "d", "I64": "q"}[self.entries[name]["dtype"]]
        numbers = array.array(code)
        numbers.frombytes(self.raw(name))
        return numbers

    def names(self, prefix: str) -> list[str]:
        """What follows the prefix, of the names that have it."""
        return sorted(name.removeprefix(prefix) for name in self.entries if name.startswith(prefix))

    def parameters(self) -> list[str]:
        """The trained ones."""
        return self.names("optim.exp_avg.")

    def step(self) -> int:
        return int(json.loads(self.metadata["state"])["step"])


def differing(a: Checkpoint, b: Checkpoint, names: Iterable[str]) -> list[str]:
    """The names whose bits are not the same in both."""
    return [name for name in names if a.raw(name) != b.raw(name)]


def expect_same_state(a: Path, b: Path) -> None:
    x, y = Checkpoint(a), Checkpoint(b)
    expect(x.entries.keys() == y.entries.keys(), "the checkpoints hold different tensors")
    unequal = differing(x, y, x.entries)
    expect(not unequal, f"{len(unequal)} tensors differ, first {unequal[:3]}")
    expect(x.metadata["state"] == y.metadata["state"], "the counters differ: ", x.metadata["state"], " and ", y.metadata["state"])


def expect_finite(file: Path) -> None:
    checkpoint = Checkpoint(file)
    for name in checkpoint.entries:
        expect(all(map(math.isfinite, checkpoint.values(name))), f"{file.name}: {name} is not finite")


def norm(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


class Gradient:
    """The gradient of a run's first step without clipping, from the first moments: they are (1 - 0.9) of it."""

    def __init__(self, file: Path) -> None:
        checkpoint = Checkpoint(file)
        expect(checkpoint.step() == 1, f"{file}: at step {checkpoint.step()}, wanted 1")
        self.of = {name: [10 * v for v in checkpoint.values("optim.exp_avg." + name)] for name in checkpoint.parameters()}

    def norm(self) -> float:
        return norm(v for values in self.of.values() for v in values)


def gradient_error(a: Gradient, b: Gradient) -> float:
    """Largest difference in any tensor, relative to the tensor's norm in b; tensors with less than a thousandth of the whole, to that."""
    least = 1e-3 * b.norm()
    return max(norm(x - y for x, y in zip(a.of[name], b.of[name], strict=True)) / max(norm(b.of[name]), least) for name in b.of)
