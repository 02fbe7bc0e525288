"""Signals and blocks that they must not cut off: handlers for the length of a block, signals that wait for its end."""

import signal
import threading
from contextlib import contextmanager


def unignored(*numbers):
    """Those of the signals that this process does not ignore (as under nohup)."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def handled(numbers, handler):
    """Another handler of these signals within the block; none outside the main thread, which alone may have one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


@contextmanager
def held(numbers, told=None):
    """These signals wait for the block's end; the first of them is raised then.

    told: called with each as it comes, and with those that came before.
    """
    kept = []

    def keep(number, _):
        if told:
            told(number, tuple(kept))
        kept.append(number)

    with handled(numbers, keep):
        yield
    for number in kept[:1]:
        signal.raise_signal(number)
