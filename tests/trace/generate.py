"""Makes Kineto captures with known contents, laid out as torch.profiler writes them. Standard library only."""

import gzip
import json
import random
import tempfile
from pathlib import Path

BASE_NS = 1767189312000000000
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MARLIN = (
    "void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l, 1125899906909960l, 2814749767106568l, 128, 1, "
    "8, 4, true, 4, 2, false>(int4 const*, int4 const*, int4*, int4*, int4 const*, float const*, int4 const*, int)"
)
FLASH = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90"
    "<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> > > > > >(flash::Params)"
)
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float> > >(int)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)"
OTHERS = (  # more of a real layer, for captures of a real size
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>(int)",
    "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, c10::BFloat16 const*, long, long, long, long)",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*, c10::BFloat16*, int, long)",
    "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(int, int, int)",
    "void vllm::moe::grouped_topk_fused_kernel<float, float, int, (vllm::moe::ScoringFunc)1>(float*, float*, int*)",
    "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int*, int, int, int)",
    "void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162, &(c10::BFloat16 vllm::silu_kernel)>(int)",
)


def us(ns):
    """Microseconds with three decimals, as Kineto writes them."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def complete(cat, name, pid, tid, ns, dur_ns, args=""):
    """One "X" event in Kineto's own layout."""
    return (
        f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {us(ns)}, "dur": {us(dur_ns)},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def kernel(name, ns, dur_ns, correlation, stream=7, external=None):
    """A kernel, with the arguments that Kineto gives it."""
    more = f'"External id": {external},      ' if external else ""
    args = (
        f'{more}"queued": 0, "device": 0, "context": 1,      "stream": {stream}, "correlation": {correlation},      '
        '"registers per thread": 96,      "shared memory": 82240,      "blocks per SM": 0.121212,      '
        '"warps per SM": 2.060606,      "grid": [16, 1, 1],      "block": [544, 1, 1]'
    )
    return complete("kernel", name, 0, stream, ns, dur_ns, args)


def flow(phase, number, pid, tid, ns):
    """Start ("s") or end ("f") of the arrow from a launch to its kernels."""
    bound = ', "bp": "e"' if phase == "f" else ""
    return (
        f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {us(ns)},\n'
        f'    "cat": "ac2g", "name": "ac2g"{bound}\n  }}'
    )


def wrap(events, rank=0, world=1, base_ns=BASE_NS, info=True):
    """A whole trace file's text around events."""
    about = (
        f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world}, "pg_count": 3}},'
        if info
        else ""
    )
    return (
        f'\n  {{\n    "schemaVersion": 1,\n    "deviceProperties": [\n    {{\n      "id": 0, "name": "H200"\n    }}\n'
        f'    ],\n      {about}\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {base_ns},\n  "traceEvents": [\n'
        + ",\n".join(events)
        + '\n  ],\n  "traceName": "/tmp/tmp.json"\n}\n'
    )


