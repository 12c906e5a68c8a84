"""Groups of bars, for tables that are easier to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def bars(file: Path, unit: str, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a picture of one group of bars for each label, with one bar of each series in it; NaN leaves a bar out.

    Args:
        file: where to; its folder is made.
        unit: what the bars' height means.
        labels: under the groups.
        series: by name, one value for each label.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 * len(labels) + 2), 4.5))
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(labels))]
        axes.bar_label(axes.bar(places, values, width, label=name), fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel(unit)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
