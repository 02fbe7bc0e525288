"""The text of one damaged event: what of it can still be read."""

import json
import math
import re

# Damage is rare: these patterns are compiled when they are first needed
_NOT_A_NUMBER = rb"(?i)([:\[,]\s*)[-+]?(?:nan|inf|infinity)(?:\([a-z]*\))?(?=\s*[,}\]])"
_BAD_ESCAPE = rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})'
_TRAILING_COMMA = rb",(\s*[}\]])"
_SURROGATE = rb"(\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"  # the second: half of a pair
_NAME = rb'(?s)"name":\s*"(.*?)"(?=\s*[,}]\s*(?:"(?:pid|ph|cat|ts|tid|dur|args|id|bp|s|tts|cname|sf)"\s*:|$))'


def first_object(text):
    """(The whole object that bytes begin with, the bytes after it), or (None, text): junk may follow an event."""
    try:
        start = text.lstrip(b" \t\r\n")
        _, end = json.JSONDecoder(strict=False).raw_decode(start.decode("latin-1"))  # a character a byte
        value = json.loads(repaired(start[:end]), strict=False)
    except (ValueError, RecursionError):
        return None, text
    return (value, start[end:]) if isinstance(value, dict) else (None, text)


def number(value):
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def integer(value):
    try:
        return int(value) if abs(int(value)) < 2**62 else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def repaired(text):
    """One event's bytes with the known damages undone: bad UTF-8, half surrogate pairs, bare NaN/inf, bad escapes,
    commas, bare quotes."""
    text = text.decode("utf-8", "replace").encode()
    text = re.sub(_SURROGATE, lambda m: m[1] or rb"\ufffd", text)
    text = re.sub(_BAD_ESCAPE, rb"\\\\", text)
    text = re.sub(_TRAILING_COMMA, rb"\1", re.sub(_NOT_A_NUMBER, rb"\1null", text))
    return re.sub(_NAME, lambda m: b'"name": "' + re.sub(rb'(?<!\\)"', rb"\\\"", m[1]) + b'"', text, count=1)
