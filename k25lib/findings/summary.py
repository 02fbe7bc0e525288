"""The findings of a run, for page 1 of the report and its document; what could not be found out is said."""

from k25lib.run import Run

from . import campaigns, closure, compare, sentences, whatif
from .efficiency import dram_efficiency
from .facts import gather
from .history import history, steps_by_run

CHANGE_COLUMNS = ("metric", "unit", "before", "after", "change_percent", "low_percent", "high_percent", "verdict")


def summarise(run):
    """The findings of a run as a dict of plain values for the report.

    sentences: three, and `basis`, what they rest on
    headlines: rows name, value, low, high, spread (what low and high are), unit, source; `capture` is their capture
    closure: the waterfall in ms; contradictions: sums that can't be; micro: timed alone against the trace
    next: bottlenecks in order; whatif: ranges of what changes save, ms; efficiency: of DRAM, %
    changes: rows against the run `previous`, with `verdict` and its `meaning`; references: other campaigns
    history, history_of, steps_by_run: over the runs that can be compared
    missing: what could not be said, and why
    """
    facts = gather(run)
    missing = list(facts.missing)
    categories = {name: value["ms"] for name, value in facts.categories.items() if value["ms"] is not None}
    efficiency = _efficiency(facts)
    bounds = _bounds(facts)
    parts, impossible = [], []
    if facts.step and categories:
        tpot_ms = facts.tpot_ms if facts.is_single_stream else None
        waiting = facts.communication and facts.communication["wait_ms"]
        parts = closure.waterfall(tpot_ms, facts.step, categories, *bounds, waiting, facts.profiler_ms)
        impossible = closure.contradictions(tpot_ms, facts.step, categories, *bounds) if tpot_ms else []
        impossible += _census(run, facts)
    micro = _micro(facts, categories)
    if micro and micro[-1]["micro_ms"] < 0:
        impossible.append(closure.alone_exceeds(facts.tpot_ms, micro))
    runs = compare.readable(Run.all(run.path.parent))
    changes = _changes(run, runs)
    helps = _whatif(facts) if not facts.is_cpu else []
    if facts.is_cpu:
        missing.append("what would help, and DRAM efficiency: not computed for a CPU, which says nothing of a GPU")
    missing += changes["missing"]
    over_runs, history_of = history(run, runs)
    return {
        "sentences": [
            sentences.number(facts),
            sentences.dominates(facts, categories),
            sentences.following(facts, parts, categories, helps),
        ],
        "basis": sentences.basis(facts, categories, efficiency),
        "headlines": _headlines(facts, efficiency),
        "capture": facts.capture,
        "closure": [row | {"percent": 100 * row["ms"] / parts[-1]["ms"]} for row in parts],
        "contradictions": impossible,
        "next": whatif.next_bottlenecks(categories, None if facts.is_cpu else facts.tpot_ms),
        "whatif": [{k: v for k, v in row.items() if k not in ("cases", "text")} for row in helps],
        "micro": micro,
        "efficiency": efficiency,
        "changes": changes["rows"],
        "previous": changes["previous"],
        "verdict": changes["verdict"],
        "meaning": changes["meaning"],
        "history": over_runs,
        "history_of": history_of,
        "steps_by_run": steps_by_run(run, runs),
        "references": campaigns.beside(facts, categories, efficiency),
        "missing": missing,
    }


def _bounds(facts):
    """(weight, KV) bounds in ms at the device's peak, or (None, 0)."""
    if facts.shape is None or facts.device is None or facts.is_cpu or not facts.is_single_stream:
        return None, 0.0
    per_ms = facts.device.dram_gb_s * 1e6  # bytes
    return facts.shape.weight_bytes / per_ms, facts.shape.kv_bytes / per_ms


def _efficiency(facts):
    if facts.is_cpu or facts.shape is None or facts.device is None or not facts.tpot_ms:
        return None
    return dram_efficiency(facts.shape, facts.tpot_ms, facts.device, facts.achievable_gb_s)


def _headlines(facts, efficiency):
    rows = []

    def add(name, unit, source, value, low, high, spread):
        if value is not None:
            row = {"name": name, "value": value, "low": low, "high": high, "unit": unit}
            rows.append(row | {"spread": spread if low is not None else "", "source": source})

    def load(name, unit, level, value, column):
        low, high = (compare.number(level.get(f"{column}_{end}")) for end in ("low", "high"))
        add(
            f"{name} at C={level['concurrency']:g}", unit, "levels", compare.number(level.get(value)), low, high, "95 %"
        )

    if facts.level:
        load("TPOT", "ms", facts.level, "tpot_ms_mean", "tpot_ms")
        load("TTFT", "ms", facts.level, "ttft_ms_mean", "ttft_ms")
        load("most throughput,", "tok/s", facts.best, "output_tok_s", "output_tok_s")
    if step := facts.step:
        source = f"steps, capture {facts.capture}, batch {facts.batch}, {step['steps']} steps"
        names = {"decode step in the trace": "interval_ms" if step["interval_ms"] else "span_ms"}
        names[f"{'CPU operators' if facts.is_cpu else 'kernels'}, summed over the step"] = "kernel_sum_ms"
        for name, key in names.items():
            add(name, "ms", source, step[key], step.get(f"{key}_low"), step.get(f"{key}_high"), "nine of ten steps")
    if efficiency:
        value = efficiency["percent"]
        tpots_ms = (compare.number(facts.level.get(f"tpot_ms_{end}")) for end in ("high", "low"))
        ends = (value * facts.tpot_ms / tpot_ms if tpot_ms else None for tpot_ms in tpots_ms)
        add("DRAM efficiency", "%", efficiency["text"].split(": ", 1)[1], value, *ends, "95 %, by TPOT")
    return rows


