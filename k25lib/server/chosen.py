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


def traces_folder(log):
    """The folder that the profiler writes to, as the log tells it; None if it does not."""
    found = re.search(r"torch_profiler_dir='([^']+)'", log[max(log.rfind("non-default args:"), 0) :])
    return Path(found[1]) if found else None


def _value(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
