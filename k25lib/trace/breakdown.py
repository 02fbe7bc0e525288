"""Where the time of a decode step goes: files of one capture -> one result (schema k25.breakdown/1), and its tables."""

from pathlib import Path

from k25lib.errors import K25Error, UsageError
from k25lib.trace import decode, ranks, text_table
from k25lib.trace.categories import GROUPS, Categories
from k25lib.trace.files import find_files, peek
from k25lib.trace.table import loss

SCHEMA = "k25.breakdown/1"
CENSUS_CATEGORIES = ("moe_gemm", "attention", "gemm")
WRAPPERS = ("vllm::unified_",)  # operators whose work is an operator inside: counted only where no such one is seen


def breakdown(paths, group="fine", categories=None, session=None):
    """Files and folders of one capture -> dict of schema k25.breakdown/1; times are ms per decode step of a rank.

    `group` is "fine", "operation" or "role"; `categories` a TOML file of rules tried before our own. Where the paths
    hold several sessions, they are told apart and `session` (a number from capture.sessions; default the newest) is
    broken down. Ranks are read in parallel by joblib, on whatever backend is active
    (joblib.parallel_config(backend="dask") spreads them over a cluster).
    Raises K25Error if there is nothing to read, UsageError for a bad argument.
    """
    if group not in GROUPS:
        raise UsageError(f"no grouping {group!r}; take one of {', '.join(GROUPS)}")
    Categories(categories)  # tell about bad rules before reading
    traces, tables = find_files(paths)
    peeks, losses = [], []
    for path in traces:
        try:
            peeks += peek(path)
        except K25Error as error:
            losses.append(loss(path, "unreadable file", 1, str(error)))
    ranks.identify(peeks)
    groups = ranks.sessions(peeks)
    chosen, told = _choose(groups, session)
    losses += told
    measured = []
    for known, result in _measure_all(chosen, group, categories):
        if "error" in result:
            losses.append(loss(known["path"], "unreadable file", 1, result["error"]))
        else:
            losses += known.get("losses", [])
            result["meta"]["world_size"] = result["meta"]["world_size"] or known["world_size"]
            measured.append(result | {key: known.get(key) for key in ("rank", "rank_from", "place", "doubt")})
    if not measured:
        if tables:
            rules = Categories(categories)
            return {
                "schema": SCHEMA,
                **text_table.totals(tables, losses, lambda name: rules.fold(rules.category(name), group)),
                "group": group,
            }
        raise K25Error("; ".join(told["detail"] for told in losses) or "no trace files")
    kinds = {m["kind"] for m in measured}
    if len(kinds) > 1:  # a GPU capture with a rank that lost its GPU events: operators are never added to kernels
        for m in [m for m in measured if m["kind"] == "cpu"]:
            losses.append(loss(m["path"], "no GPU events", 1, "CPU operators only; left out beside the GPU ranks"))
        measured = [m for m in measured if m["kind"] == "gpu"]
    measured.sort(key=lambda m: (m["rank"], m["path"]))
    result = _result(measured, groups, chosen, losses, tables if chosen is groups[-1] else [])
    return result | {"group": group, "census": census(result)}


def _choose(groups, session):
    if session is not None and not 0 <= session < len(groups):
        raise UsageError(f"no session {session}: there are {len(groups)}, numbered from 0")
    if not groups:
        return [], []
    index = len(groups) - 1 if session is None else session
    others = [p["path"] for i, g in enumerate(groups) if i != index for p in g]
    detail = f"files of {len(groups) - 1} other sessions here, not merged; --session 0..{len(groups) - 1} picks one"
    return groups[index], [loss(Path(others[0]).parent, "other sessions", len(others), detail)] if others else []


def _measure_all(chosen, group, categories):
    """(what is known of it, its measures) of every rank; the GPUs of a Kineto file with several are a rank each."""
    found = list(zip(chosen, _in_parallel(chosen, group, categories), strict=True))
    width = max((len(result.get("devices", ())) for _, result in found), default=0)
    if not width:
        return found
    found = [(known | {"rank": known["rank"] * width}, result) for known, result in found]
    placed = []
    for known, devices in ((known, result["devices"]) for known, result in found if "devices" in result):
        detail = f"kernels of GPUs {', '.join(map(str, devices))} in one file: each is taken for a rank"
        told = [*known.get("losses", []), loss(known["path"], "several devices", len(devices), detail)]
        place = ranks.place(known)
        for i, device in enumerate(devices):
            own = {"rank": known["rank"] + i, "rank_from": "deviceId", "device": device, "losses": [] if i else told}
            placed.append(known | own | {"place": place | {"tp": place.get("tp", 0) * width + i}})
    rest = [(known, result) for known, result in found if "devices" not in result]
    return [*rest, *zip(placed, _in_parallel(placed, group, categories), strict=True)]