def rank_events(
    rank,
    decode=4,
    prefill=1,
    allreduces=123,
    layers=61,
    others=0,
    batch=1,
    delay_ns=0,
    transfer_ns=7000,
    transfer_prefill_ns=37000,
    gap_ns=50_000,
    gpu_marks=True,
    cpu_marks=True,
    launches=True,
    correlations=True,
    graph=True,
    seed=0,
    python_events=0,
    start_ns=5_000_000_000_000_000,
):
    """Events of one rank, and what is true of them: {"kernels", "decode_sum_ns", "passes"}.

    `prefill` prefill passes, spread over `decode` decode steps; `delay_ns` is how much later than rank 0 this rank
    comes to every collective: rank 0 waits that long in it.
    """
    events, now, correlation, external, pid = [], start_ns, 1000 + rank, 1, 400 + rank
    rnd = random.Random(seed)
    truth = {"kernels": 0, "decode_sum_ns": 0, "passes": 0}
    events.append(
        f'  {{\n    "name": "process_name", "ph": "M", "ts": {us(now)}, "pid": {pid}, "tid": 0,\n'
        f'    "args": {{\n      "name": "VLLM::Worker_TP{rank}"\n    }}\n  }}'
    )
    every = max(1, decode // prefill) if prefill else decode + 1
    kinds = []
    for step in range(decode):
        kinds += (["prefill"] if step % every == 0 and kinds.count("prefill") < prefill else []) + ["decode"]
    for kind in kinds:
        external += 1
        name = (
            f"execute_context_0(0)_generation_{batch}({batch})"
            if kind == "decode"
            else "execute_context_1(128)_generation_0(0)"
        )
        begin, cpu = now, now - 900_000
        transfer = transfer_ns if kind == "decode" else transfer_prefill_ns
        sequence = [(FILL, 900)]
        for layer in range(layers):
            sequence += [(FLASH, 11_000 + rnd.randrange(500)), (MARLIN, 9_000)]
            sequence += [(OTHERS[(layer + i) % len(OTHERS)], 1_500 + rnd.randrange(900)) for i in range(others)]
            sequence += [(NCCL, None)] * (allreduces // layers)
        sequence += [(NCCL, None)] * (allreduces - allreduces // layers * layers)
        sequence += [(GATHER, None), (ARGMAX, 4_000)]
        correlation += 1
        step_correlation, kernels_of_pass = correlation, []
        for i, (label, dur) in enumerate(sequence):
            if kind == "prefill" and i == len(sequence) // 2:  # another kernel or two: a prefill is no decode step
                kernels_of_pass += [
                    ("nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT", now + j * 30_000, 20_000) for j in range(40)
                ]
                now += 40 * 30_000
            if dur is None:  # all ranks come to it at `now + delay`, and leave it together
                most = DELAYS_NS
                kernels_of_pass.append((label, now + delay_ns, most - delay_ns + transfer))
                now += most + transfer + 500
            else:
                kernels_of_pass.append((label, now, dur * (3 if kind == "prefill" else 1)))
                now += dur * (3 if kind == "prefill" else 1) + 500
        if launches:
            api = "cudaGraphLaunch" if graph and kind == "decode" else "cudaLaunchKernel"
            events.append(
                complete("cuda_runtime", api, pid, pid, cpu + 1000, 9000, f'"cbid": 311, "correlation": {correlation}')
            )
            events.append(flow("s", correlation, pid, pid, cpu + 1000))
        for label, at, dur in kernels_of_pass:
            shared = graph and kind == "decode"
            correlation += not shared
            number = (step_correlation if shared else correlation) if correlations else 0
            events.append(kernel(label, at, dur, number, 7, None if shared else external))
            if launches and not shared:
                events.append(
                    complete("cuda_runtime", "cudaLaunchKernel", pid, pid, cpu + 2000, 900, f'"correlation": {number}')
                )
                events.append(flow("s", number, pid, pid, cpu + 2000))
            events.append(flow("f", number, 0, 7, at))
            truth["kernels"] += 1
            truth["decode_sum_ns"] += dur if kind == "decode" else 0
        if cpu_marks:
            events.append(complete("user_annotation", name, pid, pid, cpu, 800_000, f'"External id": {external}'))
        if gpu_marks:  # one a stream
            end = max(at + dur for _, at, dur in kernels_of_pass)
            for piece in ((begin, end), (begin + 10_000, end - 10_000)):
                mark = complete(
                    "gpu_user_annotation", name, 0, 7, piece[0], piece[1] - piece[0], f'"External id": {external}'
                )
                events.append(mark)
        for i in range(python_events):  # what stacks add, so that a file can have a real one's size
            frame = f"vllm/v1/worker/gpu_model_runner.py({rnd.randrange(2000)}): {rnd.getrandbits(40):x}"
            ids = f'"Python parent id": {rnd.randrange(10**6)}, "Python id": {i}, "Ev Idx": {rnd.randrange(10**7)}'
            at = cpu + rnd.randrange(800_000)
            events.append(complete("python_function", frame, pid, pid, at, rnd.randrange(90_000), ids))
        truth["passes"] += 1
        now += gap_ns
    return events, truth


DELAYS_NS = 2_000  # the latest that a rank may come to a collective


def write_capture(folder, ranks=2, delays_ns=(), level=1, name=None, base_ns=BASE_NS, alike=False, **settings):
    """Write one file a rank; returns ([paths], [truth of each rank]). `alike`: all ranks have rank 0's events."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths, truths, body = [], [], b""
    for rank in range(ranks):
        head, foot = wrap(["|"], rank, ranks, base_ns).split("|")
        if not (alike and body):
            events, truth = rank_events(rank, delay_ns=delays_ns[rank] if rank < len(delays_ns) else 0, **settings)
            body = _zipped(events, foot, level)
        stem = (name or "dp0_pp0_tp{r}_dcp0_ep{r}_rank{r}.1767189312{r:03d}").format(r=rank)
        paths.append(folder / f"{stem}.pt.trace.json.gz")
        paths[-1].write_bytes(gzip.compress(head.encode(), level) + body)
        truths.append(truth)
    return paths, truths


def _zipped(events, foot, level):
    """Events and the text behind them as one gzip member, without holding the whole text."""
    with tempfile.TemporaryFile() as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=level) as member:
            for i in range(0, len(events), 10_000):
                member.write(((",\n" if i else "") + ",\n".join(events[i : i + 10_000])).encode())
            member.write(foot.encode())
        file.seek(0)
        return file.read()


def load(path):
    """The events of a trace as dicts, by the standard library."""
    data = json.loads(gzip.decompress(Path(path).read_bytes()))
    return data if isinstance(data, list) else data["traceEvents"]


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="write a generated capture")
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=520)
    parser.add_argument("--others", type=int, default=26)
    parser.add_argument("--python-events", type=int, default=3000, help="of each pass")
    options = parser.parse_args()
    write_capture(
        options.folder,
        options.ranks,
        decode=options.steps,
        prefill=5,
        others=options.others,
        python_events=options.python_events,
        level=6,
    )
