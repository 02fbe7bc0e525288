"""What the server says that it chose: kernels, backends and flags, read from its log."""

import ast
import re
import tomllib
from pathlib import Path

PATTERNS = {
    name: re.compile(pattern)
    for name, pattern in tomllib.loads(Path(__file__).with_name("chosen.toml").read_text(encoding="utf-8"))[
        "patterns"
    ].items()
}


def chosen(log):
    """What the log's text tells: name (as in chosen.toml) -> value, only of what it says. The last start counts."""
    start = log.rfind("non-default args:")
    text = log[max(start, 0) :]
    found = {name: match for name, pattern in PATTERNS.items() if (match := pattern.search(text))}
    return {name: match[1].strip() for name, match in found.items()}


def flags(log):
    """The server's non-default arguments as a dict: name -> value, or -> text where the value is an object."""
    start = log.rfind("non-default args: {")
    if start < 0:
        return {}
    line = log[start + len("non-default args: ") :].split("\n", 1)[0].strip()
    try:
        call = ast.parse(line, mode="eval").body
    except SyntaxError:
        return {"arguments": line}
    return {key.value: _value(node) for key, node in zip(call.keys, call.values, strict=True)}


def profiler(log):
    """What the log tells of the torch profiler: `traces`, the folder that it writes to, `stacks`, whether it records
    Python stacks; {} if it tells nothing."""
    start = log[max(log.rfind("non-default args:"), 0) :]
    folder = re.search(r"torch_profiler_dir='([^']+)'", start)
    stacks = re.search(r"torch_profiler_with_stack=(True|False)", start)
    told = {"traces": folder[1]} if folder else {}
    return {**told, "stacks": stacks[1] == "True"} if folder and stacks else told


def _value(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
