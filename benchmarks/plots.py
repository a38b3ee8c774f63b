"""Draw benchmarks/results/*.json to docs/*.svg: the median as a bar or a line, from minimum to maximum beside it.

    python -m benchmarks.plots                       # or: make plots
    python -m benchmarks.plots --folder elsewhere

The same results give the same bytes. Backgrounds are transparent and all colours of middle brightness, so that the
pictures can be read on a light page and on a dark one.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import common

GREY, OURS, OTHERS = "#848d97", "#e8590c", ("#4a90d9", "#2f9e6e", "#b07cd8", "#c9971c", "#5c8a97", "#d46a8c")
TITLES = {
    "launch": "Starting N processes, whole command",
    "launch_first_step": "Starting N processes up to the first step, whole command",
    "throughput": "Training throughput",
    "overhead": "A step of a tiny model, with distributed.py and without",
    "data_path": "Reading and preparing digits",
    "fsdp_memory": "Memory of the largest of N processes",
    "param_server": "Parameter server and DDP",
    "scaling": "Step time of DDP on N processes, measured and by the model",
}
STYLE = {
    "svg.hashsalt": "benchmarks",  # otherwise the names inside the file are drawn at random
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}


def is_ours(name):
    return name in ("ours", "with distributed.py", "whole batches", "checkpoint.save", "measured") or (
        name.startswith(("launch", "hogwild", "sync", "fsdp"))
    )


def spread(rows):
    """Distances from the medians to minima and maxima, as errorbar takes them."""
    return [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]


def bars(ax, rows, unit):
    """rows: {name: summary}."""
    for y, (name, row) in enumerate(rows.items()):
        ax.barh(
            y, row["median"], xerr=spread([row]), color=OURS if is_ours(name) else OTHERS[0], ecolor=GREY, height=0.6
        )
        ax.text(row["max"], y, f"  {row['median']:,.{3 if row['median'] < 100 else 6}g}", va="center")
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.margins(x=0.18)


def lines(ax, rows, unit, x="processes"):
    """rows: {name: {n: summary}}. What is only calculated is dashed."""
    colours = iter(OTHERS)
    for name, row in rows.items():
        ax.errorbar(
            [int(n) for n in row],
            [point["median"] for point in row.values()],
            spread(row.values()),
            fmt="--" if name in ("model", "16 P/N") or x != "processes" else "o:" if "peak" in name else "o-",
            color=OURS if is_ours(name) else next(colours),
            ecolor=GREY,
            markersize=4,
            label=name,
        )
    ax.set_xscale("log", base=2)
    ticks = sorted({int(n) for row in rows.values() for n in row})
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_ylim(0)
    ax.set_xlabel(x)
    ax.set_ylabel(unit)
    ax.grid()
    ax.legend()


def points(values):
    """{n: number} as `lines` takes it."""
    return {n: dict.fromkeys(("median", "min", "max"), value) for n, value in values.items()}


def save(figure, path, title, foot):
    figure.suptitle(title, fontsize="large")
    figure.supxlabel(foot, fontsize="x-small")
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    print(f"drawn to {path}")


def counts(results):
    """The n of every summary in there."""
    for value in results.values():
        if isinstance(value, dict):
            yield from [value["n"]] if "n" in value else counts(value)


def draw(name, record, folder):
    results, unit = record["results"], record["unit"]
    where = ", ".join(record["machine"]["gpus"]) or f"{record['machine']['cores']} CPU cores"
    foot = f"{where}, torch {record['versions']['torch']}, {record['date']}"
    if ns := sorted(set(counts(results))):
        foot += f", n = {ns[0]}" + (f" to {ns[-1]}" if len(ns) > 1 else "")
    title = TITLES.get(name, f"Training stands still for a snapshot of {record.get('megabytes')} MB")
    if name == "fsdp_memory":
        shares = {n: row["16 P/N"] for rows in results.values() for n, row in rows.items()}
        results = {
            f"{strategy}, {what}": points({n: row[what] for n, row in rows.items()})
            for strategy, rows in results.items()
            for what in ("held", "peak")
        }
        results["16 P/N"] = points(shares)
    if name.startswith("launch"):
        results = {what: row for what, row in results.items() if ": " not in what}  # whole commands
    panels = results if name == "throughput" else {"": results}
    is_lines = name.startswith(("launch", "scaling", "fsdp"))
    height = 4 if is_lines else 1.1 + 0.4 * sum(map(len, panels.values()))
    figure, axes = plt.subplots(len(panels), figsize=(8, height), squeeze=False)
    for ax, (heading, rows) in zip(axes[:, 0], panels.items(), strict=True):
        (lines if is_lines else bars)(ax, rows, unit)
        ax.set_title(heading and f"{heading} model", fontsize="medium")
    save(figure, folder / f"{name}.svg", title, foot)
    if "projection" in record:
        draw_projection(record["projection"]["results"], folder / f"{name}_projection.svg")


def draw_projection(rows, path):
    figure, ax = plt.subplots(figsize=(8, 4))
    projected = {
        f"{name}, projected": {n: 100 * row[name]["efficiency"] for n, row in rows.items()} for name in ("DDP", "FSDP")
    }
    lines(ax, {name: points(row) for name, row in projected.items()}, "efficiency in %", "H100 GPUs")
    title = "PROJECTION, not measured: 10⁹ parameters on DGX H100 machines"
    save(figure, path, title, "calculated from published speeds, see benchmarks/scaling.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "docs", help="where to draw")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for path in sorted(common.RESULTS.glob("*.json")):
            record = json.loads(path.read_text())
            if path.stem in TITLES or path.stem.startswith("snapshot_stall"):  # the others are logs and tables
                draw(path.stem, record, args.folder)


if __name__ == "__main__":
    main()
