"""Criteo files of our own making: the format of the real ones, none of their data."""

import gzip
from pathlib import Path

import numpy as np


def criteo_lines(num: int, *, seed: int = 0, separator: str = "\t") -> list[str]:
    """Lines with the quirks of the real files: blanks, negatives, hexadecimal categories."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(num):
        dense = [str(x) if x >= -2 else "" for x in rng.integers(-4, 40_000, 13)]
        categories = ["" if rng.random() < 0.1 else f"{x:08x}" for x in rng.integers(0, 2**32, 26)]
        lines.append(separator.join([str(rng.integers(2)), *dense, *categories]))
    return lines


def write_criteo(path: Path, lines: list[str], *, header: bool = False) -> Path:
    if header:
        names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        lines = [",".join(names), *lines]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
