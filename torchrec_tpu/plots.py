"""Figures of run records. Drawing only; matplotlib is loaded when the first figure is made."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from torchrec_tpu.report import RunRecord

__all__ = ["plot_run"]


def plot_run(record: RunRecord, path: str | Path, *, smoothing: int = 20) -> None:
    """Writes a PNG: loss of every step at the left, test AUC of every epoch at the right.

    Args:
        record: what to draw; every side gets its line, the plain one dashed on top.
        path: the PNG file.
        smoothing: steps of the moving average that is drawn over the raw losses.
    """
    import matplotlib.figure  # no pyplot: no global state, no display

    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    loss_axes, auc_axes = figure.subplots(1, 2)
    for number, (name, side) in enumerate(record.sides.items()):
        color, dash = f"C{number}", "-" if number == 0 else "--"
        steps = np.arange(1, len(side.losses) + 1)
        loss_axes.plot(steps, side.losses, color=color, alpha=0.15, linewidth=0.8)
        window = min(smoothing, len(side.losses))
        if window:
            average = np.convolve(side.losses, np.ones(window) / window, mode="valid")
            loss_axes.plot(steps[window - 1 :], average, dash, color=color, label=name)
        auc_axes.plot(
            [epoch.epoch for epoch in side.epochs],
            [epoch.test_auc for epoch in side.epochs],
            dash,
            marker="o" if number == 0 else "x",
            color=color,
            label=name,
        )
    loss_axes.set(xlabel="step", ylabel="training loss", title=f"mean over {smoothing} steps")
    auc_axes.set(xlabel="epoch", ylabel="test AUC", title=str(record.recipe["name"]))
    auc_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss_axes, auc_axes):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    Path(path).write_bytes(image.getvalue())
