"""The load worker: a process of its own that keeps requests in flight and stores what came back, with its time.

A pickled plan comes on stdin; frames go to stdout: ("progress", ...), then ("result", ...) or
("error", ...). It parses nothing but the end of a response, and builds nothing while requests are in flight.
Times are CLOCK_MONOTONIC, in ns. SIGTERM ends the load and keeps what came.

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
import ssl
import sys
import time

import httptools

from k25lib.load import priority
from k25lib.load.connection import Connection, clock_offset_ns, stamp_ns

READ, WRITE = 1, 4  # EPOLLIN, EPOLLOUT; the same numbers for poll
HAS_EPOLL = hasattr(select, "epoll")
# From so many requests in flight the loop lets events gather, for a share of a request's time and of a token's.
GATHER_FROM, MAX_GATHER_S, REQUEST_SHARE, TOKEN_SHARE = 32, 0.002, 0.002, 0.2
MOST_REFUSED = 100  # connections in a row, and as many as the concurrency: the server has gone, the rest is not sent
QUIET_NS = 250_000_000  # after so long without data a response is looked at however it ends
STEPPED_NS = 1_000_000  # a realtime clock that moved by more was set meanwhile: its stamps are worth nothing
OPEN_AT_ONCE = 64  # a server's queue of connections not accepted yet has a bound
now = time.monotonic_ns


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
        self.gone = self.lost = self.refusal = self.deadline = None
        self.refused = 0  # connections in a row that could not be had
        self.next_tick_ns, self.gather_s, self.connects = 0, 0.0, 0
        self.context = ssl.create_default_context() if plan["tls"] else None

    # --- one exchange

    def connect(self, connection):
        connection.open(self.plan, self.context)
        self.poller.register(connection.fd, WRITE)
        self.open[connection.fd] = connection
        self.connects += 1

    def connect_all(self, connections):
        """Open the connections before the load."""
        for at in range(0, len(connections), OPEN_AT_ONCE):
            some, limit_ns = connections[at : at + OPEN_AT_ONCE], now() + self.plan["connect_timeout_s"] * 1e9
            for connection in some:
                self.connect(connection)
            while not self.stopped and any(connection.opening for connection in some):
                for fd, _ in self.poller.poll(0.25 if HAS_EPOLL else 250):
                    if self.open[fd].opening:
                        self.go_on(self.open[fd])
                if now() > limit_ns:
                    raise TimeoutError("timed out")

    def go_on(self, connection):
        """Go on connecting, without waiting: other slots are in flight; True if an exchange ended by it."""
        try:
            connection.go_on()
        except OSError as error:
            if connection.exchange is None:
                raise
            return self.give_up(connection, "connect", error)
        self.poller.modify(connection.fd, READ)
        if connection.exchange is not None and not connection.opening:
            self.send(connection)
        return False

    def close(self, connection):
        if connection.sock is not None:
            self.poller.unregister(connection.fd)
            self.busy.pop(connection.fd, None)
            del self.open[connection.fd]
            connection.sock.close()
            connection.sock = connection.tls = None
            connection.opening = False
        return False

    def begin(self, connection, index, due_ns=None, retried=False):
        """Send request `index`, opening the connection again where the server closed it; True if that failed."""
        connection.start(index, due_ns, retried)
        if connection.sock is None:
            try:
                if self.gone:
                    raise self.gone
                self.connect(connection)
            except OSError as error:
                return self.finish(connection, "connect", error)
        self.busy[connection.fd] = connection
        if not connection.opening:
            self.send(connection)
        return False

    def send(self, connection):
        exchange = connection.exchange
        connection.write(self.requests[exchange["index"]])
        exchange["send_ns"] = now()
        if self.deadline is None and self.plan["max_ns"] and exchange["index"] >= self.plan["warmup"]:
            self.deadline = exchange["send_ns"] + self.plan["max_ns"]
        self.flush(connection, writing=False)

    def flush(self, connection, writing):
        """Send what is pending, and ask for a writable event while the socket is full."""
        try:
            left = connection.flush()
        except OSError:  # the read that follows says how it ended: an answer may have come before
            left = False
        if writing != left:
            self.poller.modify(connection.fd, READ | WRITE if left else READ)

    def receive(self, connection):
        """Store what one read brings, and look at the response only when it may be complete; True if it is over.

        This runs once a token: a kernel stamp is stored as it came, and read after the load.
        """
        try:
            piece = connection.read()
        except BlockingIOError:
            return False
        except OSError as error:  # ssl.SSLError is one
            return self.broken(connection, error)
        data, framing = piece[2], connection.framing
        if connection.exchange is None:  # idle: a TLS session ticket, or the server closes, or sends unasked
            return self.close(connection) if connection.closed or data else False
        if data:
            connection.pieces.append(piece)
            if (not framing.lazy or data[-4:] == b"\r\n\r\n" or len(data) < 4) and self.is_over(connection):
                return True
        return self.broken(connection, None) if connection.closed else False

    def is_over(self, connection):
        """Look at the response as far as it has come; True if it is over: complete, or no HTTP."""
        framing = connection.framing
        try:
            if not framing.feed(connection.pieces):
                return False
        except httptools.HttpParserError as error:
            return self.give_up(connection, "bad_http", error)
        self.finish(connection, "complete")
        if not framing.keep_alive or connection.pending:  # an early answer: the rest goes nowhere
            self.close(connection)
        return True

    def broken(self, connection, error):
        """The server closed or reset the connection. A reused one that brought nothing is tried once more."""
        exchange, reused = connection.exchange, connection.used > 1
        self.close(connection)
        if exchange is None:
            return False
        if reused and not exchange["pieces"] and not exchange["retried"]:
            return self.begin(connection, exchange["index"], exchange["due_ns"], retried=True)
        if error is None and connection.framing.ends_at_close():
            return self.finish(connection, "eof")
        return self.finish(connection, "cut", error or "the server closed the connection")

    def finish(self, connection, end, detail=None):
        exchange = connection.exchange
        exchange["end"], exchange["detail"], exchange["end_ns"] = end, None if detail is None else str(detail), now()
        pieces, connection.exchange = exchange["pieces"], None
        if end == "connect":
            self.refused, self.refusal = self.refused + 1, exchange["detail"]
        elif end in ("complete", "eof"):
            self.refused = 0
        if self.refused > MOST_REFUSED + self.plan["concurrency"]:
            self.lost = self.refusal
        connection.free_ns = exchange["end_ns"]
        if pieces:
            self.kernel_stamps = pieces[-1][0] is not None
            connection.free_ns = stamp_ns(pieces[-1], self.offset_ns)
            took_s = (connection.free_ns - exchange["send_ns"]) / 1e9
            self.gather_s = max(0.0, min(MAX_GATHER_S, took_s * REQUEST_SHARE, took_s / len(pieces) * TOKEN_SHARE))
        self.records.append(exchange)
        if connection.sock is not None:
            self.busy.pop(connection.fd, None)
        return True

    def give_up(self, connection, end, detail):
        self.finish(connection, end, detail)
        self.close(connection)
        return True

    # --- the loop

    def run(self):
        """Hold the load; returns the records and what the client knows of itself."""
        connections = [Connection(slot) for slot in range(self.plan["concurrency"])]
        self.connect_all(connections)
        self.offset_ns = clock_offset_ns()
        gc.collect()
        gc.freeze()
        gc.disable()
        with priority.raised() as raised:
            cpu_s, start_ns = time.process_time(), now()
            if self.plan["due_ns"] is None:
                self.hold_concurrency(connections)
            else:
                self.hold_rate(connections, start_ns)
            end_ns, cpu_s = now(), time.process_time() - cpu_s
        if self.refused >= self.plan["concurrency"]:  # nobody could connect at the end
            self.lost = self.refusal
        self.kernel_stamps &= abs(clock_offset_ns() - self.offset_ns) < STEPPED_NS
        for exchange in self.records:
            exchange["pieces"] = [
                (stamp_ns(piece, self.offset_ns) if self.kernel_stamps else piece[1], *piece[1:])
                for piece in exchange["pieces"]
            ]
        return {
            "records": self.records,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "cpu_s": cpu_s,
            "stamps": "kernel" if self.kernel_stamps else "user",
            "priority": raised,
            "not_sent": len(self.queue),
            "lost": self.lost,
            "connects": self.connects,
        }

    def more(self):
        """Whether a further request may be sent."""
        in_time = self.deadline is None or now() < self.deadline
        return bool(self.queue) and in_time and not self.stopped and not self.lost

    def hold_concurrency(self, connections):
        waiting = connections
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
        else:
            if precise:  # epoll rounds up to whole milliseconds
                select.select([self.poller], [], [], timeout_s)
            events = self.poller.poll(0 if precise else timeout_s)
        free = []
        for fd, event in events:
            connection = self.open[fd]
            if self.receive(connection) if event == READ and not connection.opening else self.ready(connection, event):
                free.append(connection)
        if now() >= self.next_tick_ns:
            free += self.tick()
        if self.kernel_stamps and len(self.busy) >= GATHER_FROM:
            time.sleep(self.gather_s)  # the stamps are made already: fewer, fuller turns cost less
        return free

    def ready(self, connection, event):
        """Handle an event that is not only data to read."""
        if connection.opening:
            return self.go_on(connection)
        if event & WRITE and connection.pending:
            self.flush(connection, writing=True)
        return event != WRITE and self.receive(connection)

    def last_sign(self, connection, at):
        """When this exchange last brought a chunk, or was sent (ns), and how long the next may take (s).

        Comments keep a connection alive, not a stream; what comes before the first token is no stream yet.
        """
        exchange, encoded = connection.exchange, connection.framing.encoded
        if connection.opening:
            return exchange["send_ns"], self.plan["connect_timeout_s"]
        chunk = next((piece for piece in reversed(exchange["pieces"]) if encoded or b"data:" in piece[2]), None)
        limit_s = self.plan["chunk_timeout_s"]
        if chunk and at - chunk[1] <= limit_s * 1e9:
            return chunk[1], limit_s
        if chunk:
            from k25lib.load.stream import Outcome  # seldom needed, and slow to import

            if Outcome(exchange | {"end": "cut"}, 0).times_ns:
                return chunk[1], limit_s
        return exchange["send_ns"], self.plan["first_timeout_s"]

    def tick(self):
        """Once in a quarter of a second: progress, time-outs, the end of the time given."""
        at = now()
        self.next_tick_ns = at + 250_000_000
        self.emit("progress", (len(self.records), len(self.busy)))
        over = None
        if self.stopped or os.getppid() != self.plan["parent"]:
            self.stopped, over = True, ("interrupted", "the load was stopped")
        elif self.deadline and at > self.deadline + max(self.plan["max_ns"], 2_000_000_000):
            over = ("unfinished", "in flight when the time given was over")
        free = []
        for connection in list(self.busy.values()):
            if connection.framing.lazy and at - connection.pieces[-1][1] > QUIET_NS and self.is_over(connection):
                free.append(connection)  # it ended otherwise than at the end of a piece
                continue
            last, limit_s = self.last_sign(connection, at)
            end = over or (at - last > limit_s * 1e9 and ("timeout", f"no data for {limit_s:g} s"))
            if end and connection.opening and not over:
                self.gone = TimeoutError(f"no connection within {limit_s:g} s")  # not as long again for each request
                end = ("connect", self.gone)
            if end:
                self.give_up(connection, *end)
                free.append(connection)
        return free


def main():
    """Run the plan on stdin; every frame on stdout is a pickle."""
    try:
        plan = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):
        return  # the parent was stopped before it had said what to do

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
    except BrokenPipeError:
        return  # the parent is gone, and nobody waits for a result
    except OSError as error:
        emit("error", str(error))


if __name__ == "__main__":
    main()
