"""Figures of notebook 02: a server under load. Each takes a table of the run and returns a Figure."""

from plotly.subplots import make_subplots

from k25lib.report.figures.style import layout

RATE, LATENCY, LIMITED, PLATEAU = "#4C78A8", "#F58518", "#BAB0AC", "#54A24B"


def _closed(levels):
    """The closed-loop levels that have figures, by concurrency."""
    if levels.empty:
        return levels
    return levels[levels["concurrency"].notna() & levels["output_tok_s"].notna()].sort_values("concurrency")


def _states(levels):
    """A marker for each level: full where it may be used, open where the client limited it or it is void."""
    doubtful = levels["client_limited"].astype(bool) | levels["void"].astype(bool)
    return ["circle-open" if each else "circle" for each in doubtful]


def _concurrency_axis(levels):
    values = [int(each) for each in levels["concurrency"]]
    return {"title": "concurrency (requests in flight)", "type": "log", "tickvals": values, "ticktext": values}


def throughput(levels):
    """Output throughput (tok/s) and TPOT (ms, mean with its 95 % interval) against concurrency."""
    levels = _closed(levels)
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    if not levels.empty:
        x, symbols = levels["concurrency"], _states(levels)
        figure.add_scatter(
            x=x, y=levels["output_tok_s"], name="throughput, tok/s", mode="lines+markers",
            line={"color": RATE}, marker={"symbol": symbols, "size": 9},
        )  # fmt: skip
        mean = levels["tpot_ms_mean"]
        spread = {"array": levels["tpot_ms_high"] - mean, "arrayminus": mean - levels["tpot_ms_low"], "type": "data"}
        figure.add_scatter(
            x=x, y=mean, name="TPOT, ms", mode="lines+markers", secondary_y=True, error_y=spread,
            line={"color": LATENCY, "dash": "dot"}, marker={"symbol": symbols, "size": 9},
        )  # fmt: skip
        figure.update_xaxes(**_concurrency_axis(levels))
    figure.update_yaxes(title_text="output throughput, tok/s", rangemode="tozero", secondary_y=False)
    figure.update_yaxes(title_text="TPOT, ms", rangemode="tozero", showgrid=False, secondary_y=True)
    return figure.update_layout(**layout("Throughput and TPOT against concurrency (open marker: not usable)"))
