"""Requests as bytes, built before the load: every prompt is new, and its length is known in tokens."""

import json
import random
from base64 import b64encode
from urllib.parse import unquote, urlsplit

from k25lib.client import normalise_url
from k25lib.errors import UsageError

# Ids that every vocabulary has and that are seldom special tokens.
TOKEN_IDS = range(256, 1280)
_TEXT = (
    "the of and to in is was for on that with as by at from his it an are be this which or were had not but have one "
    "all their her there been who has its two more when first into time some only other new up out could them over "
    "may such these any after about then do made now between most under years many where through being us even each "
    "how also little did good should no can me last long own very people great before must work day water might men "
    "life just old state part world against place year small here never right still house came found number called "
    "large again left since far hand high next city white head air side land want home light story line point plan"
)
WORDS = _TEXT.split()
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Target:
    """Where requests go: scheme, host, port and path of the URL of a server, and the model's name."""

    def __init__(self, url, model, api="completions", api_key=None):
        parts = urlsplit(normalise_url(url))
        if api not in PATHS:
            raise UsageError(f"api is one of {', '.join(PATHS)}, not {api!r}")
        self.tls, self.host = parts.scheme == "https", parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.model, self.api, self.base = model, api, parts.geturl()
        self.shown = self.base.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)  # for messages and results
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {parts.path}{PATHS[api]} HTTP/1.1",
            f"host: {host}:{self.port}",
            "content-type: application/json",
        ]
        lines += ["accept: text/event-stream", "accept-encoding: identity", "user-agent: k25"]
        if api_key:
            lines.append(f"authorization: Bearer {api_key}")
        elif parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            lines.append(f"authorization: Basic {b64encode(login).decode()}")
        self._head = "\r\n".join(lines).encode() + b"\r\n"

    def request(self, prompt, output_tokens, request_id):
        """The bytes of one streaming request."""
        body = {"model": self.model, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        data = json.dumps(body).encode()
        return self._head + f"x-request-id: {request_id}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


class Prompts:
    """Prompts of `input_tokens` tokens: random token ids, or random words in a number found by asking the server."""

    def __init__(self, seed, input_tokens, api="completions"):
        self.seed, self.input_tokens = seed, input_tokens
        self.shape = "text" if api == "chat" else "token ids"
        self.words = input_tokens

    def make(self, *names):
        """The prompt of the request with this name (concurrency, repeat, index): the same for the same seed."""
        source = random.Random(":".join(map(str, (self.seed, *names))))
        if self.shape == "token ids":
            return source.choices(TOKEN_IDS, k=self.input_tokens)
        return " ".join(source.choices(WORDS, k=self.words))

    def calibrate(self, prompt_tokens):
        """Take the server's count for a prompt of `words` words; True when no better number of words is known."""
        if self.shape == "token ids" or prompt_tokens is None:
            return True
        missing = self.input_tokens - prompt_tokens
        if missing == 0:
            return True
        # A word is one token or a little more, whatever the chat template adds: step by the difference.
        words = max(1, self.words + missing)
        done, self.words = words == self.words, words
        return done


def poisson(rate, seconds, seed):
    """Arrival times in ns of a Poisson process of `rate` requests a second, for `seconds`; at least one."""
    source, at_s, due_ns = random.Random(seed), 0.0, []
    while (at_s := at_s + source.expovariate(rate)) < seconds or not due_ns:
        due_ns.append(int(at_s * 1e9))
    return due_ns
