"""Draw benchmarks/results/*.json to docs/*.svg: the median as a bar or a line, from minimum to maximum beside it.

    python -m benchmarks.plots                       # or: make plots
    python -m benchmarks.plots --folder elsewhere

The same results give the same bytes. Backgrounds are transparent and all colours of middle brightness, so that the
pictures can be read on a light page and on a dark one.
"""

import argparse
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import common

GREY, OURS, OTHERS = "#848d97", "#e8590c", ("#4a90d9", "#2f9e6e", "#b07cd8", "#c9971c", "#5c8a97", "#d46a8c")
TITLES = {
    "launch": "Starting N processes up to the first step, whole command",
    "throughput": "Training throughput",
    "overhead": "A step of a tiny model, with distributed.py and without",
    "data_path": "Reading and preparing digits",
    "fsdp_memory": "Memory of the largest of N processes",
    "param_server": "Parameter server and DDP",
    "scaling": "Step time of DDP on N processes, measured and by the model",
    "transformer": "A transformer on N processes, split in every way",
    "sharing_state": "Adam's state, shared out by ZeRO and FSDP",
    "sharing_talk": "DiLoCo talks every H steps; DDP in all of them",
    "sharing_tokens": "Tokens for each of a block's experts, with the auxiliary loss (0.01) and without",
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
        name.rpartition(": ")[2].startswith(("launch", "hogwild", "sync", "fsdp", "TP", "PP", "CP", "ZeRO", "DiLoCo"))
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
    ax.yaxis.set_inverted(True)
    ax.set_xlabel(unit)
    ax.margins(x=0.18)


def lines(ax, rows, unit, x="processes", dashed=("model", "16 P/N"), bottom=0):
    """rows: {name: {n: summary}}. Dashed is what was not measured at each of these n, and `bottom` the lowest y."""
    colours = itertools.cycle(OTHERS)
    for name, row in rows.items():
        ax.errorbar(
            [int(n) for n in row],
            [point["median"] for point in row.values()],
            spread(row.values()),
            fmt="--" if name in dashed else "o:" if "peak" in name else "o-",
            color=OURS if is_ours(name) else next(colours),
            ecolor=GREY,
            markersize=4,
            label=name,
        )
    ax.set_xscale("log", base=2)
    ticks = sorted({int(n) for row in rows.values() for n in row})
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_ylim(bottom, auto=None)  # plots that share the axis may still need a higher one
    ax.set_xlabel(x)
    ax.set_ylabel(unit)
    ax.grid()
    if len(rows) < 8:
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


# ---- pictures: (heading, function that draws, its arguments) of each plot -------------------------------------------


def bar_panels(name, record):
    results, unit = record["results"], record["unit"]
    if name == "throughput":
        return [(f"{model} model", bars, (rows, unit)) for model, rows in results.items()]
    return [("", bars, (results, unit))]


def line_panels(name, record):
    results = record["results"]
    if name == "fsdp_memory":
        shares = {n: row["16 P/N"] for rows in results.values() for n, row in rows.items()}
        results = {
            f"{strategy}, {what}": points({n: row[what] for n, row in rows.items()})
            for strategy, rows in results.items()
            for what in ("held", "peak")
        }
        results["16 P/N"] = points(shares)
    if name == "launch":
        results = {what: row for what, row in results.items() if ": " not in what}  # whole commands
    return [("", lines, (results, record["unit"]))]


def by_size(results, what, kind=""):
    """{case: {n: what}} of {"kind n: case": {what: summary}}."""
    rows = {}
    for name, row in results.items():
        heading, _, case = name.partition(": ")
        if heading.startswith(kind):
            rows.setdefault(case, {})[heading.rpartition(" ")[2]] = row[what]
    return rows


def transformer_panels(name, record):
    results, bubble = record["results"], "but for the bubble"
    pipeline = by_size(results, "tokens/s", "micro") | {bubble: points(record[f"tokens/s {bubble}"])}
    return [
        ("by width", lines, (by_size(results, "tokens/s", "width"), "tokens/s", "width")),
        ("pipeline", lines, (pipeline, "tokens/s", "micro-batches", (bubble,))),
        *(
            ("one sequence", lines, (by_size(results, what, "length"), what, "length"))
            for what in ("saved MB", "peak MB")
        ),
    ]


def state_panels(name, record):
    columns = next(iter(record["results"].values()))
    return [(what, bars, ({case: row[what] for case, row in record["results"].items()}, "")) for what in columns]


def talk_panels(name, record):
    diloco = {name: row for name, row in record["results"].items() if name.startswith("H ")}
    ddp = {name: row for name, row in record["results"].items() if name not in diloco}
    panels = []
    for what, unit, bottom in (("held-out", "held-out loss, nats per byte", None), ("sent MB", "MB sent", 0)):
        rows = {name: points(values) for name, values in by_size(diloco, what).items()}
        periods = next(iter(rows.values()))
        rows |= {name: points(dict.fromkeys(periods, row[what])) for name, row in ddp.items()}
        panels.append(("", lines, (rows, unit, "H", ddp, bottom)))
    return panels


def token_panels(name, record):
    panels = []
    for heading, steps in record["results"].items():
        shares = zip(*steps.values(), strict=True)  # of each expert
        rows = {f"expert {i}": points(dict(zip(steps, values, strict=True))) for i, values in enumerate(shares)}
        panels.append((heading, lines, (rows, record["unit"], "step")))
    return panels


PANELS = {  # how many beside each other, and whether all have one y axis
    "fsdp_memory": (line_panels, 1, False),
    "launch": (line_panels, 1, False),
    "scaling": (line_panels, 1, False),
    "transformer": (transformer_panels, 2, False),
    "sharing_state": (state_panels, 3, True),
    "sharing_talk": (talk_panels, 2, False),
    "sharing_tokens": (token_panels, 2, True),
}


def draw(name, record, folder):
    make, *layout = PANELS.get(name, (bar_panels, 1, False))
    where = ", ".join(record["machine"]["gpus"]) or f"{record['machine']['cores']} CPU cores"
    foot = f"{where}, torch {record['versions']['torch']}, {record['date']}"
    ns = sorted(set(counts(record["results"])))
    if ns:
        foot += f", n = {ns[0]}" + (f" to {ns[-1]}" if len(ns) > 1 else "")
    title = TITLES.get(name, f"Training stands still for a snapshot of {record.get('megabytes')} MB")
    draw_panels(make(name, record), *layout, folder / f"{name}.svg", title, foot)


def draw_panels(panels, columns, share_y, path, title, foot):
    """All of one kind."""
    if panels[0][1] is lines:
        height = 4 * len(panels) / columns
    else:
        height = 1.1 + 0.4 * sum(len(rows) for _, _, (rows, *_) in panels) / columns
    size = 8 if columns == 1 else 11, height
    figure, axes = plt.subplots(len(panels) // columns, columns, figsize=size, squeeze=False, sharey=share_y)
    for ax, (heading, function, arguments) in zip(axes.flat, panels, strict=True):
        function(ax, *arguments)
        ax.set_title(heading, fontsize="medium")
    save(figure, path, title, foot)


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
