"""Self time of nested CPU operators: the time in which an operator is the innermost one running on its thread."""

import numpy as np


def own_time(start_ns, dur_ns, thread):
    """(own ns of each operator, (row, start, end) of the segments that make it up); rows sorted by segment start.

    Of operators that overlap without nesting (clock noise) the one that began last is the innermost.
    """
    own = np.zeros(len(start_ns), np.int64)
    rows, starts, ends = [], [], []
    end_ns = start_ns + dur_ns
    for each in np.unique(thread):
        members = np.flatnonzero(thread == each)
        members = members[np.lexsort((-dur_ns[members], start_ns[members]))]
        stack, cursor = [], 0

        def run_until(time, stack=stack):
            nonlocal cursor
            row, _ = stack[-1]
            if time > cursor:
                rows.append(row)
                starts.append(cursor)
                ends.append(time)
                own[row] += time - cursor
                cursor = time

        for row, start, end in zip(members.tolist(), start_ns[members].tolist(), end_ns[members].tolist(), strict=True):
            while stack and stack[-1][1] <= start:
                run_until(stack[-1][1])
                stack.pop()
            if stack:
                run_until(start)
            cursor = start
            stack.append((row, end))
        while stack:
            run_until(stack[-1][1])
            stack.pop()
    order = np.argsort(starts, kind="stable")
    return own, tuple(np.array(values, np.int64)[order] for values in (rows, starts, ends))
