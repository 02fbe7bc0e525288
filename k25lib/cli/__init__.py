"""The command `k25`: each measurement alone, as text or JSON, and the whole campaign.

Every command module has `add(commands)`, which declares arguments, and functions that import what they need when
they run: `k25 breakdown` must not pay for pandas.
"""

import argparse
import errno
import importlib
import json
import os
import signal
import sys
from contextlib import contextmanager

from k25lib.errors import K25Error, UsageError
from k25lib.signals import handled, held, unignored

MODULES = ("campaign", "server", "load", "model", "micro", "trace", "findings")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser():
    """The argument parser of all commands; `args.run(args)` returns the exit code (None is 0)."""
    top = _Parser(prog="k25", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in MODULES:
        importlib.import_module(f"k25lib.cli.{name}").add(commands)
    return top


def print_json(value):
    """Print one JSON object on stdout; NaN and infinity are bugs, not output."""
    text = json.dumps(value, allow_nan=False)  # whole before the first byte
    with held(unignored(signal.SIGTERM, signal.SIGHUP, signal.SIGINT)):  # half a JSON object is none
        print(text, flush=True)


def main(argv=None):
    """Run one command. Returns 0, 1 (could not), 2 (usage), 3 (`compare`: worse beyond --fail-over), 128 + the number
    of the signal that ended it (130 for Ctrl-C)."""
    sent = []
    try:
        with _signals_as_interrupt(sent):
            args = parser().parse_args(argv)
            code = args.run(args) or 0
            sys.stdout.flush()  # a full disk or a reader that has gone shows here, not at the interpreter's end
    except K25Error as error:
        print(f"k25: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("k25: interrupted; what was measured so far is kept", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 0  # the reader (head, less) has gone: nothing is wrong
    except OSError as error:
        print(f"k25: {_told(error)}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # what could not be written is dropped, or the interpreter would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 128 + sent[0] if sent and code == 130 else code


def _told(error):
    """A file or folder that can't be read or written, as one line that says what to do."""
    place = f" ({error.filename})" if error.filename else ""
    hint = {
        errno.ENOSPC: ": make room, or set K25_RUNS and K25_REPORTS to folders elsewhere",
        errno.EACCES: ": set K25_RUNS and K25_REPORTS to folders of yours",
        errno.EROFS: ": set K25_RUNS and K25_REPORTS to folders that can be written",
    }.get(error.errno, "")
    return f"{error.strerror or error}{place}{hint}"


@contextmanager
def _signals_as_interrupt(sent):
    """SIGTERM and SIGHUP are Ctrl-C to a command: what was measured is kept and printed. `sent` gets their number."""

    def interrupt(number, _):
        sent.append(number)
        raise KeyboardInterrupt

    with handled(unignored(signal.SIGTERM, signal.SIGHUP), interrupt):
        yield
