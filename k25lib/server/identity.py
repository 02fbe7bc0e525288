"""What a running server is: version, model, flags and kernels, asked over HTTP and read from its log."""

import contextlib
import json
import shutil
import time
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from k25lib.server import process
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


def discover(url):
    """What this machine tells of the server at `url`: python, log, traces; {} if it is another machine's, or hidden."""
    parts = urlsplit(url)
    if not _is_here(parts.hostname):
        return {}
    found = process.find(parts.port or (443 if parts.scheme == "https" else 80))
    if not found:
        return {}
    told = {"python": _interpreter(found), "log": found["log"], "traces": str(_profiler_folder(found) or "")}
    return {name: value for name, value in told.items() if value}


def keep_config(config, arguments, target):
    """Write the model's config.json as it is served, with the server's hf_overrides in it, to `target`; returns it."""
    kept = json.loads(Path(config).read_text(encoding="utf-8"))
    overrides = arguments.get("hf_overrides")
    _merge(kept, overrides if isinstance(overrides, dict) else {})
    Path(target).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return str(target)


def _merge(into, values):
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _interpreter(found):
    """The Python that a process runs, by its full path as it was called (a virtual environment's, not its base's)."""
    word = found["argv"][0] if found["argv"] else ""
    if not Path(word).name.startswith("python"):
        return ""
    try:
        path = process.environment(found["pid"]).get("PATH")
    except OSError:  # another user's process
        path = None
    return shutil.which(word, path=path) or ""


def _is_here(host):
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _profiler_folder(found):
    """The folder of vLLM's torch profiler from a process's arguments, environment or log; None if it has none."""
    argv = found["argv"]
    words = [w.partition("=")[2] for w in argv if w.startswith("--profiler-config=")]
    words += [argv[n + 1] for n, w in enumerate(argv[:-1]) if w == "--profiler-config"]
    folder = None
    for word in words:
        try:
            folder = json.loads(word).get("torch_profiler_dir")
        except (ValueError, AttributeError):
            continue
    with contextlib.suppress(OSError):  # another user's process
        folder = folder or process.environment(found["pid"]).get("VLLM_TORCH_PROFILER_DIR")
    if not folder and found["log"]:
        folder = traces_folder(Path(found["log"]).read_text(encoding="utf-8", errors="replace"))
    return Path(found["cwd"]) / folder if folder else None


def _from_log(log):
    if not log or not Path(log).is_file():
        return {}
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    traces = traces_folder(text)
    return {"flags": flags(text), "chosen": chosen(text), "traces": str(traces) if traces else None}


def _config(model):
    path = Path(str(model or "")) / "config.json"
    return str(path) if model and path.is_file() else None
