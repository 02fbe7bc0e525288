"""Figures of the table `gemm`: which GEMMs take the step's time, and how far each is from its bound."""

import pandas as pd
import plotly.graph_objects as go

from k25lib.report.figures.style import colour, empty, layout, log_ticks

COLUMNS = ["name", "m", "n", "k", "dtype", "kernel", "state", "time_us_median", "time_us_iqr", "gb_s"]
COLUMNS += ["percent_of_peak", "bound", "calls_per_step", "ms_per_step", "share_percent", "noisy"]


def timed(frame, batch=None, state=None):
    """The rows that may be shown as measurements: those with a time, but for cold ones above the memory's peak.

    state: of a GEMM that was timed in both states keep this one ("cold" or "warm"); None keeps both. batch: M, or None
    for all.
    """
    if frame.empty or "time_us_median" not in frame:
        return frame.iloc[:0]
    good = frame[(frame["status"] == "ok") & ~((frame["state"] == "cold") & frame["over_peak"].eq(True))]
    if batch is not None:
        good = good[good["m"] == batch]
    if state is not None:
        good = good.sort_values("state", key=lambda s: s != state, kind="stable")
        good = good.drop_duplicates(["name", "m"]).sort_index()
    return good


def table(frame, batch):
    """One row a GEMM at this batch, by share of the step (calls x time): a DataFrame; failures are not in it."""
    good = timed(frame, batch, "cold")
    if good.empty:
        return pd.DataFrame(columns=COLUMNS)
    total = good["ms_per_step"].sum()
    good = good.assign(share_percent=good["ms_per_step"] / total * 100).sort_values("ms_per_step", ascending=False)
    return good.reindex(columns=COLUMNS).reset_index(drop=True)


def failures(frame):
    """The rows without a time, each with its reason: a DataFrame."""
    bad = frame[frame["status"] != "ok"] if "status" in frame else frame
    return bad.reindex(columns=["name", "m", "state", "status", "reason"]).reset_index(drop=True)


def roofline(frame, batch):
    """Rate against intensity, with both peaks as lines; a marker's area is the GEMM's share of the step."""
    good = timed(frame, batch, "cold")
    figure = go.Figure()
    title = f"Roofline of the decode step's GEMMs, M={batch} (area: share of their time)"
    figure.update_layout(**layout(title, 480), legend_itemsizing="constant")
    figure.update_xaxes(title="intensity, FLOP per byte", type="log", dtick=1)
    figure.update_yaxes(title="rate, TFLOP/s", type="log", dtick=1)
    if good.empty:
        return empty(figure)
    intensity = good["tflop_s"] / good["gb_s"] * 1e3
    share = good["ms_per_step"] / good["ms_per_step"].sum()
    first = good.iloc[0]
    low, high = intensity.min() / 3, max(intensity.max() * 3, first["peak_tflop_s"] / first["peak_gb_s"] * 3e3)
    knee = first["peak_tflop_s"] / first["peak_gb_s"] * 1e3
    figure.add_scatter(
        x=[low, knee, high],
        y=[low * first["peak_gb_s"] / 1e3, first["peak_tflop_s"], first["peak_tflop_s"]],
        mode="lines",
        line={"color": "#555"},
        name=f"peak, {first['peak_source']}: {first['peak_gb_s']:.0f} GB/s, {first['peak_tflop_s']:.0f} TFLOP/s",
    )
    for category, rows in good.groupby("category", sort=False):
        figure.add_scatter(
            x=intensity[rows.index],
            y=rows["tflop_s"],
            mode="markers",
            name={"moe_gemm": "routed experts", "gemm": "other GEMMs"}.get(category, category),
            marker={
                "size": share[rows.index],
                "sizemode": "area",
                "sizeref": share.max() / 45**2,
                "sizemin": 4,
                "color": colour(category),
                "opacity": 0.75,
            },
            customdata=rows[["name", "time_us_median", "percent_of_peak", "state"]].assign(s=share[rows.index] * 100),
            hovertemplate="%{customdata[0]} (%{customdata[3]})<br>%{customdata[1]:.2f} us, %{customdata[2]:.1f} % of "
            "its bound<br>%{customdata[4]:.1f} % of the GEMM time<extra></extra>",
        )
    return figure


