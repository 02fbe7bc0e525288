"""The sentences of page 1: the number, what dominates, what next; each said from what is known, or as missing."""

from . import compare

CATCH_ALL = ("other", "fused_other", "unknown")
PART_OF = {  # a part of the waterfall in words that a sentence can use
    "GEMMs above reading the weights": "GEMMs beyond the time that reading their weights takes",
    "attention above reading the KV cache": "attention",
    "communication: transfer": "communication (transfer)",
    "communication: waiting for other ranks": "waiting for other ranks",
    "idle within the step": "idle time within the step",
    "between steps": "the time between steps",
}


def number(facts):
    """What a token costs and the most throughput, with intervals, in ms and tok/s."""
    if facts.level is None:
        return "The number is missing: no load was measured, so neither TPOT nor throughput is known."
    level, best = facts.level, facts.best
    said = f"One token takes {_ms(level, 'tpot_ms')} at concurrency {level['concurrency']:g} (TPOT)"
    if best is not level:
        said += f"; the most throughput is {best['output_tok_s']:,.0f} tok/s, at concurrency {best['concurrency']:g}"
        verdict = facts.plateau.get("verdict")
        words = {
            "plateau": f"; the plateau begins at {facts.plateau.get('concurrency')}",
            "still rising": ", still rising",
            "cannot tell": "; whether that is the plateau cannot be told",
        }
        said += words.get(verdict, "")
    return said + ("; measured on a CPU, it says nothing of a GPU." if facts.is_cpu else ".")


def _ms(row, name):
    value, low, high = (compare.number(row.get(f"{name}_{what}")) for what in ("mean", "low", "high"))
    if value is None:
        return "an unknown time"
    return f"{value:.2f} ms" + (f" (95 %: {low:.2f} to {high:.2f})" if low is not None and high is not None else "")


def dominates(facts, categories):
    """The largest part of the decode step and those after it, in ms, with communication split."""
    if not categories:
        return "What dominates is not known: there is no breakdown of a decode step."
    step = facts.step
    whole = step["interval_ms"] or step["span_ms"]
    (first, ms), *rest = _named(facts, categories)
    then = ", ".join(f"{_readable(name, facts)} {value:.2f} ms" for name, value in rest[:2])
    said = f"{_capital(_readable(first, facts))} dominates the decode step: {ms:.2f} of {whole:.2f} ms"
    said += f" ({100 * ms / whole:.0f} %"
    if step["interval_ms"]:
        said += f"; nine of ten steps take {step['interval_ms_low']:.2f} to {step['interval_ms_high']:.2f} ms"
    said += f"){then and f', then {then}'}"
    if facts.is_cpu:
        return said + "."
    if facts.communication:
        wait, transfer = facts.communication["wait_ms"], facts.communication["transfer_ms"]
        said += f"; communication is {transfer:.2f} ms of transfer and {wait:.2f} ms of waiting for other ranks"
    for name, (category, percent) in facts.others.items():
        if category != first:
            said += f"; in capture {name} {_readable(category, facts)} leads ({percent:.0f} % of kernel time)"
    return said + "."


def basis(facts, categories, efficiency):
    """What the sentences rest on: the capture, its steps and ranks, and the bytes behind the efficiency; or ''."""
    parts = []
    if categories:
        step, total = facts.step, sum(categories.values())
        parts.append(f"the decode step is that of capture {facts.capture}, batch {facts.batch}")
        parts.append(f"mean of {step['steps']} steps on rank {step['rank']}")
        if facts.is_cpu:
            parts.append(f"CPU operators by their own time, {total:.2f} ms in all: there are no GPU kernels")
        elif total > step["busy_ms"] * 1.01:
            parts.append(f"kernels overlap and add up to {total:.2f} ms")
        if facts.communication and len(waits := facts.communication["waits_ms"]) > 1 and not facts.is_cpu:
            parts.append(f"waiting is {min(waits):.2f} to {max(waits):.2f} ms over {len(waits)} ranks")
    if efficiency:
        total_gb = (efficiency["weight_bytes"] + efficiency["kv_bytes"]) / 1e9
        parts.append(
            f"DRAM efficiency is {efficiency['percent']:.1f} % ({total_gb:.3f} GB a rank at "
            f"{efficiency['dram_gb_s'] / 1e3:.3f} TB/s, {efficiency['context']} tokens of context)"
        )
    return _capital("; ".join(parts)) + "." if parts else ""


def _named(facts, categories):
    """Categories that say what they are, and the time without any kernel, largest first."""
    step = facts.step
    idle = (step["interval_ms"] or step["span_ms"]) - step["busy_ms"]
    parts = {name: ms for name, ms in categories.items() if name not in CATCH_ALL} | {"idle": max(0.0, idle)}
    return sorted(parts.items(), key=lambda pair: -pair[1])


def following(facts, parts, categories, helps):
    """The ceiling of the largest part in ms, the part after it, and the change that gives most in its worst case."""
    if not parts:
        return "What next is not known: without a breakdown there is no ceiling."
    if facts.is_cpu:
        (first, ms), *rest = _named(facts, categories)
        after = f"; after it comes {_readable(rest[0][0], facts)}, {rest[0][1]:.2f} ms" if rest else ""
        return f"Next, on this CPU only: {_readable(first, facts)}, with a ceiling of {ms:.2f} ms a step{after}."
    total, whole = parts[-1]["ms"], "TPOT" if parts[-1]["from"] == "client" else "the step"
    order = sorted((row for row in parts if row["kind"] == "part"), key=lambda row: -row["ms"])[:2]
    names = [PART_OF.get(row["part"], row["part"]) for row in order]
    said = (
        f"Next: {names[0]}, with a ceiling of {order[0]['ms']:.2f} ms ({100 * order[0]['ms'] / total:.0f} % of {whole})"
    )
    said += f"; after it comes {names[1]}, {order[1]['ms']:.2f} ms"
    sure = [row for row in helps if row["low_ms"] > 0]
    if sure:
        best = max(sure, key=lambda row: row["low_ms"])
        said += (
            f". Of the changes that were weighed, {best['change']} gives most in the worst case: "
            f"{best['low_ms']:.2f} to {best['high_ms']:.2f} ms"
        )
    return said + "."


def _readable(category, facts):
    words = {
        "allreduce_nccl": "AllReduce (NCCL)",
        "allreduce_custom": "AllReduce" if facts.is_cpu else "AllReduce (custom)",
        "allreduce": "AllReduce",
        "idle": "time between operators (Python, dispatch)" if facts.is_cpu else "time in which no kernel runs",
    }
    return words.get(category) or category.replace("_", " ").replace("moe", "MoE").replace("gemm", "GEMM")


def _capital(text):
    return text[:1].upper() + text[1:]
