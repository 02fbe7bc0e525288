"""Published campaigns (data/reference), to set a run beside: as published, what dominates, and what comes after it."""

import tomllib

from k25lib.run import PROJECT

from .whatif import next_bottlenecks


def references(folder=PROJECT / "data" / "reference"):
    """All published campaigns as {name of the file: its tables}."""
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}


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
