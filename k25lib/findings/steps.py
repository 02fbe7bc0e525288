"""The mean decode step of a capture, from the table `steps` (one row a forward pass)."""

TIMES = ("kernel_sum_ms", "busy_ms", "span_ms", "copies_ms", "idle_in_graph_ms", "idle_in_step_ms")
NEEDED = {"capture", "rank", "step", "kind", "batch", "start_ns", *TIMES[:3]}


def captures(table):
    """Names of the captures in the table, in order; none where it is empty or lacks columns."""
    return list(dict.fromkeys(table["capture"])) if set(table) >= NEEDED else []


def decode_step(table, capture, batch="all"):
    """Means over the decode steps of the lowest rank: {"steps", "rank", "batch", "kernel_sum_ms", ..., "interval_ms"}.

    batch: requests in the step, or `all`. Steps replayed as a graph are taken where there are any, eager ones else.
    interval_ms is start to start of consecutive decode steps with nothing between, None without such a pair. None
    where the capture has no such step.
    """
    rows = table[table["capture"] == capture]
    rows = rows[rows["rank"] == rows["rank"].min()].sort_values("step")
    kind = "decode" if (rows["kind"] == "decode").any() else "decode_eager"
    chosen = rows["kind"] == kind
    if batch != "all":
        chosen &= rows["batch"] == int(batch)
    mine = rows[chosen]
    if mine.empty:
        return None
    follows = chosen & (rows["kind"].shift(-1) == kind)
    gaps = (rows["start_ns"].shift(-1) - rows["start_ns"])[follows]
    return {
        "steps": len(mine),
        "rank": int(mine["rank"].iloc[0]),
        "batch": str(batch),
        **{name: float(mine[name].mean()) for name in TIMES if name in mine},
        "interval_ms": float(gaps.mean()) / 1e6 if len(gaps) else None,
    }
