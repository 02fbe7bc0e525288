"""A server whose true times are known: tokens at scheduled times, each send logged. A process of its own.

`python -m k25lib.load.truth TTFT_MS ITL_MS` prints its port; GET /truth gives the log and empties it:
request id -> when the request arrived (kernel stamp) and, for every token, the times before and after its send
(CLOCK_MONOTONIC, ns).
It speaks as much of the completions API as the load client needs, and ends when its stdin closes.
"""

import gc
import heapq
import json
import resource
import select
import socket
import struct
import sys
import time

from k25lib.load.connection import SO_TIMESTAMPNS, STAMP_SPACE, clock_offset_ns

now = time.monotonic_ns


def chunk(data):
    """One HTTP chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(choices, **more):
    """One server-sent event of the completions API."""
    value = {
        "id": "cmpl-truth",
        "object": "text_completion",
        "created": 0,
        "model": "truth",
        "choices": choices,
        **more,
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = chunk(event([{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]))


class Truth:
    """The server: one loop, a heap of what is due."""

    def __init__(self, ttft_ns, itl_ns):
        self.ttft_ns, self.itl_ns = ttft_ns, itl_ns
        self.poller, self.due, self.log = select.epoll(), [], {}
        self.connections, self.order = {}, 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.listener.setblocking(False)
        self.poller.register(self.listener, select.EPOLLIN)
        self.poller.register(sys.stdin, select.EPOLLIN)
        self.offset_ns = clock_offset_ns()

    def run(self):
        gc.freeze()
        gc.disable()
        print(self.listener.getsockname()[1], flush=True)
        while True:
            wait_s = max(0, (self.due[0][0] - now()) / 1e9) if self.due else 1
            select.select([self.poller], [], [], wait_s)  # epoll itself rounds up to whole milliseconds
            for fd, _ in self.poller.poll(0):
                if fd == self.listener.fileno():
                    self.accept()
                elif fd == sys.stdin.fileno():
                    return
                else:
                    self.receive(fd)
            while self.due and self.due[0][0] <= now():
                self.token(*heapq.heappop(self.due))

    def accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            sock.setblocking(False)
            self.poller.register(sock, select.EPOLLIN)
            self.connections[sock.fileno()] = [sock, b""]

    def receive(self, fd, space=STAMP_SPACE):
        connection = self.connections[fd]
        try:
            data, ancillary, _, _ = connection[0].recvmsg(1 << 20, space)
        except ConnectionResetError:
            data = b""
        if not data:
            self.poller.unregister(fd)
            self.connections.pop(fd)[0].close()
            return
        at = now()
        for _, kind, value in ancillary:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", value)
                at = seconds * 1_000_000_000 + nanoseconds - self.offset_ns
        connection[1] += data
        head, found, body = connection[1].partition(b"\r\n\r\n")
        fields = {
            name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        if found and len(body) == int(fields.get(b"content-length", 0)):
            connection[1] = b""
            self.answer(connection[0], head, fields, body, at)

    def answer(self, sock, head, fields, body, at):
        if not head.startswith(b"POST"):
            data = json.dumps(self.log if b" /truth " in head else {"data": [{"id": "truth"}]}).encode()
            if b" /truth " in head:
                self.log = {}
            sock.setblocking(True)
            status = b"404 Not Found" if b" /metrics " in head else b"200 OK"
            sock.sendall(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
            sock.setblocking(False)
            return
        request = json.loads(body)
        name = fields.get(b"x-request-id", b"%d" % self.order).decode()
        entry = self.log[name] = {"arrived_ns": at, "sends_ns": []}
        tokens = request.get("max_tokens") or request.get("max_completion_tokens") or 16
        usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": tokens}
        usage["total_tokens"] = usage["prompt_tokens"] + tokens
        end = chunk(event([], usage=usage)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        sock.send(HEAD)
        self.order += 1
        heapq.heappush(self.due, (at + self.ttft_ns, self.order, sock, entry["sends_ns"], tokens, end))

    def token(self, due, order, sock, sends_ns, left, end):
        """Send one token; the next one is due an interval after this one was."""
        try:
            before = now()
            sock.send(TOKEN)
            sends_ns.append((before, now()))
            if left > 1:
                heapq.heappush(self.due, (due + self.itl_ns, order, sock, sends_ns, left - 1, end))
            else:
                sock.send(end)
        except OSError:
            pass  # the client went away


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ttft_ms, itl_ms = map(float, sys.argv[1:])
    Truth(int(ttft_ms * 1e6), int(itl_ms * 1e6)).run()


if __name__ == "__main__":
    main()