def _in_parallel(chosen, group, categories):
    jobs = [(known["path"], group, categories, known.get("device")) for known in chosen]
    if len(jobs) < 2:
        return [_measure(*job) for job in jobs]
    import joblib  # costs as much as reading a small file, so only where there is something to share out

    workers = min(len(jobs), joblib.effective_n_jobs(-1))
    return joblib.Parallel(n_jobs=workers)(joblib.delayed(_measure)(*job) for job in jobs)


def _measure(*job):
    try:
        return decode.measure(*job)
    except K25Error as error:
        return {"error": str(error)}


def _result(measured, groups, chosen, losses, tables):
    lead = measured[0]
    capture = _capture(measured, groups, chosen)
    losses += [told for m in measured for told in _told(m)] + _told_of_ranks(capture, lead)
    collectives, skew, told = ranks.pair([lead] if capture["clashes"] else measured)
    losses += told
    checks = text_table.cross_check(measured, tables, losses)

    def of_ranks(key):
        return [{"rank": m["rank"], **row} for m in measured for row in m[key]]

    return {
        "schema": SCHEMA,
        "capture": capture,
        "losses": losses,
        "steps": {
            "found_by": lead["found_by"],
            **lead["counts"],
            "measured": lead["measured"],
            "by_batch": lead["by_batch"],
            "by_rank": [{"rank": m["rank"], "found_by": m["found_by"], **m["counts"]} for m in measured],
        },
        "per_step": [
            {"rank": m["rank"], **row, "file": Path(m["path"]).name} for m in measured for row in m["per_step"]
        ],
        "categories": of_ranks("categories"),
        "kernels": of_ranks("kernels"),
        "unknown": _unknown(measured),
        "census": [],
        "collectives": collectives,
        "skew": skew,
        "by_kind": of_ranks("by_kind"),
        "cross_check": checks,
        "passes": of_ranks("steps"),
    }


def _capture(measured, groups, chosen):
    """What the files are a capture of: ranks that are there, missing or claimed twice, parallelism, sessions, time."""
    kind, rank_of = measured[0]["kind"], [m["rank"] for m in measured]
    world = max([m["meta"]["world_size"] or 0 for m in measured] + [max(rank_of) + 1])
    return {
        "kind": kind,
        "note": "CPU operators, self time" if kind == "cpu" else "GPU kernels",
        "files": len({m["path"] for m in measured}),
        "ranks": rank_of,
        "world_size": world,
        "missing_ranks": sorted(set(range(world)) - set(rank_of)),
        "clashes": [
            {"rank": r, "files": [m["path"] for m in measured if m["rank"] == r]}
            for r in sorted(set(rank_of))
            if rank_of.count(r) > 1
        ],
        "parallel": _parallel(measured),
        "devices": [
            {"rank": m["rank"], "device": m["meta"]["device"], "pid": m["meta"]["pid"]}
            for m in measured
            if "device" in m["meta"]
        ],
        "sessions": [
            {"session": i, "files": [p["path"] for p in g], "ranks": [p["rank"] for p in g], "used": g is chosen}
            for i, g in enumerate(groups)
        ],
        "start_ns": min(m["start_ns"] for m in measured),
        "end_ns": max(m["end_ns"] for m in measured),
    }


def _told(m):
    """The losses of one rank's file."""
    yield from m["losses"]
    if m["rank_from"] not in ("distributedInfo", "deviceId"):
        detail = f"{m['doubt'] or 'no distributedInfo'}: rank {m['rank']} from {m['rank_from']}"
        yield loss(m["path"], "rank from name", 1, detail)
    elif m["doubt"]:
        yield loss(m["path"], "rank in doubt", 1, m["doubt"])
    if not m["per_step"]:
        detail = "no whole decode step found: figures per step cannot be given"
        yield loss(m["path"], "no decode steps", 1, detail)
    if m["outside"]:
        yield loss(m["path"], "outside steps", m["outside"], "kernels that belong to no pass, in no figure")


