"""What to time: the rows that a model's decode step asks for, as tasks of the two workers."""

from k25lib.errors import UsageError

VARIANTS = [
    {},
    *({"NCCL_ALGO": a, "NCCL_PROTO": p} for a in ("Ring", "Tree") for p in ("LL", "LL128", "Simple")),
    {"NCCL_GRAPH_MIXING_SUPPORT": "0"},  # no event node after each call of a CUDA graph
]
SERVER_BACKENDS = ("pynccl", "custom", "symm_mem")
SINGLE_CALLS = 20  # back to back, as nccl-tests does
MOST_BYTES = 2**28  # all buffers of one row together


def checked_batches(batches):
    """The batch sizes, each once, in their order. Raises UsageError where there is none, or one is no whole number."""
    if not isinstance(batches, (list, tuple)) or not batches or any(type(m) is not int or m < 1 for m in batches):
        raise UsageError(f"batches are whole numbers from 1, at least one, not {batches!r}")
    return list(dict.fromkeys(batches))


def gemm_tasks(model, tp, batches, states=("cold", "warm"), only=""):
    """One task per GEMM of the decode step on one of `tp` ranks, batch size and cache state.

    Grouped GEMMs carry the number of experts, top-k and their role. `only`: words, comma-separated, that names hold.
    """
    batches = checked_batches(batches)
    if not states or set(states) - {"cold", "warm"}:
        raise UsageError(f"states are cold, warm or both, not {states!r}")
    words = [word.strip() for word in only.split(",") if word.strip()]
    tasks = []
    steps = {batch: model.step(tp=tp, batch=batch).gemms for batch in batches}
    for number, first in enumerate(steps[batches[0]]):
        if words and not any(word in first["name"] for word in words):
            continue
        for batch in batches:
            tasks += [_gemm_task(model, steps[batch][number], tp, batch, state) for state in states]
    return tasks


def _gemm_task(model, gemm, tp, batch, state):
    task = {
        "name": gemm["name"], "m": batch, "n": gemm["n"], "k": gemm["k"], "batch": gemm["matrices"],
        "dtype": gemm["dtype"], "group_size": gemm["group_size"], "state": state, "tp": tp,
        "calls_per_step": gemm["calls_per_step"], "sharding": gemm["sharding"], "category": gemm["category"],
    }  # fmt: skip
    if gemm["category"] == "moe_gemm":
        role = "down" if gemm["name"].endswith("down") else "gate_up"
        task |= {"experts": model.shape.experts, "top_k": model.shape.experts_per_token, "role": role}
    return task


def collective_tasks(model, world, batches, gpu, variants=True):
    """The collectives of a decode step over `world` ranks: bursts, sizes, expert parallelism, the price in place.

    gpu: NCCL, CUDA graphs, vLLM's own backends and NCCL's variants; without, gloo, which shows function only.
    """
    batches = checked_batches(batches)
    if type(world) is not int or world < 1:
        raise UsageError(f"world is a whole number of ranks from 1, not {world!r}")
    layers = len(model.shape.layers)
    burst, token_bytes = 2 * layers, model.shape.hidden * model.dtype.bits // 8
    backend, mode = ("nccl", "graph") if gpu else ("gloo", "eager")
    first = batches[0]
    tasks = []

    def add(purpose, op, size, calls=SINGLE_CALLS, **more):
        calls = max(1, min(calls, MOST_BYTES // size))
        row = {"purpose": purpose, "op": op, "bytes": size, "calls": calls, "mode": mode, "backend": backend}
        tasks.append(row | more)

    for batch in (first, *(b for b in (64,) if b in batches and b != first)):
        for how in ("eager", "graph") if gpu else ("eager",):
            add("burst", "allreduce", batch * token_bytes, burst, mode=how, batch=batch)
        for name in SERVER_BACKENDS:
            add("burst", "allreduce", batch * token_bytes, burst, backend=name, batch=batch)
    row_k = next((m.k for layer in model.shape.layers for m in layer if m.name == "o_proj"), model.shape.hidden)
    shape = [first, model.shape.hidden, row_k // world if row_k % world == 0 else row_k]
    calls = burst if gpu else SINGLE_CALLS  # a CPU would take minutes for that many GEMMs
    add("in place", "allreduce", first * token_bytes, calls, batch=first, gemm=shape, calls_per_step=burst)
    for batch in batches:
        add("sizes", "allreduce", batch * token_bytes, batch=batch)
    for power in range(10, 27 if gpu else 21, 2):
        add("sizes", "allreduce", 2**power)
    top_k = model.shape.experts_per_token
    for batch in batches:
        size = batch * token_bytes
        add("expert parallel", "allgather", size * world, batch=batch)
        add("expert parallel", "reducescatter", size * world, batch=batch)
        for part in sorted({size, size * max(1, top_k)}):  # the AllReduce's own bytes; a copy for each chosen expert
            add("expert parallel", "alltoall", part, batch=batch)
        add("expert parallel", "dispatch+combine", size * max(1, top_k), batch=batch)
    if gpu and variants:
        for environment in VARIANTS:
            add("variant", "allreduce", first * token_bytes, burst, batch=first, environment=environment)
            add("variant", "allreduce", 2**20, environment=environment)
    return tasks
