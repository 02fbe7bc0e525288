"""One keep-alive connection of the load worker: TCP or TLS, kernel receive stamps, the framing of a response."""

import contextlib
import errno
import os
import socket
import ssl
import struct
import sys
import time

import httptools

SO_TIMESTAMPNS = 35  # Linux; not in the socket module
STAMP_SPACE = socket.CMSG_SPACE(16)
READ_BYTES = 16384  # tokens come a few hundred bytes at a time; more is read at the next turn
now = time.monotonic_ns
_timespec = struct.Struct("qq").unpack


def stamp_ns(piece, offset_ns):
    """When a piece (kernel stamp as bytes or None, read_ns, data) came, in ns of the monotonic clock.

    The stamp is that of the last segment read: it is exact while the client reads faster than tokens come.
    """
    if piece[0] is None:
        return piece[1]
    seconds, nanoseconds = _timespec(piece[0])
    return seconds * 1_000_000_000 + nanoseconds - offset_ns


def clock_offset_ns():
    """Realtime minus monotonic clock, in ns: the tightest of 200 readings."""
    readings = ((now(), time.time_ns(), now()) for _ in range(200))
    return min((after - before, real - (before + after) // 2) for before, real, after in readings)[1]


def _check(error):
    if error not in (0, errno.EINPROGRESS):
        raise OSError(error, os.strerror(error))


class Framing:
    """Whether an HTTP response is complete. `lazy`: it need be fed only data that ends in an empty line (chunked)."""

    def __init__(self):
        self.parser = httptools.HttpResponseParser(self)
        self.chunked = self.sized = self.lazy = self.complete = self.started = self.keep_alive = self.encoded = False
        self.fed = 0  # pieces

    def on_header(self, name, value):
        name = name.lower()
        self.chunked |= name == b"transfer-encoding" and b"chunked" in value.lower()
        self.sized |= name == b"content-length"
        self.encoded |= name == b"content-encoding" and value.lower() != b"identity"

    def on_headers_complete(self):
        self.started, self.lazy = True, self.chunked

    def ends_at_close(self):
        return self.started and not self.chunked and not self.sized

    def on_message_complete(self):
        if self.parser.get_status_code() >= 200:  # 100 Continue and its kind precede the response
            self.complete, self.keep_alive = True, self.parser.should_keep_alive()  # the parser forgets it hereafter
        self.chunked = self.sized = self.lazy = self.started = False

    def feed(self, pieces):
        """Feed the pieces not fed before; True when the response is complete."""
        data = b"".join(piece[2] for piece in pieces[self.fed :])
        self.fed = len(pieces)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.complete:
                raise
            self.keep_alive = False  # what follows a whole response is no HTTP
        return self.complete


class Connection:
    """A connection and the exchange that is on it. `sock` is None while it is closed."""

    def __init__(self, slot):
        self.slot = slot
        self.sock = self.tls = self.exchange = self.framing = self.free_ns = None
        self.opening = self.closed = False

    def open(self, plan, context):
        """Begin to connect: `go_on` once writable, then when readable, while `opening`. Raises OSError."""
        family, kind, proto, _, address = plan["address"]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            _check(sock.connect_ex(address))
        except OSError:
            sock.close()
            raise
        if context:  # a TLS session through memory, so that every read of the socket keeps its stamp
            self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=plan["host"])
        self.sock, self.fd, self.recvmsg = sock, sock.fileno(), sock.recvmsg
        self.used, self.pending, self.opening, self.closed = 0, b"", True, False

    def go_on(self):
        """Go on connecting as far as the socket lets: TCP, then the TLS handshake. Raises OSError."""
        _check(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self.opening = self.tls is not None and not self._handshake()

    def _handshake(self):
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("closed during the TLS handshake")
            self.incoming.write(data)
        done = True
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            done = False
        self.pending += self.outgoing.read()
        self._send()
        return done

    def start(self, index, due_ns, retried):
        """A new exchange on this connection; see `worker.Worker`."""
        exchange = {"index": index, "slot": self.slot, "free_ns": self.free_ns, "due_ns": due_ns, "send_ns": now()}
        exchange |= dict.fromkeys(("sent_ns", "end_ns", "end", "detail")) | {"retried": retried, "pieces": []}
        self.exchange, self.pieces, self.framing = exchange, exchange["pieces"], Framing()
        return exchange

    def write(self, data):
        """Take `data` as what is to be sent next."""
        if self.tls is not None:
            self.tls.write(data)
            data = self.outgoing.read()
        self.pending += data
        self.used += 1

    def flush(self):
        """Send what the socket takes; whether something is left. Raises OSError."""
        self._send()
        if not self.pending:
            self.exchange["sent_ns"] = now()
        return bool(self.pending)

    def _send(self):
        with contextlib.suppress(BlockingIOError):
            self.pending = self.pending[self.sock.send(self.pending) :]

    def read(self):
        """One read as a piece (kernel stamp as bytes or None, read_ns, data); sets `closed`. Raises OSError."""
        data, ancillary, _, _ = self.recvmsg(READ_BYTES, STAMP_SPACE)
        read_ns = now()
        if not data:
            self.closed = True
        elif self.tls is not None:
            data = self._decrypt(data)
        return ancillary[0][2] if ancillary else None, read_ns, data

    def _decrypt(self, data):
        self.incoming.write(data)
        parts = []
        try:
            while part := self.tls.read(READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            return b"".join(parts)
        except ssl.SSLZeroReturnError:
            pass
        self.closed = True
        return b"".join(parts)
