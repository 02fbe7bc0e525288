"""Figures of the table `collectives`: latency against size, the burst, variants, skew, All-to-All against AllReduce."""

import json

import pandas as pd
import plotly.graph_objects as go

from k25lib.micro.fit import fit
from k25lib.report.figures.style import empty, layout, log_ticks

COLOURS = {
    "allreduce": "#72B7B2",
    "allgather": "#4C78A8",
    "reducescatter": "#B279A2",
    "alltoall": "#F58518",
    "dispatch+combine": "#E45756",
}
NAMES = {
    "allreduce": "AllReduce",
    "allgather": "AllGather",
    "reducescatter": "ReduceScatter",
    "alltoall": "All-to-All",
    "dispatch+combine": "dispatch + combine (two All-to-Alls)",
}


def timed(frame, *purposes):
    """The rows with a time, of these purposes."""
    if frame.empty or "time_us_median" not in frame:
        return frame.iloc[:0]
    good = frame[frame["status"] == "ok"]
    return good[good["purpose"].isin(purposes)] if purposes else good


def failures(frame):
    """The rows without a time, each with its reason: a DataFrame."""
    bad = frame[frame["status"] != "ok"] if "status" in frame else frame
    return bad.reindex(columns=["op", "bytes", "calls", "mode", "backend", "environment", "status", "reason"])


def table(frame):
    """All rows with a time: a DataFrame of what was called, its time over the ranks, and its bandwidths."""
    columns = ["purpose", "op", "bytes", "calls", "world", "backend", "mode", "gemm", "environment"]
    columns += ["time_us_min", "time_us_median", "time_us_max", "time_us_iqr", "algbw_gb_s", "busbw_gb_s", "noisy"]
    return timed(frame).reindex(columns=columns).reset_index(drop=True)


def latency(frame):
    """Time of a single call against its size, log-log, one line an operation, with the fit alpha + S/B."""
    good = timed(frame, "sizes", "expert parallel")
    figure = go.Figure()
    figure.update_layout(**layout(f"Collectives: time against size{_where(frame)}", 480, margin={"t": 54}))
    figure.update_xaxes(title="message, bytes (powers of two: KiB, MiB)", type="log", **_ticks(good))
    figure.update_yaxes(title="us a call, median over ranks", type="log")
    if good.empty:
        return empty(figure)
    figure.update_yaxes(**log_ticks(good["time_us_median"]))
    for op, rows in good.groupby("op", sort=False):
        rows = rows.drop_duplicates("bytes").sort_values("bytes")
        law = fit(rows["bytes"], rows["time_us_median"])
        text = f"{NAMES[op]}"
        if law:
            speed = f" + S/{law['gb_s']:.3g} GB/s" if law["gb_s"] else ""
            text += f": {law['alpha_us']:.1f} us{speed}, within {law['worst']:.0%}"
            y = [law["alpha_us"] + (size / law["gb_s"] / 1e3 if law["gb_s"] else 0) for size in rows["bytes"]]
            line = {"color": COLOURS[op], "dash": "dash", "width": 1}
            figure.add_scatter(x=rows["bytes"], y=y, mode="lines", line=line, showlegend=False, hoverinfo="skip")
        figure.add_scatter(
            x=rows["bytes"],
            y=rows["time_us_median"],
            mode="markers+lines" if not law else "markers",
            marker={"color": COLOURS[op], "size": 8},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": rows["time_us_max"] - rows["time_us_median"],
                "arrayminus": rows["time_us_median"] - rows["time_us_min"],
            },
            name=text,
            customdata=rows[["busbw_gb_s", "algbw_gb_s", "skew_us"]],
            hovertemplate="%{x} B: %{y:.2f} us<br>busbw %{customdata[0]:.2f}, algbw %{customdata[1]:.2f} GB/s<br>"
            "skew %{customdata[2]:.2f} us<extra></extra>",
        )
    figure.update_layout(legend={"orientation": "v", "x": 0.01, "y": 0.99, "yanchor": "top", "bgcolor": "#ffffffb0"})
    return figure


