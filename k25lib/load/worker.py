"""The load worker: a process of its own that keeps requests in flight and stores what came back, with its time.

Run by path (`python worker.py`), with a pickled plan on stdin; frames go to stdout: ("ready", ...), ("progress", ...)
once a second, ("result", ...). It imports nothing of ours, parses nothing but the end of a response, and builds
nothing while requests are in flight. Times are CLOCK_MONOTONIC, in ns. SIGTERM ends the load and keeps what came.

Receive times come from the kernel (SO_TIMESTAMPNS on the TCP socket), so that a busy client does not move them;
where the platform has none, user-space times stand in and the result says so.
"""

import collections
import gc
import os
import pickle
import resource
import select
import signal
import socket
import ssl
import struct
import sys
import time

import httptools

SO_TIMESTAMPNS = 35  # Linux; not in the socket module
STAMP_SPACE = socket.CMSG_SPACE(16)
READ, WRITE = 1, 4  # EPOLLIN, EPOLLOUT; the same numbers for poll
HAS_EPOLL = hasattr(select, "epoll")
now = time.monotonic_ns


def clock_offset_ns():
    """Realtime minus monotonic clock, in ns: the tightest of 200 readings."""
    best = None
    for _ in range(200):
        before, real, after = now(), time.time_ns(), now()
        if best is None or after - before < best[0]:
            best = (after - before, real - (before + after) // 2)
    return best[1]


class Framing:
    """Whether an HTTP response is complete. It is fed only when it may be: a chunked body ends in an empty line."""

    def __init__(self):
        self.parser = httptools.HttpResponseParser(self)
        self.chunked = self.sized = self.lazy = self.complete = self.started = False
        self.fed = 0  # pieces

    def on_header(self, name, value):
        name = name.lower()
        self.chunked |= name == b"transfer-encoding" and b"chunked" in value.lower()
        self.sized |= name == b"content-length"

    def on_headers_complete(self):
        self.started, self.lazy = True, self.chunked

    def ends_at_close(self):
        return self.started and not self.chunked and not self.sized

    def on_message_complete(self):
        if self.parser.get_status_code() >= 200:  # 100 Continue and its kind precede the response
            self.complete = True
        self.chunked = self.sized = self.lazy = self.started = False

    def feed(self, pieces):
        """Feed the pieces not fed before; True when the response is complete."""
        data = b"".join(piece[2] for piece in pieces[self.fed :])
        self.fed = len(pieces)
        self.parser.feed_data(data)
        return self.complete


class Connection:
    """A keep-alive connection, and the exchange that is on it."""

    __slots__ = (
        "slot",
        "sock",
        "fd",
        "tls",
        "incoming",
        "outgoing",
        "pending",
        "exchange",
        "framing",
        "used",
        "free_ns",
    )

    def __init__(self, slot):
        self.slot = slot
        self.sock = self.tls = self.exchange = self.free_ns = None
        self.pending, self.used = b"", 0


class Worker:
    """Sends the plan's requests, closed loop (`concurrency`) or open loop (`due_ns`), and records each exchange.

    An exchange is a dict: index, slot, free_ns (the slot became free), due_ns, send_ns and sent_ns (before and after
    the send), end_ns, end ("complete", "eof", "cut", "timeout", "connect", "bad_http", "unfinished", "interrupted"),
    detail, and pieces [(stamp_ns, read_ns, bytes)].
    """

    def __init__(self, plan, emit):
        self.plan, self.emit = plan, emit
        self.requests = plan["requests"]
        self.queue = collections.deque(range(len(self.requests)))
        self.poller = select.epoll() if HAS_EPOLL else select.poll()
        self.open, self.busy, self.records = {}, {}, []
        self.stopped = self.kernel_stamps = False
        self.gone = self.deadline = None
        self.next_tick_ns = 0
        self.context = ssl.create_default_context() if plan["tls"] else None

    # --- connections

    def connect(self, connection):
        """Open the connection (and the TLS session), blocking: it is done before the load, or after a close."""
        family, kind, proto, _, address = self.plan["address"]
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(self.plan["connect_timeout_s"])
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.tls = None
            if self.context:
                connection.incoming, connection.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                connection.tls = self.context.wrap_bio(
                    connection.incoming, connection.outgoing, server_hostname=self.plan["host"]
                )
                self.handshake(connection, sock)
            if sys.platform == "linux":
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        connection.sock, connection.fd, connection.used, connection.pending = sock, sock.fileno(), 0, b""
        self.poller.register(connection.fd, READ)
        self.open[connection.fd] = connection

    @staticmethod
    def handshake(connection, sock):
        while True:
            try:
                connection.tls.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(connection.outgoing.read())
                data = sock.recv(65536)
                if not data:
                    raise ConnectionResetError("closed during the TLS handshake") from None
                connection.incoming.write(data)
            else:
                return sock.sendall(connection.outgoing.read())

    def close(self, connection):
        if connection.sock is not None:
            self.poller.unregister(connection.fd)
            self.busy.pop(connection.fd, None)
            del self.open[connection.fd]
            connection.sock.close()
            connection.sock = None

    # --- one exchange

    def begin(self, connection, index, due_ns=None, retried=False):
        """Send request `index` on the connection, opening it again where the server closed it."""
        exchange = {"index": index, "slot": connection.slot, "free_ns": connection.free_ns, "due_ns": due_ns}
        exchange |= {"send_ns": now(), "sent_ns": None, "end_ns": None, "end": None, "detail": None}
        exchange |= {"retried": retried, "pieces": []}
        connection.exchange, connection.framing = exchange, Framing()
        if connection.sock is None:
            try:
                if self.gone:
                    raise self.gone
                self.connect(connection)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    self.gone = error  # each further try would block the loop as long
                return self.finish(connection, "connect", error)
        data = self.requests[index]
        if connection.tls:
            connection.tls.write(data)
            data = connection.outgoing.read()
        connection.used += 1
        connection.pending = data
        self.busy[connection.fd] = connection
        exchange["send_ns"] = now()
        if self.deadline is None and self.plan["max_ns"] and index >= self.plan["warmup"]:
            self.deadline = exchange["send_ns"] + self.plan["max_ns"]
        return self.flush(connection, writing=False)

    def flush(self, connection, writing):
        """Send what is pending; ask for a writable event only while the socket is full."""
        try:
            sent = connection.sock.send(connection.pending)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return self.broken(connection, error)
        connection.pending = connection.pending[sent:]
        if not connection.pending:
            connection.exchange["sent_ns"] = now()
        if writing != bool(connection.pending):
            self.poller.modify(connection.fd, READ | WRITE if connection.pending else READ)
        return None

    def receive(self, connection, space=STAMP_SPACE):
        """Read once: a coalesced read has the last segment's stamp, so a full buffer is rare by design."""
        try:
            data, ancillary, _, _ = connection.sock.recvmsg(32768, space)
        except BlockingIOError:
            return None
        except OSError as error:
            return self.broken(connection, error)
        read_ns = stamp_ns = now()
        for _, kind, value in ancillary:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", value)
                stamp_ns = seconds * 1_000_000_000 + nanoseconds - self.offset_ns
                self.kernel_stamps = True
        closed = not data
        if connection.tls and data:
            try:
                data = self.decrypt(connection, data)
            except ssl.SSLError as error:
                return self.broken(connection, error)
        exchange = connection.exchange
        if exchange is None and not closed and not data:
            return None  # a TLS session ticket
        if exchange is None:  # the server closed an idle connection, or sent what nobody asked for
            return self.close(connection)
        if closed:
            return self.broken(connection, None)
        if not data:
            return None
        pieces, framing = exchange["pieces"], connection.framing
        pieces.append((stamp_ns, read_ns, data))
        if framing.lazy and len(data) > 3 and data[-4:] != b"\r\n\r\n":
            return None
        try:
            if framing.feed(pieces):
                if not framing.parser.should_keep_alive():
                    self.close(connection)
                self.finish(connection, "complete")
        except httptools.HttpParserError as error:
            self.finish(connection, "bad_http", error)
            self.close(connection)
        return None

    @staticmethod
    def decrypt(connection, data):
        connection.incoming.write(data)
        parts = []
        try:
            while part := connection.tls.read(32768):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            connection.incoming.write_eof()
        return b"".join(parts)

    def broken(self, connection, error):
        """The server closed or reset the connection. A reused one that brought nothing is tried once more."""
        exchange, reused = connection.exchange, connection.used > 1
        self.close(connection)
        if exchange is None:
            return None
        if reused and not exchange["pieces"] and not exchange["retried"]:
            return self.begin(connection, exchange["index"], exchange["due_ns"], retried=True)
        if error is None and connection.framing.ends_at_close():
            return self.finish(connection, "eof")
        return self.finish(connection, "cut", error or "the server closed the connection")

    def finish(self, connection, end, detail=None):
        exchange = connection.exchange
        exchange["end"], exchange["detail"], exchange["end_ns"] = end, None if detail is None else str(detail), now()
        connection.free_ns = exchange["pieces"][-1][0] if exchange["pieces"] else exchange["end_ns"]
        connection.exchange = None
        self.records.append(exchange)
        if connection.sock is not None:
            self.busy.pop(connection.fd, None)

    def abandon(self, end, detail):
        """End every exchange in flight."""
        for connection in list(self.busy.values()):
            self.give_up(connection, end, detail)

    def give_up(self, connection, end, detail):
        self.finish(connection, end, detail)
        self.close(connection)

    # --- the loop

    def run(self):
        """Hold the load; returns the records and what the client knows of itself."""
        plan = self.plan
        open_loop = plan["due_ns"] is not None
        connections = [Connection(slot) for slot in range(plan["concurrency"])]
        for connection in connections:
            self.connect(connection)
        self.emit("ready", None)
        self.offset_ns = clock_offset_ns()
        gc.collect()
        gc.freeze()
        gc.disable()
        cpu_s, start_ns = time.process_time(), now()
        if open_loop:
            self.hold_rate(connections, start_ns)
        else:
            self.hold_concurrency(connections)
        end_ns, cpu_s = now(), time.process_time() - cpu_s
        drift_ns = clock_offset_ns() - self.offset_ns
        if abs(drift_ns) > 1_000_000:  # the realtime clock was stepped: its stamps are worth nothing
            self.kernel_stamps = False
            for exchange in self.records:
                exchange["pieces"] = [(read_ns, read_ns, data) for _, read_ns, data in exchange["pieces"]]
        return {
            "records": self.records,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "cpu_s": cpu_s,
            "stamps": "kernel" if self.kernel_stamps else "user",
            "clock_drift_ns": drift_ns,
            "not_sent": len(self.queue),
        }

    def more(self):
        """Whether a further request may be sent."""
        return bool(self.queue) and not self.stopped and (self.deadline is None or now() < self.deadline)

    def hold_concurrency(self, connections):
        for connection in connections:
            if self.more():
                self.begin(connection, self.queue.popleft())
        waiting = [connection for connection in connections if connection.exchange is None]
        while self.busy or waiting:
            for connection in waiting:
                while connection.exchange is None and self.more():
                    self.begin(connection, self.queue.popleft())
            waiting = self.turn(0.25)

    def hold_rate(self, connections, start_ns):
        idle = collections.deque(connections)
        due_ns, limit, opened = self.plan["due_ns"], self.plan["max_connections"], len(connections)
        while self.busy or self.more():
            wait_s = 0.25
            while self.more():
                due = start_ns + due_ns[self.queue[0]]
                if (wait_s := (due - now()) / 1e9) > 0:
                    break
                if not idle and opened < limit:
                    idle.append(Connection(opened))
                    opened += 1
                if not idle:  # the request waits, and its latency says so
                    wait_s = 0.25
                    break
                connection = idle.popleft()
                connection.free_ns = None
                self.begin(connection, self.queue.popleft(), due)
                if connection.exchange is None:
                    idle.append(connection)
            idle.extend(self.turn(max(0, min(wait_s, 0.25)), precise=True))

    def turn(self, timeout_s, precise=False):
        """Wait, handle what is ready; returns the connections that became free."""
        if not HAS_EPOLL:
            events = self.poller.poll(timeout_s * 1000)
        elif precise:  # epoll rounds up to whole milliseconds
            select.select([self.poller], [], [], timeout_s)
            events = self.poller.poll(0)
        else:
            events = self.poller.poll(timeout_s)
        free = []
        for fd, event in events:
            connection = self.open.get(fd)
            if connection is None:  # closed by an earlier event of this turn
                continue
            was_busy = connection.exchange is not None
            if event & WRITE and connection.pending:
                self.flush(connection, writing=True)
            if event & ~WRITE and connection.sock is not None and connection.fd == fd:
                self.receive(connection)
            if was_busy and connection.exchange is None:
                free.append(connection)
        if now() >= self.next_tick_ns:
            free += self.tick()
        return free

    def tick(self):
        """Once in a quarter of a second: progress, time-outs, the end of the time given."""
        at = now()
        self.next_tick_ns = at + 250_000_000
        self.emit("progress", (len(self.records), len(self.busy)))
        if self.stopped or os.getppid() != self.plan["parent"]:
            self.stopped = True
            self.abandon("interrupted", "the load was stopped")
        elif self.deadline and at > self.deadline + max(self.plan["max_ns"], 2_000_000_000):
            self.abandon("unfinished", "in flight when the time given was over")
        free = []
        for connection in list(self.busy.values()):
            pieces = connection.exchange["pieces"]
            last, limit = (pieces[-1][1], "chunk") if len(pieces) > 1 else (connection.exchange["send_ns"], "first")
            if at - last > self.plan[f"{limit}_timeout_s"] * 1e9:
                self.give_up(connection, "timeout", f"no data for {self.plan[f'{limit}_timeout_s']:g} s")
                free.append(connection)
        return free


def main():
    """Run the plan on stdin; every frame on stdout is a pickle."""
    plan = pickle.load(sys.stdin.buffer)

    def emit(kind, value):
        pickle.dump((kind, value), sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    worker = Worker(plan, emit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopped", True))
    try:
        emit("result", worker.run())
    except OSError as error:
        emit("error", str(error))


if __name__ == "__main__":
    main()
