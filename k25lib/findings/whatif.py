"""What would help, and by how much: each change as a range in ms of a decode step with what it assumes.

A positive saving shortens the step. No change is one hopeful number: every row of a range says its assumption.
"""

from functools import cache
from math import comb

import numpy as np


def distinct_experts(experts, per_token, tokens):
    """Exact probabilities P[u], u=0..E, that `tokens` tokens which each pick `per_token` at random touch u experts."""
    probability = np.zeros(experts + 1)
    probability[0] = 1.0
    draws = comb(experts, per_token)
    for _ in range(tokens):
        after = np.zeros(experts + 1)
        for touched in np.flatnonzero(probability):
            for new in range(max(0, per_token - int(touched)), per_token + 1):
                ways = comb(experts - int(touched), new) * comb(int(touched), per_token - new)
                if ways:
                    after[touched + new] += probability[touched] * (ways / draws)
        probability = after
    return probability


@cache
def slowest_rank_experts(experts, per_token, tokens, ranks):
    """Expected number of touched experts on the rank that has most, exact for uniform routing.

    The touched set is a uniform subset given its size, so P(max <= m) counts the subsets with at most m on each rank:
    the coefficients of (sum over j <= m of C(E/ranks, j) x^j)^ranks.
    """
    local = experts // ranks
    size = distinct_experts(experts, per_token, tokens)
    subsets = np.array([float(comb(experts, u)) for u in range(experts + 1)])
    choices = np.array([float(comb(local, j)) for j in range(local + 1)])
    expected = 0.0
    for most in range(local):
        ways = np.ones(1)
        for _ in range(ranks):
            ways = np.convolve(ways, choices[: most + 1])
        at_most = (size[: len(ways)] * ways / subsets[: len(ways)]).sum()
        expected += 1.0 - at_most  # E[max] = sum over m >= 0 of P(max > m)
    return expected


def imbalance_ms(model, tp, batch, dram_gb_s):
    """Extra time a step, ms, that the slowest rank of expert parallelism reads beyond its share, at `dram_gb_s`."""
    shape = model.shape
    slowest = slowest_rank_experts(shape.experts, shape.experts_per_token, batch, tp)
    spread = model.step(tp=tp, batch=batch, ep=True)
    routed = [gemm for gemm in spread.gemms if gemm["sharding"] == "experts"]
    per_expert = sum(gemm["bytes_per_step"] / gemm["matrices"] for gemm in routed)
    mean = spread.touched_experts / tp
    return (slowest - mean) * per_expert / dram_gb_s / 1e6


def replicated_attention_ms(model, tp, batch, dram_gb_s):
    """Extra time a step, ms, when each rank reads the whole attention (data parallel) instead of 1/tp of its heads.

    The batch is left as it is: with one request, its rank reads all while the others idle.
    """

    def attention(step):
        names = ("mlp", "dense", "router", "shared", "routed", "lm_head")
        return sum(gemm["bytes_per_step"] for gemm in step.gemms if not gemm["name"].startswith(names))

    return (attention(model.step(tp=1, batch=batch)) - attention(model.step(tp=tp, batch=batch))) / dram_gb_s / 1e6


def expert_parallel(model, tp, batch, allreduce_us, alltoall_us, dram_gb_s, tpot_ms, alltoall_from=""):
    """Expert parallelism in place of tensor parallelism for the experts.

    allreduce_us: {how it was priced: us}, such as {"in place": 78, "burst": 55.8}. alltoall_us: one all-to-all, and
    where that was measured.
    """
    layers = model.shape.moe_layers
    imbalance = imbalance_ms(model, tp, batch, dram_gb_s)
    attention = replicated_attention_ms(model, tp, batch, dram_gb_s)
    exchange = f"{alltoall_us:.4g} us{alltoall_from and f', {alltoall_from}'}"
    cases = []
    for price, us in allreduce_us.items():
        for count, said in ((1, "one all-to-all a layer"), (2, "dispatch and combine: two all-to-alls")):
            saving = layers * (us - count * alltoall_us) / 1e3
            base = f"AllReduce priced {price} ({us:.4g} us), {said} ({exchange})"
            cases.append((base, saving))
            cases.append((f"{base}, less the slowest rank's experts ({imbalance:.2f} ms)", saving - imbalance))
            both = f"{base}, less the slowest rank's experts and replicated attention ({attention:.1f} ms)"
            cases.append((both, saving - imbalance - attention))
    cases.append(
        ("as vLLM runs it without data parallelism: every AllReduce stays, no all-to-all, experts uneven", -imbalance)
    )
    return _range("expert parallelism", cases, tpot_ms)


def other_allreduces(calls, current_us, candidates, tpot_ms, transfer_us=None):
    """Other AllReduces against `current_us` over `calls` a step: a range for each, the one that saves most first.

    candidates: {name: {which measurement: us}}; every measurement of a name counts. transfer_us: the part of the
    current call that is transfer; the rest is waiting for other ranks, which no algorithm shortens for sure.
    """
    now = {"the whole call of the trace": current_us}
    if transfer_us is not None:
        now["its transfer alone, waiting stays"] = transfer_us
    made = []
    for name, prices in candidates.items():
        cases = [
            (f"{us:.4g} us ({measured}) against {said} ({old_us:.4g} us)", calls * (old_us - us) / 1e3)
            for measured, us in prices.items()
            for said, old_us in now.items()
        ]
        made.append(_range(f"AllReduce by {name}", cases, tpot_ms))
    return sorted(made, key=lambda row: -row["high_ms"])


