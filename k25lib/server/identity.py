"""What a running server is: version, model, flags and kernels, asked over HTTP and read from its log."""

import contextlib
import json
import shutil
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from k25lib.server import process
from k25lib.server.chosen import chosen, flags, profiler


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
    """What this machine tells of the server at `url`: python, log, traces, stacks (whether its profiler records them);
    {} if it is another machine's, or hidden."""
    found = is_here(url) and process.find(process.port_of(url))
    if not found:
        return {}
    told = {"python": _interpreter(found), "log": found["log"], **_profiler(found)}
    return {name: value for name, value in told.items() if value != ""}


def is_here(url):
    """Whether the host of `url` is this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(address)  # only an address of our own can be
    except OSError:
        return False
    return True


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
    """What the Python of a process is called with: its full path as it was called (a virtual environment's, not its
    base's), or a command into its container."""
    if found["container"]:
        return f"docker exec -i {found['container']} python3"
    word = found["argv"][0] if found["argv"] else ""
    if not Path(word).name.startswith("python"):
        return ""
    try:
        path = process.environment(found["pid"]).get("PATH")
    except OSError:  # another user's process
        path = None
    return shutil.which(word, path=path) or ""


def _profiler(found):
    """`traces` and `stacks` of vLLM's torch profiler from a process's arguments, environment or log; {} without one."""
    argv, environment = found["argv"], {}
    words = [w.partition("=")[2] for w in argv if w.startswith("--profiler-config=")]
    words += [argv[n + 1] for n, w in enumerate(argv[:-1]) if w == "--profiler-config"]
    told = {}
    for word in words:
        with contextlib.suppress(ValueError, AttributeError, KeyError):
            config = json.loads(word)
            told = {"traces": config["torch_profiler_dir"], "stacks": config.get("torch_profiler_with_stack", True)}
    with contextlib.suppress(OSError):  # another user's process
        environment = process.environment(found["pid"])
    if not told and (folder := environment.get("VLLM_TORCH_PROFILER_DIR")):
        told = {"traces": folder, "stacks": environment.get("VLLM_TORCH_PROFILER_WITH_STACK", "1") != "0"}
    if not told and found["log"]:
        told = profiler(Path(found["log"]).read_text(encoding="utf-8", errors="replace"))
    return told | ({"traces": str(Path(found["cwd"]) / told["traces"])} if told else {})


def _from_log(log):
    if not log or not Path(log).is_file():
        return {}
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    return {"flags": flags(text), "chosen": chosen(text), **profiler(text)}


def _config(model):
    path = Path(str(model or "")) / "config.json"
    return str(path) if model and path.is_file() else None
