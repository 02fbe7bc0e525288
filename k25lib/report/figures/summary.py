"""Figures of the report's first page: where TPOT goes, what would help, and the runs before."""

import textwrap

import plotly.graph_objects as go

from k25lib.report.figures.style import colour, largest_first, layout

_NO_LEGEND = {"showlegend": False, "margin": {"t": 54}}
_SLOWER, _FASTER, _TOTAL, _UNEXPLAINED = "#C44E52", "#3A8F6B", "#4C78A8", "#8C8C8C"


def waterfall(rows):
    """From the bandwidth bound to the measured TPOT, ms. Columns: part, ms, kind (total, part, remainder)."""
    measures = ["total" if kind == "total" else "relative" for kind in rows.kind]
    if measures[0] == "total":
        measures[0] = "absolute"
    figure = go.Figure(
        go.Waterfall(
            orientation="h",
            y=[_wrapped(part) for part in rows.part],
            x=rows.ms,
            measure=measures,
            text=[
                f"{ms:.2f}" if kind == "total" else f"{ms:+.2f}" for ms, kind in zip(rows.ms, rows.kind, strict=True)
            ],
            textposition="outside",
            cliponaxis=False,
            increasing_marker_color=_SLOWER,
            decreasing_marker_color=_FASTER,
            totals_marker_color=_TOTAL,
            hovertemplate="%{y}: %{text} ms<extra></extra>",
        )
    )
    ends = []  # where each bar ends; the number of a bar that goes back stands to the left of its end
    for ms, kind in zip(rows.ms, rows.kind, strict=True):
        ends.append(ms if kind == "total" or not ends else ends[-1] + ms)
    room = 0.14 * (max(0, *ends) - min(0, *ends))
    least = min(0, *(end - room * (ms < 0) for end, ms in zip(ends, rows.ms, strict=True)))
    first = rows.part.iloc[0] if rows.kind.iloc[0] == "total" else "its parts"
    return figure.update_layout(
        **layout(
            f"Where the time of a token goes: from {first} to {rows.part.iloc[-1]}", 100 + 42 * len(rows), **_NO_LEGEND
        ),
        xaxis={"title": "ms per output token", "range": [least, max(0, *ends) + room]},
        yaxis={"autorange": "reversed", "automargin": True},
    )


def whatif(rows):
    """What each change would save a step, as a range in ms. Columns: change, low_ms, high_ms."""
    rows = rows.sort_values("high_ms", kind="stable")
    names = [_wrapped(name, 32) for name in rows.change]
    least, most = min(0, rows.low_ms.min()), max(0, rows.high_ms.max())
    room = (most - least) or 1
    figure = go.Figure()
    for low, high, name in zip(rows.low_ms, rows.high_ms, names, strict=True):
        shade = _SLOWER if low < 0 and high <= 0 else _FASTER if low > 0 else _UNEXPLAINED
        figure.add_scatter(
            x=[low, high],
            y=[name] * 2,
            mode="lines+markers",
            line={"color": shade, "width": 6},
            marker={"color": shade, "size": 11},
            hovertemplate="%{y}: %{x:+.2f} ms<extra></extra>",
        )
    figure.add_scatter(  # the numbers stand in a column of their own, clear of every line
        x=[most + 0.06 * room] * len(rows),
        y=names,
        mode="text",
        text=[f"{low:+.2f} to {high:+.2f}" for low, high in zip(rows.low_ms, rows.high_ms, strict=True)],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure.add_vline(x=0, line_width=1, line_color="#555")
    return figure.update_layout(
        **layout("What would help: the range of what each change saves", 100 + 46 * len(rows), **_NO_LEGEND),
        xaxis={
            "title": "ms saved per output token (below 0: it costs)",
            "range": [least - 0.05 * room, most + 0.4 * room],
        },
        yaxis={"automargin": True},
    )


def step_by_category(frame):
    """Stacked ms per decode step, the largest category first, idle last. Columns: step, category, ms, wall_ms.

    The line on each bar (`step`) marks the step's wall time: where kernels overlap, the bar is longer.
    """
    order = largest_first(frame, "category", "ms")
    order.sort(key=lambda name: name == "idle")  # stable: all others stay in order
    steps = frame.groupby("step", sort=False).agg(wall_ms=("wall_ms", "first"), ms=("ms", "sum"))
    names = [_wrapped(name) for name in steps.index]
    figure = go.Figure()
    for category in order:
        part = frame[frame.category == category].set_index("step").ms
        figure.add_bar(
            y=[_wrapped(name) for name in part.index],
            x=part,
            name=category,
            orientation="h",
            marker_color=colour(category),
            hovertemplate="%{y}<br>%{fullData.name}: %{x:.3f} ms<extra></extra>",
        )
    figure.add_scatter(
        y=names,
        x=steps.wall_ms,
        name="wall time of the step",
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 34, "color": "#1b1f24", "line": {"width": 3}},
        hovertemplate="%{y}<br>wall time: %{x:.3f} ms<extra></extra>",
    )
    figure.add_scatter(
        y=names,
        x=steps.max(axis=1),
        text=[f"  {wall:.2f} ms" for wall in steps.wall_ms],
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    return figure.update_layout(
        **layout("A decode step by category", 190 + 50 * len(names), margin={"t": 110}),
        barmode="stack",
        xaxis={
            "title": "ms per decode step (line, number: wall time)",
            "range": [0, 1.18 * steps.max(axis=None)],
        },
        yaxis={"autorange": "reversed", "automargin": True},
    )


def history(rows, title, unit, band=None):
    """One metric over the runs, oldest first. Columns: run, value, low, high (both may be missing), changed (a note).

    `band`: (low, high) around the runs before, drawn behind.
    """
    known = rows.low.notna() & rows.high.notna()
    figure = go.Figure(
        go.Scatter(
            x=rows.run,
            y=rows.value,
            mode="lines+markers",
            text=rows.changed,
            line_color=_TOTAL,
            error_y={
                "type": "data",
                "symmetric": False,
                "array": (rows.high - rows.value).where(known, 0),
                "arrayminus": (rows.value - rows.low).where(known, 0),
            },
            hovertemplate="%{x}<br>%{y:.4g} " + unit + "<br>%{text}<extra></extra>",
        )
    )
    if band:
        figure.add_hrect(y0=band[0], y1=band[1], fillcolor=_TOTAL, opacity=0.12, line_width=0)
    return figure.update_layout(
        **layout(title, 320, **_NO_LEGEND), xaxis={"type": "category", "automargin": True}, yaxis={"title": unit}
    )


def _wrapped(text, most=26):
    """A label in three lines at most, of at most `most` characters."""
    return "<br>".join(textwrap.wrap(str(text), most, break_on_hyphens=False, max_lines=3, placeholder=" …")) or "–"
