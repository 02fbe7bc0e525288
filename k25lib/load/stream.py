"""What came back on the wire, read after the load: HTTP, server-sent events, tokens and failures.

The same bytes give the same result however they were cut into pieces; a time is that of the piece which completed
the event.
"""

import json
import re
import zlib

import httptools
import msgspec

from k25lib.redaction import redact

_LINE_END = re.compile(rb"\r\n|\n|\r")
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_decode = msgspec.json.Decoder().decode


class Response:
    """An HTTP/1.1 response: `status`, `body`, a list of (time_ns, bytes) after decompression, and where it `location`s.

    Compression was not asked for; some proxies compress all the same.
    """

    def __init__(self, pieces):
        self.status, self.body, self.error, self.location, self._inflate = None, [], None, None, None
        self._parser, self._complete = httptools.HttpResponseParser(self), False
        for self._time_ns, _, data in pieces:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserCallbackError as error:
                self.error = f"cannot decompress the response ({error.__context__})"
                break
            except httptools.HttpParserError as error:
                self.error = None if self._complete else str(error)
                break

    def on_header(self, name, value):
        name = name.lower()
        if name == b"location":
            self.location = value.decode("latin-1")
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)

    def on_headers_complete(self):
        self.status = self._parser.get_status_code()

    def on_message_complete(self):
        self._complete = self.status >= 200

    def on_body(self, data):
        self.body.append((self._time_ns, self._decompressed(data) if self._inflate else data))

    def _decompressed(self, data):
        plain = self._inflate.decompress(data)
        while self._inflate.eof and (data := self._inflate.unused_data):  # some flush by starting a further member
            self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)
            plain += self._inflate.decompress(data)
        return plain

    def text(self):
        """The whole body as text."""
        return b"".join(data for _, data in self.body).decode("utf-8", "replace")


def events(body):
    """Yield (time_ns, event, data) of server-sent events (WHATWG HTML, 9.2); an unfinished last one if it has data."""
    rest, data, name, skip_lf, first = b"", [], b"", False, True
    time_ns = None
    for time_ns, piece in body:
        if not piece:
            continue
        if skip_lf and piece[:1] == b"\n":
            piece = piece[1:]
        skip_lf = piece[-1:] == b"\r" if piece else False
        lines = _LINE_END.split(rest + piece)
        rest = lines.pop()
        for line in lines:
            if first:
                line, first = line.removeprefix(b"\xef\xbb\xbf"), False
            if line:
                name = _field(line, data) or name
            elif data:
                yield time_ns, name, b"\n".join(data)
                data, name = [], b""
            else:
                name = b""
    if rest:
        name = _field(rest, data) or name
    if data:
        yield time_ns, name, b"\n".join(data)


def _field(line, data):
    """Take one line: append a data field to `data`, return the name of an event field. Comments fall away."""
    field, _, value = line.partition(b":")
    value = value[1:] if value[:1] == b" " else value
    if field == b"data":
        data.append(value)
    return value if field == b"event" else None


def error_message(value):
    """The message of an error object in one of the shapes that servers use; None if there is no error."""
    if not isinstance(value, dict):
        return None
    error = value.get("error") or (value if value.get("object") == "error" else None)
    if error is None:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or json.dumps(error))


def _plain(text):
    """One line without secrets (a server may quote the key that it refuses)."""
    return redact(" ".join(text.split())[:300])


