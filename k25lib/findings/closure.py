"""Do the parts add up to the measured TPOT? A waterfall from the bandwidth bound, and sums that cannot be."""

COMMUNICATION = ("allreduce", "allreduce_nccl", "allreduce_custom", "other_comm")
GEMMS = ("gemm", "other_gemm", "moe_gemm")
ROUNDING = 0.5  # of the last digit that is printed


def waterfall(tpot_ms, step, categories, weight_bound_ms=None, kv_bound_ms=0.0, waiting_ms=None, profiler_ms=None):
    """Rows {"part", "ms", "kind", "from"} that lead from the bandwidth bound to `tpot_ms`; their sum is exact.

    Where no client measured at the trace's concurrency (tpot_ms is None) they lead to the step in the trace.
    step: a decode step's `kernel_sum_ms`, `busy_ms`, `span_ms` and, where they are known, `interval_ms`, from a trace.
    categories: {category: ms} of the same step, adding up to the kernel sum. weight_bound_ms, kv_bound_ms: time that
    reading weights and KV cache takes at the peak (None: unknown, then there is no bound). waiting_ms: the part of
    the same rank's communication that waits for other ranks. kind: total, part, or remainder.
    """
    gemm = sum(categories.get(name, 0.0) for name in GEMMS)
    attention = categories.get("attention", 0.0)
    communication = sum(categories.get(name, 0.0) for name in COMMUNICATION)
    rest = step["kernel_sum_ms"] - gemm - attention - communication
    rows = []

    def add(part, ms, source, kind="part"):
        rows.append({"part": part, "ms": ms, "kind": kind, "from": source})

    if weight_bound_ms is None:
        add("GEMMs", gemm, "trace")
        add("attention", attention, "trace")
    else:
        bound = weight_bound_ms + kv_bound_ms
        add("bandwidth bound", bound, "model and hardware", "total")
        add("GEMMs above reading the weights", gemm - weight_bound_ms, "trace less model")
        add("attention above reading the KV cache", attention - kv_bound_ms, "trace less model")
    if waiting_ms is None:
        add("communication", communication, "trace, one rank: waiting included")
    else:
        add("communication: transfer", communication - waiting_ms, "trace, ranks paired")
        add("communication: waiting for other ranks", waiting_ms, "trace, ranks paired")
    add("other kernels", rest, "trace")
    add("kernels that overlap", step["busy_ms"] - step["kernel_sum_ms"], "trace: busy less kernel sum")
    add("idle within the step", step["span_ms"] - step["busy_ms"], "trace: span less busy")
    last = step["span_ms"]
    if step.get("interval_ms"):
        add("between steps", step["interval_ms"] - last, "trace: interval less span")
        last = step["interval_ms"]
    if tpot_ms is None:
        add("step in the trace", last, "trace", "total")
        return rows
    if profiler_ms is None:
        add("not in the trace (profiler, other steps)", tpot_ms - last, "client less trace", "remainder")
    else:
        add("the profiler's own cost", -profiler_ms, "client: without the profiler less with it")
        add("not in the trace (other steps)", tpot_ms - last + profiler_ms, "client less trace", "remainder")
    add("measured TPOT", tpot_ms, "client", "total")
    return rows


