"""What a run knows, gathered from its tables for the findings; what is not there is None and told in `missing`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from k25lib import hardware
from k25lib.errors import K25Error
from k25lib.model import load_model

from . import steps
from .compare import number, usable_levels


@dataclass(frozen=True)
class Price:
    """What one call was measured to take, us, with its spread (ranks, and the quartiles of the rounds) and its row."""

    us: float
    low_us: float
    high_us: float
    source: str

    @classmethod
    def of(cls, row):
        """The price of a row of the table `collectives`."""
        us, half = float(row["time_us_median"]), (number(row.get("time_us_iqr")) or 0.0) / 2
        low, high = (number(row.get(f"time_us_{end}")) or us for end in ("min", "max"))
        counts = ((number(row.get(column)), word) for column, word in (("calls", "calls"), ("world", "ranks")))
        told = "".join(f", {count:g} {word}" for count, word in counts if count)
        return cls(us, min(low, us - half), max(high, us + half), f"{row.get('purpose', 'burst')}, {way(row)}{told}")


def way(row):
    """How a collective was called, in words: backend, mode, and the NCCL settings that its process had of its own."""
    own = row.get("environment")
    settings = json.loads(own) if isinstance(own, str) and own else {}
    words = [row["backend"], row.get("mode"), *(f"{name}={value}" for name, value in settings.items())]
    return " ".join(str(word) for word in words if word)


@dataclass
class Facts:
    """One run in numbers: the first level (single stream), one capture near it, the model's step, the device."""

    level: dict | None = None
    best: dict | None = None
    plateau: dict = field(default_factory=dict)
    capture: str = ""
    batch: str = ""
    is_single_stream: bool = True  # the capture ran at the concurrency of `level`
    is_cpu: bool = True
    profiler_ms: float | None = None  # that the profiler added to the client's TPOT while the trace was taken
    step: dict | None = None  # of the trace: kernel_sum_ms, busy_ms, span_ms, interval_ms
    categories: dict = field(default_factory=dict)  # category -> {"ms", "calls", "exposed_ms"}
    others: dict = field(default_factory=dict)  # other captures: name -> (category that leads, percent of kernel time)
    communication: dict | None = None  # paired ranks: wait_ms, transfer_ms, waits_ms, allreduce_transfer_us
    model: object = None
    shape: object = None  # the model's Step for this run: tp, batch, context
    device: hardware.Hardware | None = None
    achievable_gb_s: float | None = None
    gemm_ms: tuple | None = None  # micro: sum over the step of cold GEMMs, ms: lower quartile, median, upper quartile
    burst: Price | None = None
    alltoall: Price | None = None
    link_us: float | None = None  # the part of one AllReduce that grows with its size: S/B
    allreduces: dict = field(default_factory=dict)  # measured AllReduces of the step's size: way -> [Price]
    missing: list = field(default_factory=list)

    @property
    def tpot_ms(self):
        """The client's single-stream TPOT, ms, or None."""
        return self.level and number(self.level.get("tpot_ms_mean"))


def gather(run):
    """The Facts of a run; never raises for a table that is missing or short."""
    facts, manifest = Facts(), run.manifest
    _load(facts, run, manifest)
    gather_trace(facts, run, manifest)
    _model(facts, run, manifest)
    _micro(facts, run, manifest)
    _device(facts, run, manifest)
    return facts


def _load(facts, run, manifest):
    levels = usable_levels(run)
    if not levels:
        facts.missing.append("TPOT and throughput: no usable level of load")
        return
    facts.level = min(levels, key=lambda row: row["concurrency"])
    facts.best = max(levels, key=lambda row: number(row.get("output_tok_s")) or 0)
    facts.plateau = (manifest.get("macro") or {}).get("plateau") or {}


