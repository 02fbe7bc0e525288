"""Faults for the workers' tests.

K25_PLANT is "<fault>:<rank>:<bytes>" for the AllReduce of that size on that rank,
or "<fault>" for GEMMs of three rows.

Python imports this before anything else where this folder is on PYTHONPATH; the workers themselves know nothing of it.
"""

import os

_fault, _rank, _bytes = (os.environ.get("K25_PLANT", "") + "::").split(":")[:3]

if _fault and os.environ.get("RANK", "") == _rank:
    import signal
    import sys
    import time

    import torch
    import torch.distributed as dist

    reduce, linear = dist.all_reduce, torch.nn.functional.linear

    def planted_reduce(tensor, *args, **more):
        if tensor.numel() * 2 != int(_bytes or 0):
            return reduce(tensor, *args, **more)
        if _fault == "die":
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if _fault == "hang":
            time.sleep(1000)
        if _fault == "late":
            time.sleep(0.05)
        if _fault == "raise":
            raise RuntimeError("planted: unsupported operation")
        if _fault == "other":
            return dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)
        if _fault == "corrupt":
            reduce(tensor, *args, **more)
            tensor[3] += 1
            return None
        return reduce(tensor, *args, **more)

    def planted_linear(x, weight, *args):
        if x.shape[0] == 3:
            if _fault == "gemm-die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if _fault == "gemm-hang":
                time.sleep(1000)
            if _fault == "gemm-memory":
                raise torch.OutOfMemoryError("planted: out of memory")
            if _fault == "gemm-nan":
                return linear(x, weight, *args) * float("nan")
        return linear(x, weight, *args)

    dist.all_reduce, torch.nn.functional.linear = planted_reduce, planted_linear