def contradictions(tpot_ms, step, categories, weight_bound_ms=None, kv_bound_ms=0.0):
    """Sums of one run that cannot be, as rows {"finding", "detail", "follows"}; empty if there is none."""
    gemm = sum(categories.get(name, 0.0) for name in GEMMS)
    communication = sum(categories.get(name, 0.0) for name in COMMUNICATION)
    total, kernel_sum, interval = sum(categories.values()), step["kernel_sum_ms"], step.get("interval_ms") or 0.0
    found = []

    def flag(wrong, finding, detail, follows):
        if wrong:
            found.append(_row(finding, detail, follows))

    flag(
        abs(total - kernel_sum) > 1e-3 * kernel_sum + 0.01,
        "parts that do not sum",
        f"the categories add up to {total:.3f} ms, the kernels to {kernel_sum:.3f} ms",
        "the breakdown has lost or doubled something: read no share of it",
    )
    flag(
        step["busy_ms"] > step["span_ms"] * 1.001,
        "busy longer than the step",
        f"busy {step['busy_ms']:.3f} ms in a span of {step['span_ms']:.3f} ms",
        "steps are cut wrongly",
    )
    flag(
        interval > 1.1 * tpot_ms,
        "the profiler slows the step",
        f"a profiled step takes {interval:.2f} ms, an unprofiled one {tpot_ms:.2f} ms",
        "shares hold at best; times in the trace are too long",
    )
    if weight_bound_ms is None:
        return found
    bound = weight_bound_ms + kv_bound_ms
    flag(
        bound > tpot_ms,
        "faster than its memory",
        f"reading weights and KV cache takes {bound:.2f} ms at peak, the step {tpot_ms:.2f} ms",
        "TP, batch, dtype or bandwidth are not what is assumed",
    )
    flag(
        gemm < weight_bound_ms * 0.98,
        "GEMMs below their bound",
        f"GEMM kernels take {gemm:.2f} ms, reading their weights at peak {weight_bound_ms:.2f} ms",
        "some GEMM is filed elsewhere, or the shapes are not those of the server",
    )
    if bound <= tpot_ms < communication + bound:
        found.append(room_for_weights(communication, bound, tpot_ms))
    return found


def room_for_weights(communication_ms, bound_ms, tpot_ms, how=""):
    """The row that says that so much communication leaves too little of the step to read the weights."""
    left = tpot_ms - communication_ms
    return _row(
        "communication leaves no room for the weights",
        f"{how or f'{communication_ms:.2f} ms'} of {tpot_ms:.1f} ms leaves {left:.2f} ms, less than the "
        f"{bound_ms:.2f} ms that reading the weights takes at peak",
        "not all of it can be decode communication: it holds prefill, waiting for other ranks, profiler time, overlap",
    )


def alone_exceeds(tpot_ms, micro):
    """The row for parts that take longer by themselves than the whole step; `micro` ends with the remainder."""
    parts = " + ".join(f"{row['micro_ms']:.2f} ({row['part']})" for row in micro[:-1])
    return _row(
        "parts timed alone exceed the step",
        f"{parts}, in a step of {tpot_ms:.2f} ms",
        "the server runs other kernels, or warmer ones, than those that were timed",
    )


def unpredicted(operation, counted, expected):
    """The row for an operation that a trace shows more or less often a step than the model's shape says."""
    return _row(
        "calls that the model does not predict",
        f"{operation}: {counted:g} a step, expected {expected:g}",
        "prefill among the decode steps, another parallelism, or a kernel in a wrong category",
    )


def prefill_counted(counted, expected, decode_steps, prefill_steps):
    """The row that says that all passes of a capture were divided by its decode steps; None if they were not.

    `counted` calls a step against `expected`; they give themselves away when counted is expected x passes / decode.
    """
    if not (prefill_steps and decode_steps):
        return None
    passes = decode_steps + prefill_steps
    artefact = expected * passes / decode_steps
    if round(expected) == round(counted) or abs(artefact - counted) > ROUNDING:
        return None
    return _row(
        "prefill counted as decode",
        f"{counted:g} calls a step = {expected:g} x {passes:g} / {decode_steps:g} ({artefact:.2f}): "
        f"{prefill_steps:g} prefill passes were divided among {decode_steps:g} decode steps",
        f"a decode step has {expected:g}; every time per step is too high by {100 * (passes / decode_steps - 1):.1f} % "
        "and by what a prefill pass takes longer",
    )


def prefill_call_us(mean_us, decode_us, decode_steps, prefill_steps):
    """Time of a call in prefill, us, that explains a `mean_us` over all passes when decode calls take `decode_us`."""
    return (mean_us * (decode_steps + prefill_steps) - decode_us * decode_steps) / prefill_steps


