"""A scripted server for the load tests: what each request gets is a list of bytes to send, and of pauses."""

import itertools
import json
import socket
import ssl
import threading
import time

CLOSE = object()


def event(choice=None, end="\n\n", space=" ", **more):
    """One server-sent event."""
    value = {"choices": [] if choice is None else [{"index": 0, **choice}], **more}
    return f"data:{space}{json.dumps(value)}{end}".encode()


def text(word="a", finish=None):
    return {"text": word, "finish_reason": finish}


def usage(completion, prompt=8):
    return {"usage": {"completion_tokens": completion, "prompt_tokens": prompt}}


def chunked(*parts):
    """Each part as one HTTP chunk, and the end of the body."""
    return [b"%x\r\n" % len(part) + part + b"\r\n" for part in parts] + [b"0\r\n\r\n"]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream(*parts):
    return [HEAD, *chunked(*parts)]


def plain(status, body, reason="Error"):
    return [f"HTTP/1.1 {status} {reason}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body]


def good(tokens, prompt=8):
    """A plain good stream of `tokens` tokens."""
    events = [event(text("a", "length" if index == tokens - 1 else None)) for index in range(tokens)]
    return stream(*events, event(**usage(tokens, prompt)), b"data: [DONE]\n\n")


class WildServer:
    """`answer(body, number)` returns what to send: bytes, seconds to wait (float), or CLOSE.

    `early(length)` may answer before a body of so many bytes is read; the connection is reset then.
    `seen` has each request with a body, and the number of the `connection` it came on.
    """

    def __init__(self, answer, metrics=None, certificate=None, host="127.0.0.1", early=None, handshake_s=0.0):
        self.early, self.handshake_s = early, handshake_s
        self.answer, self.metrics, self.seen, self.lock = answer, metrics, [], threading.Lock()
        self.listener = socket.create_server(
            (host, 0), backlog=512, family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self.context = None
        if certificate:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(*certificate)
        self.port = self.listener.getsockname()[1]
        self.url = f"{'https' if certificate else 'http'}://localhost:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()

    def _accept(self):
        for number in itertools.count():
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock, number), daemon=True).start()

    def connections(self):
        """On how many connections the requests came."""
        return len({seen["connection"] for seen in self.seen})

    def _serve(self, sock, number):
        try:
            if self.context:
                time.sleep(self.handshake_s)
                sock = self.context.wrap_socket(sock, server_side=True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock, sock.makefile("rb") as reader:
                while self._one(sock, reader, number):
                    pass
        except (OSError, UnicodeDecodeError):  # gone, or no HTTP: a TLS handshake
            pass

    def _one(self, sock, reader, connection):
        first = reader.readline().decode()
        if not first:
            return False
        length, headers = 0, {}
        while (line := reader.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        length = int(headers.get("content-length", 0))
        early = self.early and self.early(length)
        if early:
            sock.sendall(early)
            return False
        body = json.loads(reader.read(length)) if length else None
        if body is None:
            known = {
                "/v1/models": json.dumps({"data": [{"id": "wild"}]}),
                "/metrics": self.metrics and self.metrics(self),
            }
            content = known.get(first.split()[1])
            parts = plain(404, b"") if content is None else plain(200, content.encode(), "OK")
        else:
            with self.lock:
                self.seen.append({"path": first.split()[1], "headers": headers, "body": body, "connection": connection})
                number = len(self.seen) - 1
            parts = self.answer(body, number)
        for part in parts:
            if part is CLOSE:
                return False
            if isinstance(part, float):
                time.sleep(part)
            else:
                sock.sendall(part)
        return True