def _micro(facts, categories):
    """What was timed alone against the trace, ms of a step: rows "part", "micro_ms" with low and high, "trace_ms",
    "from"; the remainder last."""
    rows, calls = [], facts.shape.burst_calls if facts.shape else 0

    def add(part, micro, names, source, scale=1.0):
        low, middle, high = (scale * value for value in micro)
        row = {"part": part, "micro_ms": middle, "micro_low_ms": low, "micro_high_ms": high}
        rows.append(row | {"trace_ms": sum(categories.get(name, 0) for name in names) or None, "from": source})

    if facts.gemm_ms is not None:
        add("GEMMs, cold", facts.gemm_ms, closure.GEMMS, f"gemm, M={facts.shape.batch}, quartiles")
    if facts.burst and calls:
        price = facts.burst
        ends = (price.low_us, price.us, price.high_us)
        add(f"{calls} AllReduces at the burst price", ends, closure.COMMUNICATION, price.source, calls / 1e3)
    if rows and facts.tpot_ms:
        step_ms = facts.step and (facts.step["interval_ms"] or facts.step["span_ms"])
        traced = step_ms and step_ms - sum(row["trace_ms"] or 0 for row in rows)
        rest = facts.tpot_ms - sum(row["micro_ms"] for row in rows)
        part = "the rest of the step: attention, norms, routing, launches, gaps"
        rows.append(
            {"part": part, "micro_ms": rest, "trace_ms": traced, "from": "TPOT, and the step, less those above"}
        )
    return rows


def _census(run, facts):
    """Counted calls that differ from what the model's shape predicts, as rows like those of `contradictions`."""
    table, found = run.table("census"), []
    if not {"capture", "operation", "expected", "counted"} <= set(table):
        return found
    for row in table[table["capture"] == facts.capture].drop_duplicates("operation").to_dict("records"):
        expected, counted = compare.number(row["expected"]), compare.number(row["counted"])
        if expected and counted is not None and abs(expected - counted) > closure.ROUNDING:
            found.append(closure.unpredicted(row["operation"], counted, expected))
    return found


def _whatif(facts):
    tpot_ms, made = facts.tpot_ms, []
    if not tpot_ms or not facts.is_single_stream:
        return made
    allreduce = [v for name, v in facts.categories.items() if name.startswith("allreduce") and v.get("calls")]
    calls = sum(value["calls"] for value in allreduce)
    in_place_us = 1e3 * sum(value["ms"] for value in allreduce) / calls if calls else None
    transfer_us = (facts.communication or {}).get("allreduce_transfer_us")
    if in_place_us and facts.allreduces:
        prices = {way: {price.source: price.us for price in found} for way, found in facts.allreduces.items()}
        made += whatif.other_allreduces(calls, in_place_us, prices, tpot_ms, transfer_us)[:3]
    if in_place_us:
        whole_us = transfer_us if transfer_us is not None else in_place_us
        made.append(whatif.faster_link(calls, whole_us, min(facts.link_us or 0.0, whole_us), 2, tpot_ms))
    casts = facts.categories.get("dtype_cast") or {}
    if casts.get("ms"):
        exposed = casts.get("exposed_ms")
        made.append(whatif.no_casts(casts["ms"], exposed if exposed is not None else 0.0, tpot_ms))
    if facts.shape is None or facts.device is None:
        return made
    model, tp, batch, context = facts.model, facts.shape.tp, facts.shape.batch, facts.shape.context
    dram_gb_s = facts.device.dram_gb_s
    prices = {"in the trace": in_place_us, "by its transfer in the trace": transfer_us}
    if facts.burst:
        prices[f"by {facts.burst.source}"] = facts.burst.us
    prices = {name: us for name, us in prices.items() if us}
    whole = any(gemm["sharding"] == "experts" for gemm in facts.shape.gemms)  # expert parallel already
    if tp > 1 and model.shape.experts and model.shape.experts % tp == 0 and not whole and prices and facts.alltoall:
        price = facts.alltoall
        made.append(whatif.expert_parallel(model, tp, batch, prices, price.us, dram_gb_s, tpot_ms, price.source))
    made.append(whatif.speculative(model, tp, batch, context, dram_gb_s, tpot_ms))
    return made + whatif.other_tp(model, tp, batch, context, dram_gb_s, tpot_ms, transfer_us or in_place_us)


def _changes(run, runs):
    """Changes against the newest earlier run of the same name that can be compared."""
    earlier = compare.earlier(run, runs)
    empty = {"rows": [], "previous": "", "verdict": "", "meaning": "", "missing": []}
    reasons = []
    for other in earlier:
        found = compare.compare_runs([other], [run], runs)
        if found["comparable"]:
            columns = (*CHANGE_COLUMNS, "smallest_visible_percent")
            shown = [
                row for row in found["changes"] if row["headline"] or row["metric"].startswith(("TPOT", "decode step"))
            ]
            rows = [{name: row[name] for name in columns} for row in shown]
            missing = []
            if not any(row["df"] for row in found["changes"]):
                missing = [
                    "verdicts on changes: the spread between restarts is unknown until a configuration ran twice"
                ]
            words = {"previous": other.path.name, "verdict": found["verdict"], "meaning": found["meaning"]}
            return {"rows": rows, **words, "missing": missing}
        reasons += [reason for reason in found["obstacles"] if reason not in reasons]
    why = f"{len(earlier)} earlier, none comparable: {'; '.join(reasons[:3])}" if earlier else "there is no earlier run"
    return empty | {"missing": [f"what changed: {why}"]}
