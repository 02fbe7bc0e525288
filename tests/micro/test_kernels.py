import pytest
import torch

from k25lib.micro import gemm, kernels, timing

GATE_UP = {"name": "routed gate_up", "m": 1, "n": 512, "k": 7168, "batch": 1, "dtype": "int4", "group_size": 32}


def passes(out, reference):
    mean, largest = timing.relative_errors(out, reference)
    return mean < gemm.MEAN_BOUND and largest < gemm.MAX_BOUND


def test_packed_integers_are_eight_along_k_least_significant_first():
    packed = torch.tensor([[0x76543210], [-1]], dtype=torch.int32)
    assert kernels.unpack_int4(packed).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7] + [15] * 8


def test_dequantize_by_hand():
    packed = torch.tensor([[0x76543210], [-1]], dtype=torch.int32)
    scales = torch.tensor([[2.0], [0.5]])
    assert kernels.dequantize(packed, scales).flatten().tolist() == [-16, -14, -12, -10, -8, -6, -4, -2] + [3.5] * 8


def test_weight_bytes_are_those_of_the_model():
    assert kernels.weight_bytes(GATE_UP) * 8 == 16_515_072
    assert kernels.weight_bytes({"n": 2112, "k": 7168, "dtype": "bf16"}) == 30_277_632


# The planted bugs of a W4A16 kernel, each in torch's own CPU kernel at Kimi-K2.5's dimensions.


@pytest.fixture(scope="module", params=[(512, 7168), (7168, 256)], ids=["gate_up", "down"])
def case(request):
    torch.manual_seed(1)
    n, k = request.param
    kernel = kernels.torch_int4(GATE_UP | {"n": n, "k": k}, "cpu", 1)
    x = torch.randn(4, k, dtype=torch.bfloat16)
    return kernel, x, x.float() @ kernel.dense(0)


def test_the_kernel_itself_passes(case):
    kernel, x, reference = case
    assert passes(kernel.call(x, kernel.weights[0]), reference)


def test_a_wrong_last_scale_group_is_caught(case):
    kernel, x, reference = case
    layout, scales = kernel.weights[0]
    scales = scales.clone()
    scales[-1, :, 0] *= 1.1
    assert not passes(kernel.call(x, (layout, scales)), reference)


def test_sixteen_zero_rows_are_caught(case):
    kernel, x, reference = case
    out = kernel.call(x, kernel.weights[0]).clone()
    out[:, 32:48] = 0
    assert timing.relative_errors(out, reference)[0] < 4e-2  # the mean alone, at the bound often used, passes it
    assert not passes(out, reference)


def test_transposed_scales_are_caught(case):
    kernel, x, reference = case
    layout, scales = kernel.weights[0]
    groups, n, _ = scales.shape
    turned = scales[..., 0].t().reshape(groups, n)
    assert not passes(kernel.call(x, (layout, torch.stack([turned, scales[..., 1]], -1))), reference)


def test_other_dimensions_are_not_run_with_a_reason():
    with pytest.raises(kernels.NotRun, match="not a multiple of the group of 32"):
        kernels.torch_int4(GATE_UP | {"k": 7160}, "cpu", 1)
    with pytest.raises(kernels.NotRun, match="does not take N=500"):
        kernels.torch_int4(GATE_UP | {"n": 500}, "cpu", 1)
    with pytest.raises(kernels.NotRun, match="no kernel for fp8"):
        kernels.weight_bytes(GATE_UP | {"dtype": "fp8"})


@pytest.fixture(scope="module")
def operators():
    library = torch.library.Library("k25bind", "DEF")
    library.define("op(Tensor a, Tensor? c_or_none, Tensor b_scales, int size_m, bool flag, int thread_k=-1) -> Tensor")
    library.define("newer(Tensor a, Tensor extra) -> Tensor")
    yield torch.ops.k25bind
    library._destroy()


def test_arguments_by_name_in_the_operators_order(operators):
    values = {"flag": True, "size_m": 3, "b_scales": "S", "a": "A", "unused": 1}
    assert kernels.bind(operators.op, values) == ["A", None, "S", 3, True, -1]


def test_an_optional_argument_takes_its_value(operators):
    values = {"flag": True, "size_m": 3, "b_scales": "S", "a": "A", "c": "C", "thread_k": 8}
    assert kernels.bind(operators.op, values) == ["A", "C", "S", 3, True, 8]


def test_an_unknown_argument_is_named(operators):
    with pytest.raises(kernels.NotRun, match="extra"):
        kernels.bind(operators.newer, {"a": "A"})