def gather_trace(facts, run, manifest):
    """Add what the trace of the capture nearest to a single stream says: step, categories, communication."""
    table, records = run.table("steps"), manifest.get("captures") or {}
    names, kernels = steps.captures(table), run.table("kernels")
    facts.is_cpu = (manifest.get("server") or {}).get("kind") == "embedded"
    if not names:
        facts.missing.append("the parts of a decode step: no breakdown of a trace")
        return
    wanted = facts.level["concurrency"] if facts.level else 1
    facts.capture = min(names, key=lambda name: abs((records.get(name) or {}).get("concurrency", 1) - wanted))
    record = records.get(facts.capture) or {}
    concurrency = record.get("concurrency", 1)
    if record.get("tpot_ms") and record.get("tpot_profiled_ms"):
        facts.profiler_ms = record["tpot_profiled_ms"] - record["tpot_ms"]
    facts.is_single_stream = concurrency == wanted
    if not facts.is_single_stream:
        facts.missing.append(
            f"the closure with TPOT: it was measured at C={wanted:g}, the capture at C={concurrency:g}"
        )
    if {"capture", "name"} <= set(kernels):
        own = kernels[kernels["capture"] == facts.capture]["name"].astype(str)
        facts.is_cpu = bool(own.str.startswith(("aten::", "_C::")).any())  # operators; a GPU's kernels have other names
    facts.batch = f"{wanted:g}" if facts.is_single_stream else "all"
    facts.step = steps.decode_step(table, facts.capture, facts.batch)
    if facts.step is None:
        facts.batch = "all"
        facts.step = steps.decode_step(table, facts.capture)
    if facts.step is None:
        facts.missing.append(f"the parts of a decode step: capture {facts.capture} has no whole decode step")
        return
    table = run.table("breakdown")
    facts.categories = categories_of(table, facts.capture, facts.batch)
    for name in (name for name in names if name != facts.capture):
        ms = {category: value["ms"] or 0.0 for category, value in categories_of(table, name).items()}
        if sum(ms.values()):
            facts.others[name] = (max(ms, key=ms.get), 100 * max(ms.values()) / sum(ms.values()))
    facts.communication = _communication(run.table("waits"), facts)


def categories_of(table, capture, batch="all"):
    """{category: {"ms", "calls", "exposed_ms"}} of the lowest rank of a capture, in the grouping that others fold."""
    if not {"capture", "batch", "rank", "category", "ms"} <= set(table):
        return {}
    rows = table[(table["capture"] == capture) & (table["batch"].astype(str) == batch)]
    rows = rows[rows["rank"] == rows["rank"].min()]
    if "group" in rows:
        rows = rows[rows["group"] == "fine"]
    columns = [name for name in ("ms", "calls", "exposed_ms") if name in rows]
    return {row["category"]: {name: number(row[name]) for name in columns} for row in rows.to_dict("records")}


def _communication(table, facts):
    """Collectives of the lowest rank's step, ms: wait_ms, transfer_ms; `waits_ms` of every rank; transfer of one
    AllReduce, us. Tables without ranks hold means over them."""
    if not {"capture", "op", "calls", "wait_ms", "transfer_ms"} <= set(table):
        return None
    rows = table[(table["capture"] == facts.capture) & table["transfer_ms"].notna()]
    if rows.empty:
        return None
    of_rank = rows["rank"] if "rank" in rows else rows["op"].map(lambda _: 0)
    waits_ms = rows["wait_ms"].groupby(of_rank).sum()
    rows = rows[of_rank == of_rank.min()]
    found = {name: float(rows[name].sum()) for name in ("wait_ms", "transfer_ms")}
    allreduce = rows[rows["op"] == "allreduce"]
    each_us = float(1e3 * allreduce["transfer_ms"].sum() / allreduce["calls"].sum()) if len(allreduce) else None
    return found | {"waits_ms": list(map(float, waits_ms)), "allreduce_transfer_us": each_us}


def _model(facts, run, manifest):
    server, flags = manifest.get("server") or {}, (manifest.get("environment") or {}).get("flags") or {}
    paths = [run.path / "config.json", *([Path(server["config"])] if server.get("config") else [])]
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        facts.missing.append("the bandwidth bound: the model's config.json is not known (set server.config)")
        return
    overrides = flags.get("hf_overrides")
    overrides = overrides.get("text_config", overrides) if isinstance(overrides, dict) else None
    load = (manifest.get("macro") or {}).get("settings") or {}
    context = round((load.get("input_tokens") or 0) + (load.get("output_tokens") or 0) / 2)
    replicas = flags.get("data_parallel_size") or 1
    requests = facts.level["concurrency"] if facts.level else 1
    try:
        facts.model = load_model(path, overrides)
        facts.shape = facts.model.step(
            tp=server.get("tp") or 1,
            batch=max(1, round(requests / replicas)),
            context=context,
            ep=bool(flags.get("enable_expert_parallel")),
            dp=replicas,
            kv_dtype="fp8" if "fp8" in str(flags.get("kv_cache_dtype")) else "auto",
        )
    except K25Error as error:
        facts.missing.append(f"the bandwidth bound: {error}")


