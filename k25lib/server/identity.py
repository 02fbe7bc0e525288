"""What a running server is: version, model, flags and kernels, asked over HTTP and read from its log."""

import time
from pathlib import Path

from k25lib.server.chosen import chosen, flags, traces_folder


def identify(client, model="", log=""):
    """Facts of the server, a dict; `log` is the path of its log, if known. Raises K25Error if it can't be measured.

    `ready_ms` is the time of one 1-token completion, which is the proof of readiness.
    """
    began = time.monotonic()
    served = client.ready(model)
    ready_ms = (time.monotonic() - began) * 1000
    card = next(m for m in client.models() if m["id"] == served)
    running, waiting = client.running()
    told = _from_log(log)
    arguments = told.get("flags", {})
    facts = {
        "url": client.shown_url,
        "model": served,
        "vllm_version": client.version() or told.get("chosen", {}).get("vLLM version"),
        "max_model_len": card.get("max_model_len"),
        "ready_ms": round(ready_ms, 1),
        "requests_running": running,
        "requests_waiting": waiting,
        "tp": arguments.get("tensor_parallel_size"),
        "max_num_seqs": arguments.get("max_num_seqs"),
        "config": _config(card.get("root") or arguments.get("model")),
        **told,
    }
    return {key: value for key, value in facts.items() if value not in (None, "", {})}


def _from_log(log):
    if not log or not Path(log).is_file():
        return {}
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    traces = traces_folder(text)
    return {"flags": flags(text), "chosen": chosen(text), "traces": str(traces) if traces else None}


def _config(model):
    path = Path(str(model or "")) / "config.json"
    return str(path) if model and path.is_file() else None
