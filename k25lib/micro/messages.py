"""The messages of collectives: their data, the call that moves them, the check after it, and their bandwidth.

`bytes` (S) is the whole message: what a rank holds before an AllReduce, ReduceScatter or All-to-All, and after an
AllGather. algbw = S/t; busbw = algbw x FACTORS, the conventions of nccl-tests.
"""

import os

import torch
import torch.distributed as dist

from k25lib.micro import timing
from k25lib.micro.timing import NotRun

FACTORS = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "dispatch+combine": lambda n: 2 * (n - 1) / n,  # two All-to-Alls of S each
}


def bandwidths(op, size_bytes, time_us, world):
    """(algbw, busbw) in 10^9 bytes/s of one collective of `size_bytes` that took `time_us` over `world` ranks."""
    algbw = size_bytes / time_us / 1e3
    return algbw, algbw * FACTORS[op](world)


def values(elements, rank, call, world, device):
    """The test data of one rank and call: small integers, so that a sum over all ranks is exact in BF16.

    The factors have no divisor in common with any modulus: values differ along the buffer, by rank and by call.
    """
    most = max(1, min(6, 256 // world))
    index = torch.arange(elements, device=device, dtype=torch.int64)
    return ((index * 17 + rank * 23 + call * 29) % (2 * most + 1) - most).to(torch.bfloat16)


class Buffers:
    """What one call reads and writes: `refill()` before a round, `run()` the call, `wrong()` elements after it."""

    def __init__(self, task, call, rank, world, device, reduce):
        self.op, size = task["op"], task["bytes"]
        split = 1 if self.op == "allreduce" else world
        if size % (2 * split):
            raise ValueError(f"{size} bytes do not divide into {split} BF16 parts")
        total, part = size // 2, size // 2 // split
        mine = [values(total if self.op != "allgather" else part, r, call, world, device) for r in range(world)]
        self.source = mine[rank]
        self.input = self.source.clone()
        whole = slice(rank * part, (rank + 1) * part)
        if self.op == "allreduce":
            self.output, self.expected = self.input, sum(v.float() for v in mine)
        elif self.op == "allgather":
            self.output, self.expected = torch.zeros(total, dtype=torch.bfloat16, device=device), torch.cat(mine)
        elif self.op == "reducescatter":
            self.output = torch.zeros(part, dtype=torch.bfloat16, device=device)
            self.expected = sum(v[whole].float() for v in mine)
        elif self.op == "alltoall":
            self.output, self.expected = torch.zeros_like(self.input), torch.cat([v[whole] for v in mine])
        elif self.op == "dispatch+combine":  # there and back again: what comes home is what left
            self.output, self.expected = torch.zeros_like(self.input), self.source
        else:
            raise NotRun(f"no operation {self.op!r}")
        self.reduce = reduce

    def refill(self):
        self.input.copy_(self.source)
        if self.output is not self.input:
            self.output.zero_()

    def run(self):
        if self.op == "allreduce":
            self.output = self.reduce(self.input)
        elif self.op == "allgather":
            dist.all_gather_into_tensor(self.output, self.input)
        elif self.op == "reducescatter":
            dist.reduce_scatter_tensor(self.output, self.input)
        elif self.op == "alltoall":
            dist.all_to_all_single(self.output, self.input)
        else:
            dist.all_to_all_single(self.output, self.input)
            dist.all_to_all_single(self.input, self.output)

    def wrong(self):
        found = self.input if self.op == "dispatch+combine" else self.output
        return int((found.float() != self.expected.float()).sum())


def reducer(backend, control, device):
    """The AllReduce of a backend: a function of a tensor that returns the reduced one, and its graph context.

    Raises NotRun where this backend can't be had, with the reason.
    """
    if backend in ("nccl", "gloo"):
        if backend != dist.get_backend():
            raise NotRun(f"the ranks talk {dist.get_backend()} here")

        def in_place(tensor):
            dist.all_reduce(tensor)
            return tensor

        return in_place, None
    if device.type != "cuda":
        raise NotRun(f"{backend} needs GPUs")
    if backend == "symm_mem" and os.environ.get("VLLM_ALLREDUCE_USE_SYMM_MEM") == "0":
        raise NotRun("switched off by VLLM_ALLREDUCE_USE_SYMM_MEM=0")
    os.environ.setdefault("VLLM_SKIP_P2P_CHECK", "1")  # its own check wants the server's process groups
    try:
        if backend == "pynccl":
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator as Communicator
        elif backend == "custom":
            from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce as Communicator
        elif backend == "symm_mem":
            from vllm.distributed.device_communicators.symm_mem import SymmMemCommunicator as Communicator
        else:
            raise NotRun(f"no backend {backend!r}")
        communicator = Communicator(control, device)
    except NotRun:
        raise
    except Exception as error:
        raise NotRun(f"vLLM's {backend} is not usable here: {timing.one_line(error)}") from error
    if getattr(communicator, "disabled", False):
        raise NotRun(f"vLLM's {backend} disables itself on these GPUs (see its log)")
    call = {
        "pynccl": lambda tensor: communicator.all_reduce(tensor, stream=torch.cuda.current_stream()),
        "custom": getattr(communicator, "custom_all_reduce", None),
        "symm_mem": communicator.all_reduce,
    }[backend]

    def out_of_place(tensor):
        out = call(tensor)
        if out is None:
            raise NotRun(f"vLLM's {backend} does not take {tensor.numel() * 2} bytes")
        return out

    return out_of_place, communicator.capture if backend == "custom" else None
