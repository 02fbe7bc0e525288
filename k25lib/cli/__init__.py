"""The command `k25`: each measurement alone, as text or JSON, and the whole campaign.

Every command module has `add(commands)`, which declares arguments, and functions that import what they need when
they run: `k25 breakdown` must not pay for pandas.
"""

import argparse
import importlib
import json
import sys

from k25lib.errors import K25Error, UsageError

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
    json.dump(value, sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


def main(argv=None):
    """Run one command. Returns 0, 1 (could not), 2 (usage), 3 (`compare`: worse beyond --fail-over)."""
    try:
        args = parser().parse_args(argv)
        return args.run(args) or 0
    except K25Error as error:
        print(f"k25: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("k25: interrupted; what was measured so far is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has gone: nothing is wrong
        return 0