def burst(frame, traced=None, reference=None):
    """AllReduce time of one decode step: the burst by backend and mode, in place, in the trace, in the reference.

    traced: {"label": (ms a step, us a call)}; reference: the same, from published figures (other hardware).
    """
    bars = []
    rows = timed(frame, "burst", "in place")
    for _, row in rows.iterrows():
        where = "between GEMMs" if row["purpose"] == "in place" else row["mode"]
        bars.append(
            (f"{row['backend']}, {where}, M={row['batch']:.0f}", row["burst_ms"], row["time_us_median"], "here")
        )
    for source, known in (("trace", traced or {}), ("reference", reference or {})):
        bars += [(label, ms, us, source) for label, (ms, us) in known.items()]
    figure = go.Figure()
    title = f"AllReduce time of one decode step{_where(frame)}"
    figure.update_layout(**layout(title, 150 + 30 * max(len(bars), 4), margin={"l": 220}, barmode="overlay"))
    figure.update_xaxes(title="ms a step (label: us a call)")
    if not bars:
        return empty(figure)
    names = {"here": "benchmark, this machine", "trace": "in a trace", "reference": "published, other hardware"}
    for source, shade in (("here", "#72B7B2"), ("trace", "#3A8F89"), ("reference", "#BAB0AC")):
        mine = [bar for bar in bars if bar[3] == source]
        if mine:
            figure.add_bar(
                y=[bar[0] for bar in mine],
                x=[bar[1] for bar in mine],
                orientation="h",
                name=names[source],
                marker_color=shade,
                text=[f"{bar[2]:.3g} us" for bar in mine],
                textposition="outside",
                cliponaxis=False,
            )
    figure.update_yaxes(autorange="reversed")
    return figure


def traced(breakdown):
    """AllReduce of a run's traces, for `burst`: {label: (ms a step, us a call)}, means over the ranks, by batch."""
    if breakdown.empty:
        return {}
    rows = breakdown[breakdown["category"].astype(str).str.startswith("allreduce") & (breakdown["calls"] > 0)]
    rows = rows[rows["batch"].astype(str) != "all"]
    means = rows.groupby(["capture", "category", "batch"])[["ms", "calls"]].mean()
    return {f"{c}, {kind}, M={m}": (row.ms, row.ms / row.calls * 1e3) for (c, kind, m), row in means.iterrows()}


def reference(campaigns):
    """AllReduce of published campaigns, for `burst`: {label: (ms a step, us a call)}, of a campaign's burst and of the
    kernel in its profile. campaigns: as findings.campaigns.references has them."""
    found = {}
    for campaign in campaigns.values():
        name = campaign["campaign"]["name"]
        if burst := campaign.get("burst"):
            found[f"{name}: burst"] = (burst["ms"], burst["ms"] / burst["calls"] * 1e3)
        for row in campaign.get("allreduce", []):
            if row["kind"] == "kernel":
                found[f"{name}: profile"] = (row["ms"], row["us"])
    return found


def variants(frame):
    """NCCL algorithm and protocol against each other, fastest on top, one panel of bars a size."""
    good = timed(frame, "variant")
    figure = go.Figure()
    figure.update_layout(**layout("NCCL variants, AllReduce", margin={"l": 250}, barmode="group"))
    figure.update_xaxes(title="us a call", rangemode="tozero")
    if good.empty:
        return empty(figure, "no variant has a time (they need NCCL)")
    good = good.assign(variant=good["environment"].map(_variant))
    order = good[good["bytes"] == good["bytes"].min()].sort_values("time_us_median", ascending=False)["variant"]
    for size, rows in good.groupby("bytes"):
        figure.add_bar(
            y=rows["variant"],
            x=rows["time_us_median"],
            orientation="h",
            name=_size(size),
            error_x={"type": "data", "array": rows["time_us_iqr"]},
            texttemplate="%{x:.1f}",
            textposition="inside",
            insidetextanchor="start",
        )
    figure.update_yaxes(categoryorder="array", categoryarray=list(order))
    return figure


