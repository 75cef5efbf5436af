"""Put the analyses of several models on one page: in one plot what the papers compare (PerViT, Fig. 5 and 7 right, S4 and S8; ConViT,
Fig. 5, 10 and 13). It is made of what each model's ``analysis.json`` has, so that a figure here repeats its numbers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.analysis.chapter import Findings, Plot
from pipeline.analysis.measures import REGIONS
from pipeline.analysis.pervit import NAMES, REGION_COLOURS
from pipeline.analysis.style import Figure, legend_beside, new_figure, patches_beside
from pipeline.page import COLOURS, shade
from pipeline.runs import METRICS
from pipeline.runs.rows import is_number, read_metrics

_MEANS = "A line is the mean of the heads of a layer, one colour for each model."
_OMEGA = f"in coordinates that go from -1 to 1 over a side. {_MEANS} The axis on the right is in patches where all grids are of one size."
# Name of a figure -> title, source, measure, axis label, caption.
_CURVES = {
    "nonlocality_attention": ("Nonlocality of the attention", "PerViT, Fig. S4 left, S8", "nonlocality.attention", "$\\Omega_a$",
        f"How far Φa attends, {_OMEGA}"),
    "nonlocality_phi_p": ("Nonlocality of the position-based attention", "PerViT, Fig. S8", "nonlocality.phi_p", "$\\Omega_p$",
        f"How far Φp attends, {_OMEGA}"),
    "impact_phi_p": ("Impact of position", "PerViT, Fig. 7 right, S4 right", "impact.phi_p", "$\\Psi_p$",
        f"The inverse distance of Φa from Φp. {_MEANS} Heads whose impact is infinite are left out."),
    "impact_phi_c": ("Impact of content", "PerViT, Fig. 7 right, S4 middle", "impact.phi_c", "$\\Psi_c$",
        f"The inverse distance of Φa from Φc. {_MEANS} Heads whose impact is infinite are left out."),
    "attention_distance": ("Mean attention distance", "ConViT, Eq. 8; Fig. 5, 10 and 13 at the end of the training", "mean_attention_distance",
        "distance in patches", f"How far from the query a head looks. {_MEANS}"),
    "gates": ("Gates", "ConViT, Fig. 6 and 14 at the end of the training", "gate", "$\\sigma(\\lambda)$",
        f"1 attends by position alone, 0 by content alone. {_MEANS}"),
}  # fmt: skip


def model_names(checkpoints: Sequence[str], models: Sequence[str]) -> list[str]:
    """A name for each model, which is its folder's too: of its run, or with a number where several have that."""
    paths = [Path(source).resolve() if Path(source).exists() else None for source in checkpoints]
    known = [path.stem if path and path.is_file() else path.name if path else text for path, text in zip(paths, checkpoints)]
    stems = [re.sub(r"[^\w-]+", "_", name) for name in known]  # a dot would part a measure's name
    stems = [stem if re.search(r"\w", stem) else model for stem, model in zip(stems, models)]
    return [f"{stem}_{stems[:number].count(stem) + 1}" if stems.count(stem) > 1 else stem for number, stem in enumerate(stems)]


def compared(results: Mapping[str, dict[str, Any]]) -> Findings:
    """The figures of several models. Args: results: name -> what its ``analysis.json`` has."""
    found, colors = Findings(), dict(zip(results, COLOURS * 9))
    for name, (title, source, measure, label, caption) in _CURVES.items():
        values = {model: means for model, result in results.items() if (means := _layer_means(result, measure)) is not None}
        units = {result["measures"].get("patches_per_unit") for model, result in results.items() if model in values}
        per_unit = units.pop() if measure.startswith("nonlocality") and len(units) == 1 else None
        plot = Plot(caption, partial(_lines, values, colors, label, per_unit), title, name=name, source=source)
        _add(found, results, plot, measure, name, values, "[layer], mean of the heads")
    counts = {model: c["model"] for model, result in results.items() if (c := result["measures"].get("region_counts"))}
    shares = {model: [100 * count / sum(of) for count in of] for model, of in counts.items()}
    caption = "Share of the heads, and of the other layers, which count as central, in each region of the visual field."
    plot = Plot(caption, partial(_bars, shares), "Peripheral regions", name="regions", source="PerViT, Fig. 5")
    unit = f"[{'|'.join(REGIONS)}], percent of the heads and other layers"
    _add(found, results, plot, "regions", "region_shares", shares, unit)
    _over_training(results, found)
    return found