def review(campaign, model, dram_gb_s):
    """What does not close in a published campaign (a file of data/reference), worst first by what hangs on it.

    Rows {"finding", "detail", "follows"}: prefill counted as decode, an operator row added to its kernels, parts that
    do not sum, communication that leaves no room for the weights. Checks that lack figures are left out.
    """
    about, rows = campaign["campaign"], campaign.get("allreduce", [])
    kernels, operators = ([row for row in rows if row["kind"] == kind] for kind in ("kernel", "operator"))
    published = campaign.get("by_operation", {}).get("allreduce")
    step = model.step(tp=about["tp"], batch=about["batch"])
    found = [_prefill(row, step.census()["allreduce"], campaign) for row in kernels]
    if operators and kernels:
        found.append(_counted_twice(operators, kernels, published))
    found.append(_sums(rows, published, campaign))
    if kernels:
        found.append(_no_room(kernels[0]["us"], step, dram_gb_s, campaign))
    return [row for row in found if row]


def _prefill(kernel, expected, campaign):
    """`prefill_counted` of an AllReduce kernel, and what its calls in prefill took by the campaign's burst; or None."""
    steps = [campaign.get("capture", {}).get(f"{kind}_steps") for kind in ("decode", "prefill")]
    made, burst = prefill_counted(kernel["calls_per_step"], expected, *steps), campaign.get("burst")
    if made and burst:
        decode_us = 1e3 * burst["ms"] / burst["calls"]
        prefill_us = prefill_call_us(kernel["us"], decode_us, *steps)
        made["follows"] += (
            f"; at the burst price of {decode_us:.1f} us for a decode call, "
            f"prefill calls of {prefill_us:.0f} us explain {kernel['us']:g} us"
        )
    return made


def _counted_twice(operators, kernels, published_ms):
    """The row for operators whose time was added to that of the kernels that they launch."""
    low, extra = (sum(row["ms"] for row in rows) for rows in (kernels, operators))
    names, launched = (", ".join(row["name"] for row in rows) for rows in (operators, kernels))
    return _row(
        "an operator row added to its kernels",
        f"{names} ({extra:.2f} ms) is an operator: its time is that of the kernels that it launches, "
        f"{launched} ({low:.2f} ms)",
        f"the AllReduce is between {low:.2f} and {max(published_ms or 0, low + extra):.2f} ms: "
        f"{extra:.2f} ms may be in it twice",
    )


def _no_room(allreduce_us, step, dram_gb_s, campaign):
    """`room_for_weights` at this price of an AllReduce, and how fast the rest would run by the burst; or None."""
    tpot_ms, burst = campaign["headline"].get("tpot_ms"), campaign.get("burst")
    total, bound = step.burst_calls * allreduce_us / 1e3, step.ideal_ms(dram_gb_s)
    if not tpot_ms or total + bound <= tpot_ms:
        return None
    made = room_for_weights(total, bound, tpot_ms, f"{step.burst_calls} x {allreduce_us:g} us = {total:.2f} ms")
    if burst:
        rest = tpot_ms - burst["ms"]
        made["follows"] += (
            f"; at the burst price ({burst['ms']:.2f} ms) the other {rest:.2f} ms run at "
            f"{100 * bound / rest:.0f} % of the peak bandwidth"
        )
    return made


def _sums(rows, published, campaign):
    """The row for parts that do not sum beyond their rounding, or None."""
    said = []
    total = sum(row["ms"] for row in rows)
    if rows and published and abs(total - published) > ROUNDING * 0.01 * (len(rows) + 1):
        products = sum(row["calls_per_step"] * row["us"] for row in rows) / 1e3
        parts = " + ".join(f"{row['ms']:.2f}" for row in rows)
        said.append(f"{parts} = {total:.2f} (calls x us: {products:.2f}), published as {published:.2f} ms")
    kernel_sum = campaign["headline"].get("kernel_sum_ms")
    for name in ("by_operation", "by_role"):
        parts = campaign.get(name, {})
        if kernel_sum and parts and round(sum(parts.values()), 2) != kernel_sum:
            said.append(f"the table {name.replace('_', ' ')} sums to {sum(parts.values()):.2f}, not {kernel_sum} ms")
    if not said:
        return None
    return _row("parts that do not sum", "; ".join(said), "take differences under 0.2 ms in these tables for nothing")


def _row(finding, detail, follows):
    return {"finding": finding, "detail": detail, "follows": follows}
