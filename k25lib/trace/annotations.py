"""What the annotations of forward passes say, by their names, and which of them an event lies in."""

import re

import numpy as np

# Plain, detailed (sq..sk..) and speculative (generation_1(4)) names of vLLM; requests in prefill and in decode
_VLLM = r"^execute(?:_\d+)?_context_(\d+)\([^)]*\)_generation_(\d+)\([^)]*\)"
_VLLM_OLD = r"^execute_new_(\d+)_cached_(\d+)"
_SGLANG = r"(?i)^(?:step\[)?(decode|target_verify|extend|prefill|draft_extend|mixed|idle)\b(?:.*?\bbs=(\d+))?"
_SGLANG_KINDS = {"decode": "decode", "target_verify": "decode", "mixed": "mixed", "idle": "dummy"}


def parse(name):
    """(style, kind, batch) of a step's annotation, or None for any other annotation."""
    if found := re.match(_VLLM, name) or re.match(_VLLM_OLD, name):
        context, generation = int(found[1]), int(found[2])
        kind = ("mixed" if generation else "prefill") if context else ("decode" if generation else "empty")
        return "vllm", kind, generation if kind == "decode" else context + generation
    if found := re.match(_SGLANG, name):
        if found[2] is None and "[" not in name:
            return None
        return "sglang", _SGLANG_KINDS.get(found[1].lower(), "prefill"), int(found[2]) if found[2] else None
    return None


def steps_of(marks):
    """(kind, batch, start, end) of the annotations that are steps, in time order; of nested styles vLLM's is taken."""
    parsed = [(parse(name), start, end) for name, start, end in marks]
    styles = {p[0] for p, _, _ in parsed if p}
    style = "vllm" if "vllm" in styles else "sglang"
    chosen = [(p[1], p[2], start, end) for p, start, end in parsed if p and p[0] == style]
    return sorted(chosen, key=lambda mark: mark[2])


def inside(marks, times):
    """Index of the last mark that has begun and not ended at each time, or -1."""
    starts, ends = (np.array([m[i] for m in marks], np.int64) for i in (2, 3))
    last = np.searchsorted(starts, times, "right") - 1
    of = np.where((last >= 0) & (times < ends[last]), last, -1)
    before = (
        (of < 0) & (last > 0) & (times < ends[np.maximum(last - 1, 0)])
    )  # an outer mark that an inner one interrupts
    of[before] = last[before] - 1
    return of