def skew(frame):
    """How far the ranks are apart: (slowest - fastest) of their median times, in percent of the median, by size."""
    good = timed(frame)
    figure = go.Figure()
    figure.update_layout(**layout("Skew between ranks", 380))
    figure.update_xaxes(title="message, bytes", type="log", **_ticks(good))
    figure.update_yaxes(title="(slowest - fastest rank) / median, %")
    if good.empty:
        return empty(figure)
    for op, rows in good.groupby("op", sort=False):
        figure.add_scatter(
            x=rows["bytes"],
            y=rows["skew_us"] / rows["time_us_median"] * 100,
            mode="markers",
            marker={"color": COLOURS[op], "size": 8},
            name=NAMES[op],
            customdata=rows[["mode", "backend", "skew_us"]],
            hovertemplate="%{x} B, %{customdata[0]}, %{customdata[1]}: %{customdata[2]:.2f} us<extra></extra>",
        )
    return figure


def exchange(frame):
    """What an expert-parallel exchange costs against the AllReduce it would replace, by tokens a step.

    Returns a DataFrame: batch, us of one AllReduce, of one All-to-All of the same bytes, of dispatch + combine with a
    copy a chosen expert, of AllGather + ReduceScatter (vLLM's default), and dispatch + combine over AllReduce.
    """
    good = timed(frame, "sizes", "expert parallel")
    rows = []
    if good.empty or "batch" not in good:
        return pd.DataFrame(rows)
    for batch, part in good[good["batch"].notna()].groupby("batch"):
        times = part.sort_values("bytes").drop_duplicates("op").set_index("op")["time_us_median"]
        gathered = times.get("allgather", float("nan")) + times.get("reducescatter", float("nan"))
        row = {"batch": int(batch)} | {
            f"{op}_us": times.get(op) for op in ("allreduce", "alltoall", "dispatch+combine")
        }
        row["allgather+reducescatter_us"] = gathered
        row["dispatch+combine / allreduce"] = (
            row["dispatch+combine_us"] / row["allreduce_us"] if len(times) > 2 else None
        )
        rows.append(row)
    return pd.DataFrame(rows)


def exchange_figure(frame):
    """The table of `exchange` as grouped bars by tokens a step."""
    rows = exchange(frame)
    figure = go.Figure()
    title = f"One MoE layer's exchange: AllReduce or expert parallel{_where(frame)}"
    figure.update_layout(**layout(title, 430), barmode="group")
    figure.update_xaxes(title="M, tokens a step", type="category")
    figure.update_yaxes(title="us an exchange")
    if rows.empty:
        return empty(figure)
    for column, name, shade in (
        ("allreduce_us", "AllReduce", COLOURS["allreduce"]),
        ("alltoall_us", "one All-to-All, same bytes", COLOURS["alltoall"]),
        ("dispatch+combine_us", "dispatch + combine", COLOURS["dispatch+combine"]),
        ("allgather+reducescatter_us", "AllGather + ReduceScatter", COLOURS["allgather"]),
    ):
        figure.add_bar(x=rows["batch"], y=rows[column], name=name, marker_color=shade)
    return figure


def _variant(text):
    """NCCL's settings (JSON of environment variables) in words: `Ring/LL`, and others as NAME=value."""
    chosen = json.loads(text)
    names = "/".join(chosen.pop(key) for key in ("NCCL_ALGO", "NCCL_PROTO") if key in chosen)
    return ", ".join(filter(None, (names, *(f"{key}={value}" for key, value in chosen.items())))) or "default"


def _size(size_bytes):
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.0f} B"


def _ticks(rows):
    if rows.empty:
        return {}
    powers = [2**p for p in range(6, 34, 4) if rows["bytes"].min() / 16 <= 2**p <= rows["bytes"].max() * 16]
    return {"tickvals": powers, "ticktext": [_size(power) for power in powers]}


def _where(frame):
    if frame.empty or "comparable" not in frame:
        return ""
    world = int(frame["world"].iloc[0])
    return f", {world} ranks" + (
        "" if frame["comparable"].eq(True).any() else " (gloo on CPUs: functional, not comparable)"
    )