def _json(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _count_of(usage, name):
    """A number of tokens in a usage object; None for anything else, as where the server does not tell."""
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def _http_message(response):
    if response.location:
        return f"redirected: give the URL of the server itself, which may be {_plain(response.location)}"
    value = _json(response.text())
    message = error_message(value)
    if message is None and isinstance(value, dict):
        message = value.get("message") or value.get("detail")
    return _plain(str(message) if message else response.text()) or "no body"


def _content(choice):
    """(whether the choice carries text, whether it is a role-only delta, its token ids)."""
    ids = choice.get("token_ids")
    ids = ids if isinstance(ids, list) else None
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")), False, ids
    text = any(value for name, value in delta.items() if name != "role")  # content, reasoning, tool calls, refusal ...
    return text, "role" in delta and not text, ids


class Outcome:
    """One exchange read: kind ("ok" or the failure's), message, status, times and tokens of chunks, usage."""

    def __init__(self, exchange, output_tokens):
        self.kind, self.message, self.finish_reason = "ok", None, None
        self.usage, self.done, self.times_ns, self.tokens = {}, False, [], []
        response = Response(exchange["pieces"])
        self.status = response.status
        self._chunks = []  # (time_ns, "text" | "empty" | "role" | "finish", token ids, running usage, is a completion)
        end, detail = exchange["end"], exchange["detail"]
        if response.status is not None and response.status != 200:
            self._fail(f"http_{response.status}", _http_message(response))
        else:
            self._read_events(response, end)
        self._count()
        if self.kind == "ok" and end not in ("complete", "eof") and not (end == "cut" and self.done):
            self._fail(end, detail)
        if self.kind == "ok":
            self._check(end, response, output_tokens)

    def _fail(self, kind, message):
        self.kind, self.message = kind, _plain(message or kind)

    def _read_events(self, response, end):
        for time_ns, name, data in events(response.body):
            if data.strip() == b"[DONE]":
                self.done = True
                continue
            if not data.strip():
                continue
            try:
                value = _decode(data)
                message = error_message(value)
                if message is None and name == b"error":
                    message = data.decode("utf-8", "replace")
                if message is None:
                    self._take(time_ns, value)
                else:
                    self._fail("error_in_stream", message)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if end in ("complete", "eof") and self.kind == "ok":
                    self._fail("bad_event", f"{error}: {data[:80]!r}")
            except (AttributeError, TypeError):
                self._fail("bad_event", f"JSON of another shape than the API's: {data[:80]!r}")

    def _take(self, time_ns, value):
        usage = value.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        running = _count_of(usage, "completion_tokens")
        if usage:
            self.usage = {name: _count_of(usage, name) for name in ("prompt_tokens", "completion_tokens")}
        for choice in value.get("choices") or ():
            text, role_only, token_ids = _content(choice)
            finish = choice.get("finish_reason")
            self.finish_reason = str(finish) if finish else self.finish_reason
            what = "text" if text else "role" if role_only else "finish" if finish else "empty"
            self._chunks.append((time_ns, what, token_ids, running, "text" in choice))

    def _count(self):
        """Which chunks carry tokens, and how many each.

        Token ids or a running usage say it. Otherwise chunks with text carry tokens, and so do those without (an
        unfinished UTF-8 sequence) where the total in `usage` says that each chunk is one token; a total above the
        number of chunks is spread evenly over them.
        """
        chunks, total = self._chunks, self.usage.get("completion_tokens")
        self.tokens_from = "chunks" if total is None else "usage"
        if any(ids for _, _, ids, *_ in chunks):
            counts = [len(ids or ()) for _, _, ids, *_ in chunks]
        elif len(chunks) > 1 and all(running is not None for _, _, _, running, _ in chunks):
            counts, before = [], 0
            for _, what, _, running, _ in chunks:
                counts.append(0 if what == "role" else max(0, running - before))
                before += counts[-1]
        else:
            completions = all(chunk[4] for chunk in chunks)
            number = {what: sum(chunk[1] == what for chunk in chunks) for what in ("text", "empty", "finish")}
            carrying = {"text"}
            if total and number["text"] + number["empty"] + number["finish"] == total:
                carrying = {"text", "empty", "finish"}
            elif total and completions and number["text"] + number["empty"] <= total:
                carrying = {"text", "empty"}
            carriers = sum(chunk[1] in carrying for chunk in chunks)
            each = total / carriers if total and carriers else 1
            counts = [each if chunk[1] in carrying else 0 for chunk in chunks]
        pairs = [(chunk[0], count) for chunk, count in zip(chunks, counts, strict=True) if count]
        self.times_ns, self.tokens = [time_ns for time_ns, _ in pairs], [count for _, count in pairs]
        self.output_tokens = total if total is not None else sum(self.tokens)

    def _check(self, end, response, output_tokens):
        """Strict outcomes: a stream that ended well but is not what was asked for is a failure too."""
        if response.error:
            return self._fail("bad_http", response.error)
        if response.status is None:
            return self._fail("cut", "the connection closed before a response")
        if not self.times_ns:
            message = error_message(_json(response.text()))
            if message is not None:  # an error object in place of a stream
                return self._fail("error_in_stream", message)
            return self._fail("no_tokens", f"a response without a token: {_plain(response.text()) or 'empty body'}")
        if self.tokens_from == "usage" and self.output_tokens != output_tokens:
            reason = f"asked for {output_tokens} tokens, got {self.output_tokens} (finish_reason {self.finish_reason})"
            return self._fail("wrong_length", reason)
        arrived = sum(chunk[1] != "role" for chunk in self._chunks)
        if self.tokens_from == "chunks" and (
            self.output_tokens > output_tokens or (self.finish_reason == "stop" and arrived < output_tokens)
        ):
            reason = f"asked for {output_tokens} tokens, got {arrived} chunks (finish_reason {self.finish_reason})"
            return self._fail("wrong_length", reason)
        ended = self.done or self.finish_reason or self.tokens_from == "usage"
        if not ended and self.output_tokens < output_tokens:
            return self._fail("cut", f"the stream ended after {self.output_tokens} of {output_tokens} chunks")
        return None
