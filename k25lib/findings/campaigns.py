"""Published campaigns (data/reference), to set a run beside: as published, what dominates, and what comes after it."""

import tomllib

from k25lib import hardware
from k25lib.errors import UsageError
from k25lib.model import load_model
from k25lib.run import PROJECT

from .closure import review
from .efficiency import dram_efficiency, inputs_for
from .whatif import expert_parallel, next_bottlenecks

FOLDER = PROJECT / "data" / "reference"
OTHER_DRAM_GB_S = 1597  # quoted for a Server Edition of the RTX PRO 6000, not confirmed by its maker


def references():
    """All published campaigns as {name of the file: its tables}."""
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}


def examine(name):
    """One published campaign by its own figures: what does not close, its DRAM efficiency, what would have helped.

    {"campaign", "contradictions", "efficiency", "inputs": what gives the published efficiency, "whatif", "next"}; parts
    that lack figures are empty. Raises UsageError for a name that is not in data/reference.
    """
    known = references()
    if name not in known:
        raise UsageError(f"no published campaign {name!r}; there are {', '.join(known)}")
    campaign = known[name]
    about, headline = campaign["campaign"], campaign["headline"]
    found = {"campaign": about, "contradictions": [], "efficiency": None, "inputs": [], "whatif": []}
    shares = campaign.get("shares", {})
    rest = {"everything else": 100 - sum(shares.values())} if shares else {}
    found["next"] = next_bottlenecks(campaign.get("by_role") or {**shares, **rest})
    if "config" not in about:
        return found
    model, device = load_model(FOLDER / about["config"]), hardware.find(about["hardware"])
    tp, batch, tpot_ms = about["tp"], about["batch"], headline["tpot_ms"]
    step = model.step(tp=tp, batch=batch)
    shard = {"the embedding shard": model.shape.embedding_parameters // tp * model.dtype.bits // 8}
    bandwidths = [OTHER_DRAM_GB_S, device.dram_gb_s]
    prices = {"in place": next(row["us"] for row in campaign["allreduce"] if row["kind"] == "kernel")}
    prices["in a burst"] = 1e3 * campaign["burst"]["ms"] / campaign["burst"]["calls"]
    alltoall_us = campaign["alltoall"]["us"]
    return found | {
        "contradictions": review(campaign, model, device.dram_gb_s),
        "efficiency": dram_efficiency(step, tpot_ms, device),
        "inputs": inputs_for(headline["dram_efficiency_percent"], tpot_ms, step, bandwidths, shard),
        "whatif": [expert_parallel(model, tp, batch, prices, alltoall_us, device.dram_gb_s, tpot_ms)],
    }


def beside(facts, categories, efficiency):
    """This run and every published campaign, a row each; what was not published is None.

    `next` is the masked bottleneck: what dominates once what dominates is gone, with its share of what is left.
    Campaigns differ in machine, model and method: the rows tell what kind of bottleneck each had, not which is faster.
    """
    order = next_bottlenecks(categories, first=2)
    mine = {
        "campaign": "this run",
        "hardware": facts.device.name if facts.device else None,
        "tpot_ms": facts.tpot_ms,
        "most_output_tok_s": facts.best["output_tok_s"] if facts.best else None,
        "dram_efficiency_percent": efficiency["percent"] if efficiency else None,
        **_dominant(order),
    }
    return [mine, *(_row(campaign) for campaign in references().values())]


def _row(campaign):
    about, headline = campaign["campaign"], campaign.get("headline", {})
    if "by_operation" in campaign:
        order = next_bottlenecks({k: v for k, v in campaign["by_operation"].items() if k != "other"}, first=2)
        total = sum(campaign["by_operation"].values())
        order = [row | {"percent": 100 * row["ms"] / total} for row in order]
    else:
        order = [{"category": name, "percent": percent} for name, percent in campaign.get("shares", {}).items()]
    return {
        "campaign": about["name"],
        "hardware": f"{about['gpus']}x {about['hardware']}",
        "tpot_ms": headline.get("tpot_ms"),
        "most_output_tok_s": headline.get("output_tok_s"),
        "dram_efficiency_percent": headline.get("dram_efficiency_percent"),
        **_dominant(order),
    }


def _dominant(order):
    first, second = (order + [{}, {}])[:2]
    return {
        "dominant": first.get("category"),
        "dominant_percent": first.get("percent"),
        "next": second.get("category"),
        "next_percent_without_it": second.get("percent_without_those_before"),
    }