def _told_of_ranks(capture, lead):
    """Ranks that several files claim, and those that no file is of, as losses."""
    told = []
    for clash in capture["clashes"]:
        files = clash["files"]
        detail = f"{len(files)} files claim rank {clash['rank']}; all are kept, and collectives are not paired"
        told.append(loss(files[-1], "rank clash", len(files), detail))
    if missing := capture["missing_ranks"]:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        told.append(loss(Path(lead["path"]).parent, "missing ranks", len(missing), f"no trace of ranks {some}"))
    return told


def _parallel(measured):
    """Sizes of data, pipeline and tensor parallelism as file and process names tell them, and whether experts are
    (`ep`): only the process's name can tell that."""
    told = [ranks.place(m) or ranks.fields(m["meta"]["process"] or "") for m in measured]
    sizes = {k: 1 + max(t.get(k, 0) for t in told) for k in ("dp", "pp", "tp")}
    return sizes | {"ep": any("_EP" in (m["meta"]["process"] or "") for m in measured)}


def _unknown(measured):
    """Kernels that no rule knows, by time: a mean over the ranks."""
    total = {}
    for m in measured:
        for row in m["kernels"]:
            if row["fine"] == "unknown":
                calls, ms = total.get(row["name"], (0.0, 0.0))
                total[row["name"]] = (calls + row["calls"] / len(measured), ms + row["ms"] / len(measured))
    return [{"name": n, "calls": c, "ms": t} for n, (c, t) in sorted(total.items(), key=lambda item: -item[1][1])]


def census(result, expected=None):
    """Counted calls per decode step of the lowest rank against the model's, from a result: rows of operation, expected,
    counted (and the difference, where they differ). `expected` maps operations or fine categories to calls per step."""
    lead, counted = min(result["capture"]["ranks"]), {}
    rows = [row for row in result["kernels"] if row["rank"] == lead]
    inner = {row["fine"] for row in rows if not row["name"].startswith(WRAPPERS)}
    for row in rows:
        if not row["name"].startswith(WRAPPERS) or row["fine"] not in inner:
            counted[row["fine"]] = counted.get(row["fine"], 0.0) + row["calls"]
    collectives = {row["op"]: row["calls"] for row in result["skew"] if row["rank"] == lead and row["calls"]}
    counted |= collectives
    rows = []
    for operation in dict.fromkeys([*(expected or {}), *collectives, *(c for c in CENSUS_CATEGORIES if c in counted)]):
        want, have = (expected or {}).get(operation), counted.get(operation, 0.0)
        rows.append({"operation": operation, "expected": want, "counted": have})
        if want is not None and abs(have - want) > 0.005:
            rows[-1]["difference"] = have - want
    return rows


def expected_calls(result, config, tp=None, overrides=None):
    """Calls per decode step that the model's shape predicts, for `census`: of a config.json, cut as the traces tell."""
    from k25lib.model import load_model

    told = result["capture"].get("parallel", {"tp": 1, "dp": 1, "ep": False})
    step = load_model(config, overrides).step(
        tp=told["tp"] if tp is None else tp, batch=1, ep=told["ep"], dp=told["dp"]
    )
    return step.census(result["capture"]["kind"])


def fold(result, group, categories=None):
    """The rows of a `fine` result's categories in another grouping: rank, batch, category, calls, ms, percent."""
    rules, cells = Categories(categories), {}
    for row in result["categories"]:
        key = (row["rank"], row["batch"], rules.fold(row["category"], group))
        cell = cells.setdefault(
            key, dict(zip(("rank", "batch", "category"), key, strict=True), calls=0.0, ms=0.0, percent=0.0)
        )
        for name in ("calls", "ms", "percent"):
            cell[name] += row[name]
    return sorted(cells.values(), key=lambda row: (row["rank"], str(row["batch"]), -row["ms"]))


def tables(result, capture=""):
    """The run's tables of one result: {"steps", "breakdown", "kernels", "census", "waits"} -> rows with `capture`."""

    def rows(key):
        return [{"capture": capture, **row} for row in result[key]]

    return {
        "steps": rows("passes"),
        "breakdown": [{**row, "batch": str(row["batch"]), "group": result["group"]} for row in rows("categories")],
        "kernels": rows("kernels"),
        "census": rows("census"),
        "waits": rows("skew"),
    }
