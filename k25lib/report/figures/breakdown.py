"""Figures of a decode step from a trace: its time by category, its lanes, its kernels, and waiting for other ranks."""

import pandas as pd
import plotly.graph_objects as go

from k25lib.report.figures.style import colour, empty, largest_first, layout, top_to_bottom
from k25lib.report.tables import over_ranks
from k25lib.trace.breakdown import fold

MOST_RANKS = 4  # of more, figures of the step show the lowest rank and those with least and most kernel time
_IDLE = ("#C9C9C9", "#DDDDDD", "#EEEEEE")
_WAIT, _TRANSFER = "#C44E52", "#72B7B2"


def step(categories, steps):
    """A decode step of each capture and rank twice: its kernels by category, and its wall time, busy and idle.

    categories: columns capture, rank, category, ms. steps: capture, rank, kernel_sum_ms, busy_ms, idle_in_graph_ms,
    idle_in_step_ms, idle_between_ms; means per decode step. Where the first bar is longer than busy, kernels overlap.
    """
    figure = go.Figure()
    if categories.empty or steps.empty:
        return _nothing(figure, "A decode step: kernels by category, and wall time")
    steps = steps[
        [rank in _telling(steps, capture) for capture, rank in zip(steps["capture"], steps["rank"], strict=True)]
    ]
    categories = categories.merge(steps[["capture", "rank"]])
    kernels, wall = _label(categories) + ": kernels", _label(steps) + ": wall"
    for category in largest_first(categories, "category", "ms"):
        mine = categories["category"] == category
        figure.add_bar(**_bar(category, kernels[mine], categories["ms"][mine], colour(category)))
    figure.add_bar(**_bar("busy", wall, steps["busy_ms"], "#6B7F99"))
    idle = (("idle_in_graph_ms", "idle in a graph"), ("idle_in_step_ms", "idle between launches"))
    for (column, name), shade in zip((*idle, ("idle_between_ms", "idle between steps")), _IDLE, strict=True):
        figure.add_bar(**_bar(name, wall, steps[column].fillna(0).clip(lower=0), shade))
    names = [name for pair in zip(dict.fromkeys(kernels), dict.fromkeys(wall), strict=False) for name in pair]
    entries = 4 + categories["category"].nunique()
    height_px, top = 190 + 44 * len(names) + 20 * (entries // 5), {"t": 70 + 22 * (1 + entries // 4)}
    title = "A decode step: kernels by category, and wall time"
    figure.update_layout(**layout(title, height_px, margin=top, barmode="stack"))
    top_to_bottom(figure, names)
    return figure.update_xaxes(title="ms per decode step")


def groupings(frame, published, categories=None):
    """The kernel time of each capture's lowest rank by both published groupings, beside the published figures.

    frame: columns capture, rank, batch, category, ms, calls, percent, in the fine grouping. published: a file of
    data/reference. categories: a file of own rules. One stacked bar each, in percent of its kernel time.
    """
    figure = go.Figure()
    title = "Kernel time by the published groupings"
    if frame.empty:
        return _nothing(figure, title)
    rows = []
    for group in ("operation", "role"):
        for capture, mine in frame.groupby("capture", sort=False):
            lowest = mine[mine["rank"] == mine["rank"].min()].to_dict("records")
            rows += [
                {"bar": f"{capture}, by {group}", **row} for row in fold({"categories": lowest}, group, categories)
            ]
    for group in ("operation", "role"):
        parts = published[f"by_{group}"]
        whole = sum(parts.values())
        bar = f"published, by {group}"
        rows += [{"bar": bar, "category": c, "ms": ms, "percent": 100 * ms / whole} for c, ms in parts.items()]
    frame = pd.DataFrame(rows)
    for category in largest_first(frame, "category", "percent"):
        mine = frame[frame["category"] == category]
        bar = _bar(category, mine["bar"], mine["percent"], colour(category))
        bar["hovertemplate"] = "%{y}<br>" + category + ": %{x:.1f} %, %{customdata:.3f} ms<extra></extra>"
        figure.add_bar(
            **bar, customdata=mine["ms"], texttemplate="%{x:.0f}", textposition="inside", insidetextanchor="middle"
        )
    names = list(dict.fromkeys(frame["bar"]))
    figure.update_layout(**layout(title, 180 + 46 * len(names), margin={"t": 120}, barmode="stack"))
    figure.update_layout(uniformtext={"minsize": 9, "mode": "hide"})
    top_to_bottom(figure, names)
    return figure.update_xaxes(title="percent of kernel time", range=[0, 101])


def lanes(rows, ranks=None):
    """The kernels of one step on each stream. Columns: capture, rank, stream, start_us, dur_us, name, category.

    The busiest streams of a rank have a lane each, fewer of them where there are many ranks; the others (a CUDA graph
    may use a hundred) share one. Of several captures the first is drawn, and of its ranks the lowest `ranks`.
    """
    figure = go.Figure()
    if rows.empty:
        return _nothing(figure, "One decode step, stream by stream")
    capture = rows["capture"].iloc[0]
    rows = rows[rows["capture"] == capture]
    rows = rows[rows["rank"].isin(sorted(rows["rank"].unique())[:ranks])]
    most = max(1, 8 // rows["rank"].nunique()) if rows["rank"].nunique() > 2 else 4
    rows = rows.assign(lane=_lanes(rows, most))
    for category in largest_first(rows, "category", "dur_us"):
        mine = rows[rows["category"] == category]
        figure.add_bar(
            name=category,
            orientation="h",
            y=mine["lane"],
            x=mine["dur_us"],
            base=mine["start_us"],
            marker={"color": colour(category), "line": {"width": 0}},
            customdata=mine["name"].str.slice(0, 80),
            hovertemplate="%{customdata}<br>at %{base:.1f} us for %{x:.2f} us<extra>" + category + "</extra>",
        )
    names = list(dict.fromkeys(rows.sort_values(["rank", "lane"])["lane"]))
    title = f"One decode step of {capture}, stream by stream"
    figure.update_layout(**layout(title, 190 + 34 * len(names), margin={"t": 130}, barmode="overlay", bargap=0.25))
    top_to_bottom(figure, names)
    return figure.update_xaxes(title="us from the step's first kernel on any rank", tickformat=",d")


def kernels(rows, most=20):
    """The kernels that take most of a decode step of the first capture, means over its ranks.

    Columns: capture, rank, name, category, calls, ms.
    """
    figure = go.Figure()
    if rows.empty:
        return _nothing(figure, "Kernels by time")
    capture = rows["capture"].iloc[0]
    rows = rows[rows["capture"] == capture]
    ranks = rows["rank"].nunique()
    rows = over_ranks(rows, ["capture", "name", "category"]).head(most)
    title = f"Kernels by time, capture {capture}" + (f", mean of {ranks} ranks" if ranks > 1 else "")
    names = [f"{number}. {_short(name)}" for number, name in enumerate(rows["name"], 1)]
    for category in dict.fromkeys(rows["category"]):
        mine = (rows["category"] == category).to_numpy()
        figure.add_bar(
            name=category,
            orientation="h",
            y=[name for name, chosen in zip(names, mine, strict=True) if chosen],
            x=rows["ms"][mine],
            text=[f"{calls:.4g} calls" for calls in rows["calls"][mine]],
            textposition="outside",
            cliponaxis=False,
            marker_color=colour(category),
            customdata=rows["name"][mine].str.slice(0, 160),
            hovertemplate="%{customdata}<br>%{x:.4f} ms, %{text}<extra></extra>",
        )
    figure.update_layout(**layout(title, 160 + 26 * len(rows), margin={"t": 110}, barmode="overlay"))
    top_to_bottom(figure, names).update_yaxes(tickfont={"size": 11})
    return figure.update_xaxes(title="ms per decode step", range=[0, 1.25 * rows["ms"].max()])


def skew(rows):
    """Collectives of each rank, transfer and waiting. Columns: capture, rank, op, ms, transfer_ms, wait_ms.

    Operations that take less than 2 % of the time of all are left to the table.
    """
    figure = go.Figure()
    if rows.empty:
        return _nothing(figure, "Collectives: transfer and waiting for other ranks")
    rows = rows[rows.groupby(["capture", "op"])["ms"].transform("max") > 0.02 * rows["ms"].max()]
    names = _label(rows) + " · " + rows["op"]
    figure.add_bar(**_bar("transfer", names, rows["transfer_ms"].astype(float).fillna(0), _TRANSFER))
    figure.add_bar(**_bar("waiting for other ranks", names, rows["wait_ms"].astype(float).fillna(0), _WAIT))
    unpaired = rows["ms"].where(rows["transfer_ms"].isna(), 0).astype(float)
    if unpaired.any():
        figure.add_bar(**_bar("not told apart (no partner)", names, unpaired, "#8C8C8C"))
    title = "Collectives: transfer and waiting for other ranks"
    figure.update_layout(**layout(title, 150 + (34 if len(rows) <= 12 else 20) * len(rows)), barmode="stack")
    top_to_bottom(figure, names)
    return figure.update_xaxes(title="ms per decode step")


def _telling(steps, capture):
    """The ranks of a capture to draw: all of few, else the lowest and those with least and most kernel time."""
    own = steps[steps["capture"] == capture].set_index("rank")["kernel_sum_ms"]
    return set(own.index) if len(own) <= MOST_RANKS else {own.index.min(), own.idxmin(), own.idxmax()}


def _label(rows):
    return rows["capture"].astype(str) + ", rank " + rows["rank"].astype(str)


def _bar(name, y, x, shade):
    hover = "%{y}<br>" + name + ": %{x:.4f} ms<extra></extra>"
    return {"name": name, "y": y, "x": x, "orientation": "h", "marker_color": shade, "hovertemplate": hover}


def _short(name, most=44):
    name = name.removeprefix("void ")
    return name if len(name) <= most else name[: most - 1] + "…"


def _lanes(rows, most):
    """The lane's name of every row."""
    busy = rows.groupby(["rank", "stream"])["dur_us"].sum().sort_values(ascending=False)
    own = {rank: [s for r, s in busy.index if r == rank] for rank in rows["rank"].unique()}

    def lane(rank, stream):
        streams = own[rank]
        if len(streams) > most + 1 and stream in streams[most:]:
            return f"rank {rank}, {len(streams) - most} other streams"
        return f"rank {rank}, stream {stream}"

    return [lane(rank, stream) for rank, stream in zip(rows["rank"], rows["stream"], strict=True)]


def _nothing(figure, title):
    figure.update_layout(**layout(title, 180), xaxis={"visible": False}, yaxis={"visible": False})
    return empty(figure, "no decode step in these captures: nothing to show")
