"""Figures of notebook 02: a server under load. Each takes tables of the run and returns a Figure."""

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from k25lib.report.figures.style import layout

RATE, LATENCY, CLIENT = "#4C78A8", "#F58518", "#54A24B"
SHARES = np.linspace(0, 1, 201)


def _known(levels):
    """The levels that have figures, in order of load, with a column `level` that names each."""
    if levels.empty:
        return levels
    levels = levels[levels["output_tok_s"].notna()]
    levels = levels.assign(level=[_name(*pair) for pair in zip(levels["concurrency"], levels["rate"], strict=True)])
    return levels.sort_values(["concurrency", "rate"])


def _name(concurrency, rate):
    return f"{rate:g}/s" if concurrency is None or np.isnan(concurrency) else f"C={concurrency:.0f}"


def _doubtful(levels):
    return levels["client_limited"].astype(bool) | levels["void"].astype(bool)


def _title(text, levels):
    doubtful = not levels.empty and _doubtful(levels).any()
    return text + (" (open marker: not usable)" if doubtful else "")


def _marker(levels, colour):
    symbols = ["circle-open" if each else "circle" for each in _doubtful(levels)]
    return {"symbol": symbols, "size": 9, "color": colour}


def _spread(levels, name, suffix=""):
    """Error bars from the columns `<name>_low` and `<name>_high`."""
    value, low, high = (levels[name + each].astype(float) for each in (suffix, "_low", "_high"))
    return {"array": high - value, "arrayminus": value - low}


def throughput(levels):
    """Output throughput (tok/s) and mean TPOT (ms) against concurrency or rate, with their 95 % intervals."""
    levels = _known(levels)
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    if not levels.empty:
        line = {"x": levels["level"], "mode": "lines+markers"}
        solid, dots = {"color": RATE}, {"color": LATENCY, "dash": "dot"}
        spread, marker = _spread(levels, "output_tok_s"), _marker(levels, RATE)
        figure.add_scatter(
            y=levels["output_tok_s"], name="throughput", error_y=spread, line=solid, marker=marker, **line
        )
        spread, marker = _spread(levels, "tpot_ms", "_mean"), _marker(levels, LATENCY)
        figure.add_scatter(
            y=levels["tpot_ms_mean"], name="TPOT", error_y=spread, line=dots, marker=marker, secondary_y=True, **line
        )
    figure.update_xaxes(title_text="concurrency (requests in flight), or rate", type="category")
    figure.update_yaxes(title_text="output throughput, tok/s", rangemode="tozero", secondary_y=False)
    figure.update_yaxes(title_text="TPOT, ms", rangemode="tozero", showgrid=False, tickmode="auto", secondary_y=True)
    return figure.update_layout(**layout(_title("Throughput and TPOT", levels)))


def pareto(levels):
    """Throughput per GPU (of the server, where the number of GPUs is unknown) against tok/s per user."""
    levels = _known(levels)
    figure = go.Figure()
    per_gpu = not levels.empty and levels["tok_s_per_gpu"].notna().all()
    if not levels.empty:
        y = levels["tok_s_per_gpu" if per_gpu else "output_tok_s"]
        figure.add_scatter(
            x=levels["tok_s_per_user"],
            y=y,
            text=levels["level"],
            mode="lines+markers+text",
            textposition="top right",
            line_color=RATE,
            marker=_marker(levels, RATE),
            showlegend=False,
        )
        figure.update_xaxes(range=[0, float(levels["tok_s_per_user"].max()) * 1.12])
        figure.update_yaxes(range=[0, float(y.max()) * 1.15])
    figure.update_xaxes(title_text="tok/s per user (1000 / TPOT)")
    figure.update_yaxes(title_text="output tok/s per GPU" if per_gpu else "output tok/s of the server")
    return figure.update_layout(**layout(_title("Throughput against the speed of one user", levels)))


def ttft_distribution(requests):
    """Share of measured requests whose TTFT (ms) is below x, a line for each level."""
    good = requests
    if not requests.empty:
        good = requests[requests["ok"].astype(bool) & (requests["phase"] == "measured")]
    samples = [] if good.empty else _by_level(good, lambda part: (part["ttft_ms"].to_numpy(float), None))
    return _distribution(samples, "TTFT, ms", "TTFT: share of requests below x")


def itl_distribution(chunks):
    """Share of token intervals (ms; a chunk of k tokens is k intervals) below x, a line for each level."""

    def intervals(part):
        gap = part.groupby(["repeat", "request"], sort=False)["time_ms"].diff()
        kept = gap.notna()
        return (gap[kept] / part["tokens"][kept]).to_numpy(float), part["tokens"][kept].to_numpy(float)

    measured = chunks if chunks.empty else chunks[chunks["phase"] == "measured"]
    samples = [] if measured.empty else _by_level(measured, intervals)
    return _distribution(samples, "ITL per token, ms", "ITL: share of tokens below x")


def _by_level(table, values):
    groups = table.groupby(["concurrency", "rate"], dropna=False)
    return [(_name(*key), *values(part)) for key, part in groups]


def _distribution(samples, axis, title):
    figure = go.Figure()
    samples = [sample for sample in samples if len(sample[1])]
    colours = sample_colorscale("Viridis", np.linspace(0.9, 0, max(len(samples), 2)))
    for (name, values, weights), line_colour in zip(samples, colours, strict=False):
        x = np.quantile(values, SHARES, weights=weights, method="inverted_cdf")
        figure.add_scatter(x=x, y=SHARES * 100, name=name, mode="lines", line_color=line_colour)
    figure.update_xaxes(title_text=axis, type="log", dtick=1)
    figure.update_yaxes(title_text="share, %", range=[0, 101])
    return figure.update_layout(**layout(title))


def client_state(levels):
    """The client's own state by level: requests in flight of those asked for (%), CPU (% of a core), lag p99 (ms)."""
    levels = _known(levels)
    names = ("in flight, % of C", "client CPU, % of a core", "receive lag p99, ms")
    figure = make_subplots(rows=1, cols=3, subplot_titles=names, horizontal_spacing=0.08)
    if not levels.empty:
        shares = levels["in_flight_mean"] / levels["concurrency"].astype(float) * 100
        for column, y in enumerate((shares, levels["client_cpu_share"] * 100, levels["client_lag_ms_p99"]), start=1):
            figure.add_scatter(
                x=levels["level"], y=y, mode="lines+markers", marker=_marker(levels, CLIENT), line_color=CLIENT,
                showlegend=False, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    return figure.update_layout(**layout(_title("The client itself", levels), 340))