def _micro(facts, run, manifest):
    gemm, collectives = run.table("gemm"), run.table("collectives")
    if {"status", "m", "calls_per_step", "time_us_median"} <= set(gemm) and facts.shape:
        rows = gemm[(gemm["status"] == "ok") & (gemm["m"] == facts.shape.batch)]
        rows = rows[rows["state"] == "cold"] if "state" in rows else rows
        rows = rows.drop_duplicates("name")
        if {g["name"] for g in facts.shape.gemms} <= set(rows["name"]):
            half = rows["time_us_iqr"].fillna(0) / 2 if "time_us_iqr" in rows else 0
            times = (rows["time_us_median"] + sign * half for sign in (-1, 0, 1))
            facts.gemm_ms = tuple(float((rows["calls_per_step"] * us).sum() / 1e3) for us in times)
    if not ({"status", "op", "bytes", "backend", "time_us_median"} <= set(collectives) and facts.shape):
        return
    if "comparable" in collectives:
        collectives = collectives[collectives["comparable"] == True]  # noqa: E712 (a column of bool or None)
    collectives = _of_ranks(facts, collectives, (manifest.get("server") or {}).get("tp"))
    if collectives is None:
        return
    size = next((c["bytes"] for c in facts.shape.collectives if c["op"] == "allreduce"), None)
    rows = collectives[(collectives["status"] == "ok") & (collectives["bytes"] == size)]
    if rows.empty:
        facts.missing.append(
            "prices of collectives: no comparable one at the model's message size (gloo shows function only)"
        )
        return
    sized = collectives[(collectives["status"] == "ok") & (collectives["op"] == "allreduce")]
    largest = sized.loc[sized["bytes"].idxmax()]
    facts.link_us = float(size * largest["time_us_median"] / largest["bytes"]) if largest["bytes"] > size else None
    for row in rows[rows["op"] == "allreduce"].to_dict("records"):
        facts.allreduces.setdefault(way(row), []).append(Price.of(row))
    for name in ("pynccl graph", "nccl graph", "nccl eager"):  # vLLM's own NCCL calls first: those a server launches
        bursts = (price for price in facts.allreduces.get(name, []) if price.source.startswith("burst"))
        facts.burst = facts.burst or next(bursts, None)
    alltoall = [Price.of(row) for row in rows[rows["op"] == "alltoall"].to_dict("records")]
    facts.alltoall = min(alltoall, key=lambda price: price.us, default=None)


def _of_ranks(facts, collectives, tp):
    """The collectives over as many ranks as the server's tensor parallelism has (all, where either is unknown); None,
    and why, where there are only others."""
    if not tp or "world" not in collectives or collectives.empty:
        return collectives
    rows = collectives[collectives["world"].isna() | (collectives["world"] == tp)]
    if not rows.empty:
        return rows
    measured = " and ".join(f"{world:g}" for world in sorted(collectives["world"].unique()))
    facts.missing.append(f"prices of collectives: measured over {measured} ranks, the server's tensor parallel is {tp}")
    return None


def _device(facts, run, manifest):
    gemm = run.table("gemm")
    measured = {name: number(gemm[name].dropna().max()) for name in ("achievable_gb_s", "peak_gb_s") if name in gemm}
    facts.achievable_gb_s = measured.get("achievable_gb_s")
    gpus = (manifest.get("environment") or {}).get("gpus") or []
    name = (gpus[0].get("name") if isinstance(gpus[0], dict) else str(gpus[0])) if gpus else ""
    if "device" in gemm and gemm["device"].notna().any():  # the server's, where it is on another machine
        name = gemm["device"].dropna().iloc[0]
    facts.device = hardware.find(name or "")
    if facts.device is None and measured.get("peak_gb_s"):
        name = name or (manifest.get("environment") or {}).get("cpu") or "this device"
        facts.device = hardware.Hardware(name, measured["peak_gb_s"], source="measured by 03_micro_gemm", measured=True)
    if facts.device is None and not facts.is_cpu:
        facts.missing.append(f"the bandwidth bound: no peak bandwidth is known for {name or 'this machine'}")
