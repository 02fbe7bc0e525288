"""DRAM efficiency: how near a decode step is to the time that reading its bytes takes, with everything it rests on."""


def dram_efficiency(step, tpot_ms, hardware, achievable_gb_s=None):
    """Share of the memory bandwidth that a step uses, in percent, with bytes, bandwidths and context beside it.

    step: the model's Step (its `context` says how much KV cache is counted). Percent of the peak, and of
    `achievable_gb_s` (a measured read or copy) where that is known.
    """
    total = step.weight_bytes + step.kv_bytes
    ideal_ms = step.ideal_ms(hardware.dram_gb_s)
    percent = 100 * ideal_ms / tpot_ms
    label = "measured" if hardware.measured else "peak"
    text = (
        f"DRAM efficiency {percent:.1f} %: {total / 1e9:.3f} GB a step and rank "
        f"({step.context} tokens of context) at {hardware.dram_gb_s / 1e3:.3f} TB/s ({hardware.name}, {label}) "
        f"take {ideal_ms:.3f} ms of {tpot_ms:.2f} ms"
    )
    result = {
        "percent": percent,
        "weight_bytes": step.weight_bytes,
        "kv_bytes": step.kv_bytes,
        "context": step.context,
        "batch": step.batch,
        "dram_gb_s": hardware.dram_gb_s,
        "hardware": hardware.name,
        "source": hardware.source,
        "ideal_ms": ideal_ms,
        "achieved_gb_s": total / tpot_ms / 1e6,
        "achievable_gb_s": achievable_gb_s,
        "percent_of_achievable": None,
    }
    if achievable_gb_s:
        result["percent_of_achievable"] = 100 * step.ideal_ms(achievable_gb_s) / tpot_ms
        share, tb_s = result["percent_of_achievable"], achievable_gb_s / 1e3
        text += f"; {share:.1f} % of the {tb_s:.3f} TB/s that a read or a copy reaches"
    return {**result, "text": text}


def inputs_for(percent, tpot_ms, step, bandwidths_gb_s, extra_bytes=None):
    """Inputs under which a published efficiency of `percent` comes out: rows {"inputs", "bytes", "dram_gb_s", ...}.

    Weights alone at another bandwidth, or more context at each of `bandwidths_gb_s`; `extra_bytes` {what: bytes} are
    things that someone may have counted besides.
    """
    ideal_ms = percent / 100 * tpot_ms
    weights = step.weight_bytes
    bandwidth = weights / ideal_ms / 1e6
    rows = [
        {
            "inputs": f"weights alone, at {bandwidth / 1e3:.3f} TB/s",
            "bytes": weights,
            "dram_gb_s": bandwidth,
            "context_bf16": 0,
            "context_fp8": 0,
        }
    ]
    cases = [(gb_s, what, extra) for gb_s in bandwidths_gb_s for what, extra in {"": 0, **(extra_bytes or {})}.items()]
    for gb_s, what, extra in cases:
        needed = ideal_ms * gb_s * 1e6
        tokens = (needed - weights - extra) / (step.kv_bytes_per_token * step.batch)
        if tokens < 0:
            continue
        rows.append(
            {
                "inputs": f"{gb_s / 1e3:.3f} TB/s, weights{what and f', {what}'}, {tokens:,.0f} tokens of KV cache",
                "bytes": needed,
                "dram_gb_s": gb_s,
                "context_bf16": tokens,
                "context_fp8": 2 * tokens,
            }
        )
    return rows