def faster_link(calls, transfer_us, bandwidth_us, times, tpot_ms):
    """A link `times` as fast. bandwidth_us: the part of a call that grows with its size (S/B of a fit alpha + S/B)."""
    gain = 1 - 1 / times
    said = "the message is small: all latency, which stays"
    if bandwidth_us:
        said = f"only the part that grows with size shrinks ({bandwidth_us:.3g} us a call)"
    cases = [
        (said, calls * bandwidth_us * gain / 1e3),
        (f"the whole transfer shrinks ({transfer_us:.3g} us a call)", calls * transfer_us * gain / 1e3),
    ]
    return _range(f"a link {times:g} times as fast", cases, tpot_ms)


def no_casts(cast_ms, exposed_ms, tpot_ms):
    """No dtype casts: their kernel time at most; the part that no other kernel hides at least."""
    return _range(
        "no dtype casts",
        [("only what no other kernel hides", exposed_ms), ("all their kernel time", cast_ms)],
        tpot_ms,
    )


def speculative(model, tp, batch, context, dram_gb_s, tpot_ms, drafts=3, acceptance=(0.5, 0.8), draft_share=(0.0, 0.1)):
    """Speculative decoding: `drafts` tokens guessed and verified in one step.

    Tokens a step are (1 - a^(d+1)) / (1 - a) for an acceptance a of each draft. Verifying costs the step plus the
    bytes of the experts that d+1 tokens touch beyond those of one, at `dram_gb_s`; drafting costs `draft_share` of a
    step for each draft.
    """
    plain, verify = (model.step(tp=tp, batch=batch * n, context=context) for n in (1, drafts + 1))
    extra_ms = (verify.weight_bytes - plain.weight_bytes) / dram_gb_s / 1e6
    cases = []
    for rate in acceptance:
        for share in draft_share:
            tokens = (1 - rate ** (drafts + 1)) / (1 - rate) if rate < 1 else drafts + 1
            step_ms = tpot_ms + extra_ms + drafts * share * tpot_ms
            said = (
                f"{100 * rate:.0f} % accepted, each draft takes {100 * share:.0f} % of a step, "
                f"verifying reads {extra_ms:.2f} ms more experts"
            )
            cases.append((said, tpot_ms - step_ms / tokens))
    rates = " to ".join(f"{100 * rate:.0f}" for rate in sorted({min(acceptance), max(acceptance)}))
    return _range(f"speculative decoding ({drafts} drafts, {rates} % accepted)", cases, tpot_ms)


def other_tp(model, tp, batch, context, dram_gb_s, tpot_ms, allreduce_us=None):
    """Every other tensor parallel size up to 4 x `tp`: what the change of the bytes read does, at peak and as today.

    The AllReduce price is taken as it is today (none is left at TP=1), which flatters a larger TP.
    """
    now = model.step(tp=tp, batch=batch, context=context)
    ideal_ms, calls = now.ideal_ms(dram_gb_s), now.census().get("allreduce", 0)
    communication_ms = calls * (allreduce_us or 0) / 1e3
    stretch = max(1.0, (tpot_ms - communication_ms) / ideal_ms)
    made = []
    for size in (size for size in model.possible_tp() if size != tp and size <= 4 * tp):
        other = model.step(tp=size, batch=batch, context=context)
        change = ideal_ms - other.ideal_ms(dram_gb_s)
        freed = communication_ms if size == 1 else 0.0
        cases = [
            (f"{other.weight_bytes / 1e9:.2f} GB a rank, read at peak bandwidth", change + freed),
            (
                f"all but the communication scales with the bytes read ({stretch:.2f} times their bound)",
                change * stretch + freed,
            ),
        ]
        made.append(_range(f"tensor parallel {size} ({size} GPU{'s' * (size > 1)} a replica)", cases, tpot_ms))
    return made


def next_bottlenecks(categories, tpot_ms=None, first=4):
    """What dominates once what dominates is gone: rows {"category", "ms", "percent", "percent_without_those_before"}.

    `percent_of_tpot` is the most that removing the category could save, were none of it hidden.
    """
    order = sorted(categories.items(), key=lambda pair: -pair[1])
    total = left = sum(categories.values())
    rows = []
    for category, ms in order[:first]:
        row = {"category": category, "ms": ms, "percent": 100 * ms / total if total else 0.0}
        row["percent_without_those_before"] = 100 * ms / left if left else 0.0
        if tpot_ms:
            row["percent_of_tpot"] = 100 * ms / tpot_ms
        rows.append(row)
        left -= ms
    return rows


def _range(change, cases, tpot_ms):
    """A change as a range: {"change", "low_ms", "high_ms", in percent of TPOT, "assumes", "cases"}."""
    worst, best = min(cases, key=lambda c: c[1]), max(cases, key=lambda c: c[1])
    low, high = worst[1], best[1]
    return {
        "change": change,
        "low_ms": low,
        "high_ms": high,
        "low_percent": 100 * low / tpot_ms,
        "high_percent": 100 * high / tpot_ms,
        "assumes": f"at best: {best[0]}; at worst: {worst[0]}" if low < high else best[0],
        "cases": [{"assumes": said, "saving_ms": ms} for said, ms in cases],
        "text": f"{change[:1].upper()}{change[1:]} would save {low:+.2f} to {high:+.2f} ms a step "
        f"({100 * low / tpot_ms:+.1f} to {100 * high / tpot_ms:+.1f} % of TPOT)",
    }
