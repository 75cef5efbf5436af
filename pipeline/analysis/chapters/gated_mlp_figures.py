"""Draw the figures of :mod:`pipeline.analysis.chapters.gated_mlp`. All arrays are tensors on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from pipeline.analysis.style import DIVERGING_COLORS, MAP_COLORS, gap_of, legend_beside, map_grid, mark_query, new_figure
from pipeline.page import BLUE, COLOURS, GREY, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def mixing_maps(
    maps: Sequence[Tensor],
    queries: Sequence[tuple[int, int]],
    labels: Sequence[str],
    groups: Sequence[Sequence[int]],
    signed: bool,
) -> Figure:
    """PosMLP, Fig. 4: a row per layer, a column per channel group; with one group, layer after layer (Fig. 1d).

    Args:
        maps: per layer (groups, window, window); windows and numbers of groups may differ.
        queries: (row, column) within the window, per layer.
        labels: of the layers.
        groups: numbers of the shown groups per layer, from 0.
        signed: whether weights may be negative.
    """
    label = "weight / largest magnitude" if signed else "weight / largest weight"
    limits, colors = ((-1.0, 1.0), DIVERGING_COLORS) if signed else ((0.0, 1.0), MAP_COLORS)
    columns = max(len(each) for each in maps)
    if columns == 1:
        relative = [each[0] / each.abs().max().clamp_min(1e-300) for each in maps]
        return layer_maps(relative, [f"layer {each}" for each in labels], label, limits, colors, queries)
    side = max(each.shape[-1] for each in maps)
    grid = np.full((len(maps), columns, side, side), np.nan)
    for row, each in enumerate(maps):
        index = np.arange(side) * each.shape[-1] // side  # the nearest token: a small window is drawn as large as the others
        shares = (each / each.abs().amax((1, 2), keepdim=True).clamp_min(1e-300)).numpy()
        grid[row, : len(each)] = shares[:, index][:, :, index]
    same = all(each == groups[0] for each in groups)
    figure = map_grid(
        grid,
        labels,
        [str(group + 1) for group in groups[0]] if same else [""] * columns,
        label=label,
        xlabel="Channel group" if same else "Channel groups, evenly chosen",
        ylabel="Layer",
        limits=limits,
        colors=colors,
        cell=min(1.2, max(0.7, 7 / columns)),
    )
    gap = gap_of(side)
    for row, (each, query) in enumerate(zip(maps, queries)):
        scale = side / each.shape[-1]
        places = [(row * (side + gap), column * (side + gap)) for column in range(len(each))]
        mark_query(figure.axes[0], query, places, scale)
        if not same:
            for (top, left), group in zip(places, groups[row]):
                figure.axes[0].text(
                    left, top, str(group + 1), va="top", ha="left", fontsize=6, color="black" if signed else "white"
                )
    return figure


def per_group(
    values: Sequence[Tensor], ylabel: str, stages: Sequence[int | None], reference: Sequence[float] | None = None
) -> Figure:
    """A point per channel group over the layers, and the line of their means (PosMLP, Fig. 8).

    Args:
        values: per layer (groups,); NaN has no point.
        stages: of the layers; a change is marked.
        reference: a value per layer, dashed.
    """
    figure = new_figure(max(5.0, 0.27 * len(values) + 1.0), 3.2)
    axes = figure.add_subplot()
    grouped = max(len(each) for each in values) > 1
    for layer, each in enumerate(values, start=1) if grouped else ():
        spread = np.linspace(-0.22, 0.22, len(each)) if len(each) > 1 else np.zeros(1)
        axes.plot(
            layer + spread, each.numpy(), ".", color=BLUE, alpha=0.45, markersize=4, label="group" if layer == 1 else None
        )
    means = [each.nanmean().item() for each in values]
    axes.plot(
        range(1, len(means) + 1),
        means,
        color="black",
        marker="o",
        markersize=3,
        label="mean of the groups" if grouped else "map",
    )
    if reference is not None:
        pieces = zip(reference, range(1, len(reference) + 1))
        for value, layer in pieces:
            axes.plot([layer - 0.5, layer + 0.5], [value] * 2, "--", color=GREY, label="equal weights" if layer == 1 else None)
    highest = np.nanmax([float(each.nan_to_num(0.0).max()) for each in values] + list(reference or []))
    axes.set_ylim(0, 1.06 * highest or 1.0)
    mark_stages(axes, stages, "stage")
    step = 1 if len(values) <= 12 else 2
    axes.set_xticks(range(1, len(values) + 1, step))
    axes.set_xlim(0.4, len(values) + 0.6)
    axes.grid(axis="y")
    axes.set(xlabel="Layer", ylabel=ylabel)
    legend_beside(axes)
    return figure


def mark_stages(axes: Axes, stages: Sequence[int | None], word: str) -> None:
    """Lines between the stages of layers 1, 2, ..., and their names above. Args: stages: of each layer; None: it has none."""
    for layer, (before, after) in enumerate(zip(stages, stages[1:]), start=1):
        if before != after:
            axes.axvline(layer + 0.5, color="#BBBBBB", linewidth=0.8)
    for stage in dict.fromkeys(each for each in stages if each is not None):
        layers = [layer for layer, each in enumerate(stages, start=1) if each == stage]
        axes.annotate(
            f"{word} {stage}",
            (sum(layers) / len(layers), 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=GREY,
        )


def mixing_rows(parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], labels: Sequence[str], signed: bool) -> Figure:
    """PosMLP, Fig. 7: per layer the maps (N, N) as matrices, and one of their rows as curves.

    Args:
        parts: per layer symbol -> (N, N); as many in each.
        rows: index of the row per layer.
        labels: of the layers.
        signed: whether weights may be negative.
    """
    columns = max(len(each) for each in parts)
    figure = new_figure(2.0 * columns + 4.2, 1.9 * len(parts) + 0.3)
    grid = figure.subplots(len(parts), columns + 1, squeeze=False, width_ratios=[1.0] * columns + [1.9])
    for place, (of_layer, row, label) in enumerate(zip(parts, rows, labels)):
        largest = max(float(each.abs().max()) for each in of_layer.values()) or 1e-12
        image = None
        for axes, (name, matrix) in zip(grid[place], of_layer.items()):
            image = axes.imshow(
                matrix.numpy(),
                interpolation="nearest",
                cmap=DIVERGING_COLORS if signed else MAP_COLORS,
                vmin=-largest if signed else 0.0,
                vmax=largest,
            )
            axes.axhline(row, color="black" if signed else RED, linewidth=0.6)
            axes.set_title(name, fontsize=8)
            axes.set_xticks([0, len(matrix) - 1])
            axes.set_yticks([0, row, len(matrix) - 1])
        grid[place, 0].set_ylabel(f"Layer {label}", fontsize=8)
        if image is not None:
            bar = figure.colorbar(image, ax=grid[place, :columns].tolist(), fraction=0.025, pad=0.01, aspect=18)
            bar.ax.tick_params(labelsize=7)
            bar.ax.locator_params(axis="y", nbins=4)
            bar.ax.ticklabel_format(axis="y", scilimits=(-2, 3))
        axes = grid[place, columns]
        for color, (name, matrix) in zip(COLOURS, of_layer.items()):
            axes.plot(matrix[row].numpy(), color=color, linewidth=1.0, label=name)
        axes.grid()
        axes.set_title(f"row {row}", fontsize=8)
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
        if len(of_layer) > 1:
            legend_beside(axes, fontsize=7)
        if place == len(parts) - 1:
            axes.set_xlabel("key", fontsize=8)
            for each in grid[place, :columns]:
                each.set_xlabel("key", fontsize=8)
    return figure


def bias_maps(biases: Sequence[Tensor], labels: Sequence[str]) -> Figure:
    """PosMLP, Fig. 5: the bias of each token, a map per layer. Args: biases: per layer (window, window); labels: of the layers."""
    titles, maps = [], []
    for bias, label in zip(biases, labels):
        mean, deviation = float(bias.mean()), float(bias.std(correction=0))
        maps.append((bias - mean) / deviation if deviation > 1e-12 * max(abs(mean), 1.0) else bias * 0)
        titles.append(f"layer {label}\n{mean:.2g} ± {deviation:.1g}")
    return layer_maps(maps, titles, "(bias - mean) / deviation", (-2.5, 2.5), DIVERGING_COLORS, extend="both")


def layer_maps(
    maps: Sequence[Tensor],
    titles: Sequence[str],
    label: str,
    limits: tuple[float, float],
    colors: str,
    queries: Sequence[tuple[int, int]] = (),
    extend: Literal["neither", "both"] = "neither",
) -> Figure:
    """A map per layer, one after another, with one colour bar.

    Args:
        maps: (side, side) each; sides may differ.
        titles: one each.
        label: of the colour bar.
        limits: of the colours.
        queries: (row, column) of the patch that each map marks, or none.
        extend: whether values lie beyond the limits.
    """
    columns = min(len(maps), 6 if len(maps) <= 12 else 10 if len(maps) > 24 else 8)
    rows = ceil(len(maps) / columns)
    height = 1.3 + 0.15 * max(title.count("\n") for title in titles)
    figure = new_figure(1.15 * columns + 0.8, height * rows + 0.2)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    image = None
    for axes, each, title in zip(grid.flat, maps, titles):
        image = axes.imshow(each.numpy(), cmap=colors, vmin=limits[0], vmax=limits[1], interpolation="nearest")
        axes.set_title(title, fontsize=7)
    for axes, query in zip(grid.flat, queries):
        mark_query(axes, query)
    assert image is not None
    figure.colorbar(image, ax=grid.ravel().tolist(), label=label, fraction=0.02, pad=0.02, aspect=25, extend=extend)
    return figure