def shares(frame, batch):
    """Time of each GEMM in the step (calls x time) against its bandwidth bound: horizontal bars, largest on top."""
    rows = table(frame, batch).iloc[::-1]
    figure = go.Figure()
    title = f"GEMM time of one decode step, M={batch}"
    figure.update_layout(**layout(title, 140 + 26 * max(len(rows), 4), margin={"l": 150}, barmode="overlay"))
    figure.update_xaxes(title="ms a step on one rank")
    if rows.empty:
        return empty(figure)
    figure.add_bar(
        y=rows["name"],
        x=rows["ms_per_step"],
        orientation="h",
        name="measured",
        marker_color=[colour("moe_gemm" if name.startswith("routed") else "gemm") for name in rows["name"]],
        text=[f"{share:.0f} %" for share in rows["share_percent"]],
        textposition="outside",
        cliponaxis=False,
        customdata=rows[["kernel", "state", "gb_s", "percent_of_peak"]],
        hovertemplate="%{y}: %{x:.3f} ms<br>%{customdata[0]}, %{customdata[1]}<br>%{customdata[2]:.0f} GB/s, "
        "%{customdata[3]:.1f} % of its bound<extra></extra>",
    )
    figure.add_bar(
        y=rows["name"],
        x=rows["ms_per_step"] * rows["percent_of_peak"].clip(upper=100) / 100,
        orientation="h",
        width=0.3,
        name="at its bound",
        marker_color="#333",
        hovertemplate="%{y}: bound %{x:.3f} ms<extra></extra>",
    )
    return figure


def experts(frame):
    """Time of the routed experts' GEMMs against M, each beside the time that its bytes need at the memory's peak."""
    good = timed(frame)
    good = good[good["category"] == "moe_gemm"] if not good.empty else good
    figure = go.Figure()
    figure.update_layout(**layout("Routed experts: one layer's grouped GEMMs against batch size", 440))
    figure.update_xaxes(title="M, tokens a step", type="log", dtick="L1" if len(good) < 3 else None)
    figure.update_yaxes(title="us a launch", type="log")
    if good.empty:
        return empty(figure)
    figure.update_yaxes(**log_ticks(good["time_us_median"]))
    figure.update_xaxes(tickvals=sorted(good["m"].unique()))
    styles = {"routed gate_up": "#F58518", "routed down": "#4C78A8"}
    for (name, state), rows in good.groupby(["name", "state"], sort=False):
        rows = rows.sort_values("m")
        line = {"color": styles.get(name, "#777"), "dash": "solid" if state == "cold" else "dot"}
        figure.add_scatter(
            x=rows["m"],
            y=rows["time_us_median"],
            mode="lines+markers",
            line=line,
            name=f"{name}, {state}",
            customdata=rows[["batch", "gb_s", "kernel"]],
            hovertemplate="M=%{x}: %{y:.1f} us<br>%{customdata[0]:.0f} experts, %{customdata[1]:.0f} GB/s<br>"
            "%{customdata[2]}<extra></extra>",
        )
        if state == good["state"].iloc[0]:
            figure.add_scatter(
                x=rows["m"],
                y=rows["bytes"] / rows["peak_gb_s"] / 1e3,
                mode="lines",
                line={"color": line["color"], "width": 1, "dash": "dash"},
                name=f"{name}, bytes at peak",
            )
    return figure


def traced(breakdown):
    """GEMM time of a run's traces: a DataFrame of `batch`, `category` (gemm, moe_gemm), `ms` a decode step and rank."""
    wanted = {"moe_gemm": "moe_gemm", "gemm": "gemm", "other_gemm": "gemm"}
    if breakdown.empty:
        return pd.DataFrame(columns=["batch", "category", "ms"])
    rows = breakdown[breakdown["category"].isin(wanted) & (breakdown["batch"].astype(str) != "all")]
    rows = rows.assign(category=rows["category"].map(wanted))
    return rows.groupby(["batch", "category"])["ms"].mean().reset_index()


def against_trace(frame, traced):
    """Sum of the GEMMs over the step against the GEMM time that a trace shows.

    traced: DataFrame with `batch`, `category` (gemm, moe_gemm) and `ms` a decode step, means over the ranks.
    """
    good = timed(frame, None, "cold")
    figure = go.Figure()
    figure.update_layout(**layout("GEMM time of a decode step: benchmarks against the trace", 400), barmode="stack")
    figure.update_yaxes(title="ms a step on one rank")
    if good.empty and traced.empty:
        return empty(figure)
    mine = good.groupby(["m", "category"])["ms_per_step"].sum().reset_index() if not good.empty else pd.DataFrame()
    parts = [("alone", mine, "m", "ms_per_step"), ("trace", traced, "batch", "ms")]
    for category in ("moe_gemm", "gemm"):
        bars = []
        for label, rows, key, value in parts:
            chosen = rows[rows["category"] == category] if len(rows) else rows
            bars += [(int(row[key]), label, row[value]) for row in chosen.to_dict("records")]
        bars.sort()
        figure.add_bar(
            x=[[f"M={bar[0]}" for bar in bars], [bar[1] for bar in bars]],
            y=[bar[2] for bar in bars],
            name={"moe_gemm": "routed experts", "gemm": "other GEMMs"}[category],
            marker_color=colour(category),
            texttemplate="%{y:.2f}",
        )
    return figure