def _add(
    found: Findings, results: Mapping[str, Any], plot: Plot, measure: str, name: str, values: Mapping[str, Any], unit: str
) -> None:
    """Add a figure of the models that have its values, which are recorded under a name, and say why the others have none."""
    reasons = {model: _reason(result, plot.name, measure) for model, result in results.items() if model not in values}
    lacking = {why: ", ".join(model for model in reasons if reasons[model] == why) for why in reasons.values()}
    for model, value in values.items():
        found.measure(f"{name}.{model}", value, unit)
    if values:
        without = "".join(f" Without {who}: {why}" for why, who in lacking.items())
        found.plots.append(replace(plot, caption=plot.caption + without))
    else:
        found.omitted[plot.name] = "No model has it. " + " ".join(f"{who}: {why}" for why, who in lacking.items())


def _layer_means(result: dict[str, Any], measure: str) -> list[float] | None:
    """[layer], means over heads of what is finite; None if the model does not have the measure."""
    value: Any = result["measures"]
    for part in measure.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else [_mean(heads) for heads in value]


def _mean(heads: Sequence[float | None] | None) -> float:
    finite = [float(head) for head in heads or () if head is not None]
    return float(np.mean(finite)) if finite else float("nan")


def _reason(result: dict[str, Any], name: str, measure: str) -> str:
    """Why a model has no such measure: what its own analysis says of the figure that shows it."""
    for key in (name, measure.partition(".")[0], measure.rpartition(".")[2]):
        if key in result["omitted"]:
            return str(result["omitted"][key])
    return "it has no such quantity."


def _lines(values: Mapping[str, Sequence[float]], colors: Mapping[str, str], label: str, per_unit: float | None) -> Figure:
    figure = new_figure(7.0, 3.6)
    axes = figure.add_subplot()
    for model, means in values.items():
        axes.plot(range(1, len(means) + 1), means, color=colors[model], marker="o", markersize=3, label=model)
    longest = max(map(len, values.values()))
    axes.set(xlabel="Layer", ylabel=label, xticks=range(1, longest + 1, 2 if longest > 16 else 1))
    axes.set_ylim(0, 1.08 * float(np.nanmax(np.concatenate(list(values.values())))) or None)
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.1, ncols=3)
    return patches_beside(figure, per_unit) if per_unit else figure


def _bars(shares: Mapping[str, Sequence[float]]) -> Figure:
    figure = new_figure(7.0, 0.9 + 0.45 * len(shares))
    axes, left = figure.add_subplot(), np.zeros(len(shares))
    for name, color, values in zip(NAMES.values(), REGION_COLOURS, np.array(list(shares.values())).T):
        bars = axes.barh(list(shares), values, 0.7, left=left, color=color, label=name)
        axes.bar_label(bars, [f"{value:.0f}" if value >= 4 else "" for value in values], label_type="center", fontsize=7)
        left = left + values
    axes.invert_yaxis()
    axes.set(xlabel="percent", xlim=(0, 100))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.1, ncols=4)
    return figure


def _over_training(results: Mapping[str, dict[str, Any]], found: Findings) -> None:
    """Attention distance by epoch, a panel for each run with ``eval.analyses`` (ConViT, Fig. 5, 10 and 13)."""
    panels, name = {}, "attention_distance_over_training"
    for model, result in results.items():
        file = Path(result["origin"]["checkpoint"]) / METRICS
        rows = read_metrics(file).analyses if file.is_file() else []
        points = [
            (row["epoch"] if is_number(row.get("epoch")) else row["step"], [_mean(heads) for heads in layers])
            for row in rows
            if (layers := row["analysis"].get("mean_attention_distance"))
        ]
        if points:
            panels[model] = points
    missing = [model for model in results if model not in panels]
    if not panels:
        found.omitted[name] = "No model is a run folder that was trained with eval.analyses."
        return
    for model, points in panels.items():
        found.measure(f"{name}.{model}", points, "[evaluation], epoch and [layer] mean of the heads, patches")
    without = f" Without {', '.join(missing)}: not a run folder with rows of eval.analyses." if missing else ""
    caption = f"How far from the query the heads of each layer look in the course of the training, mean of the heads, one panel per run.{without}"
    draw, source = partial(_panels, panels), "ConViT, Fig. 5, 10 and 13"
    found.plots.append(Plot(caption, draw, "Mean attention distance in training", name=name, source=source))


def _panels(panels: Mapping[str, Sequence[tuple[float, Sequence[float]]]]) -> Figure:
    figure = new_figure(min(12.0, 1.2 + 3.4 * len(panels)), 3.2)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (model, points) in zip(grid, panels.items()):
        epochs, layers = [epoch for epoch, _ in points], np.array([values for _, values in points]).T  # (layers, evaluations)
        for number, values in enumerate(layers):
            axes.plot(epochs, values, color=shade(number / max(1, len(layers) - 1)), marker=".", label=f"{number + 1}")
        axes.set(xlabel="Epoch", title=model)
        axes.grid(axis="y")
    grid[0].set_ylabel("distance in patches")
    legend_beside(grid[-1], title="Layer", fontsize=7)
    return figure
