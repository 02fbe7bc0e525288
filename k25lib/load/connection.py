"""One keep-alive connection of the load worker: TCP or TLS, kernel receive stamps, the framing of a response."""

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


def clock_offset_ns():
    """Realtime minus monotonic clock, in ns: the tightest of 200 readings."""
    readings = ((now(), time.time_ns(), now()) for _ in range(200))
    return min((after - before, real - (before + after) // 2) for before, real, after in readings)[1]


class Framing:
    """Whether an HTTP response is complete. It is fed only when it may be: a chunked body ends in an empty line."""

    def __init__(self):
        self.parser = httptools.HttpResponseParser(self)
        self.chunked = self.sized = self.lazy = self.complete = self.started = self.body = False
        self.fed = 0  # pieces

    def on_header(self, name, value):
        name = name.lower()
        self.chunked |= name == b"transfer-encoding" and b"chunked" in value.lower()
        self.sized |= name == b"content-length"

    def on_headers_complete(self):
        self.started, self.lazy = True, self.chunked

    def on_body(self, data):
        self.body = True

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
    """A connection and the exchange that is on it. `sock` is None while it is closed."""

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

    def open(self, plan, context):
        """Connect, blocking: it is done before the load, or after the server closed. Raises OSError."""
        family, kind, proto, _, address = plan["address"]
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(plan["connect_timeout_s"])
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context:
                self.handshake(sock, context, plan["host"])
            if sys.platform == "linux":
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        self.sock, self.fd, self.used, self.pending = sock, sock.fileno(), 0, b""

    def handshake(self, sock, context, host):
        """Begin a TLS session through memory, so that every read of the socket keeps its stamp."""
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(self.outgoing.read())
                data = sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError("closed during the TLS handshake") from None
                self.incoming.write(data)
            else:
                return sock.sendall(self.outgoing.read())

    def encrypt(self, data):
        """What goes on the wire for `data`."""
        if self.tls is None:
            return data
        self.tls.write(data)
        return self.outgoing.read()

    def receive(self, offset_ns):
        """(stamp_ns, read_ns, data, closed) of one read; stamp_ns is None without a kernel stamp. Raises OSError.

        The stamp is that of the last segment read: it is exact while the client reads faster than tokens come.
        """
        data, ancillary, _, _ = self.sock.recvmsg(READ_BYTES, STAMP_SPACE)
        read_ns = now()
        stamp_ns = None
        if ancillary and ancillary[0][1] == SO_TIMESTAMPNS:
            seconds, nanoseconds = _timespec(ancillary[0][2])
            stamp_ns = seconds * 1_000_000_000 + nanoseconds - offset_ns
        if self.tls is None or not data:
            return stamp_ns, read_ns, data, not data
        return stamp_ns, read_ns, *self._decrypt(data)

    def _decrypt(self, data):
        self.incoming.write(data)
        parts = []
        try:
            while part := self.tls.read(READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            return b"".join(parts), False
        except ssl.SSLZeroReturnError:
            pass
        return b"".join(parts), True
