"""The mean decode step of a capture, from the table `steps` (one row a forward pass)."""

import pandas as pd

TIMES = ("kernel_sum_ms", "busy_ms", "span_ms", "copies_ms", "idle_in_graph_ms", "idle_in_step_ms")
NEEDED = {"capture", "rank", "step", "kind", "batch", "start_ns", *TIMES[:3]}
SPREAD = (0.05, 0.95)  # the middle nine of ten steps


def captures(table):
    """Names of the captures in the table, in order; none where it is empty or lacks columns."""
    return list(dict.fromkeys(table["capture"])) if set(table) >= NEEDED else []


def every_rank(table):
    """The mean decode steps of every capture and rank, all batches pooled, as a frame with `decode_step`'s columns."""
    pairs = (
        table[["capture", "rank"]].drop_duplicates() if captures(table) else pd.DataFrame({"capture": [], "rank": []})
    )
    found = [decode_step(table, c, rank=r) for c, r in pairs.itertuples(index=False)]
    return pd.DataFrame([step for step in found if step])


def decode_step(table, capture, batch="all", rank=None):
    """Means over the decode steps of one rank (the lowest): {"capture", "rank", "batch", "steps", "busy_ms", ...}.

    batch: requests in the step, or `all`. Steps replayed as a graph are taken where there are any, eager ones else.
    interval_ms is start to start of consecutive decode steps with nothing between, and idle_between_ms the idle time
    there; None without such a pair. `kernel_sum_ms_low`, `_high`, `interval_ms_low`, `_high` hold nine of ten steps.
    None where the capture has no such step.
    """
    rows = table[table["capture"] == capture]
    rows = rows[rows["rank"] == (rows["rank"].min() if rank is None else rank)].sort_values("step")
    kind = "decode" if (rows["kind"] == "decode").any() else "decode_eager"
    chosen = rows["kind"] == kind
    if batch != "all":
        chosen &= rows["batch"] == int(batch)
    mine = rows[chosen]
    if mine.empty:
        return None
    follows = chosen & (rows["kind"].shift(-1) == kind)
    intervals = (rows["start_ns"].shift(-1) - rows["start_ns"])[follows] / 1e6
    found = {"capture": capture, "rank": int(mine["rank"].iloc[0]), "batch": str(batch), "steps": len(mine)}
    found |= {name: float(mine[name].mean()) for name in TIMES if name in mine}
    found |= {"interval_ms": None, "idle_between_ms": None} | _spread("kernel_sum_ms", mine["kernel_sum_ms"])
    if len(intervals):
        found |= {"interval_ms": float(intervals.mean()), **_spread("interval_ms", intervals)}
        found["idle_between_ms"] = float((intervals - rows["span_ms"][follows]).mean())
    return found


def _spread(name, values):
    return dict(zip((f"{name}_low", f"{name}_high"), map(float, values.quantile(SPREAD)), strict=True))
