"""Kernel names get their category; what says nothing stays unknown."""

from pathlib import Path

import pytest

from k25lib.errors import UsageError
from k25lib.trace.categories import GROUPS, Categories

HERE = Path(__file__).parent
CORPUS = [line.rsplit("\t", 1) for line in (HERE / "kernel-names.tsv").read_text().splitlines()[1:]]
# The corpus files these under `other`; a name that says nothing is shown apart here.
ELSEWHERE = {"triton_poi_fused_3": "fused_other", "triton_red_fused_2": "fused_other"}


@pytest.fixture(scope="module")
def rules():
    return Categories()


def test_the_corpus_gets_the_categories_listed(rules):
    wrong = {name: rules.category(name) for name, category in CORPUS if rules.category(name) != category}
    assert wrong == ELSEWHERE
    assert len(wrong) <= 0.02 * len(CORPUS)


@pytest.mark.parametrize(
    "name",
    [
        "frobnicate",
        "void acme::hyper_kernel<float, 4>(float*, int)",
        "_Z11gallimaufryPfS_i",
        "kernel",
        "triton_",
        "void ns::(anonymous namespace)::step_kernel(int)",
        "x",
        "",
    ],
)
def test_made_up_names_are_unknown(rules, name):
    assert rules.category(name) == "unknown"


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("void marlin_moe_wna16::Marlin<(long)1, (int)128, (bool)0>(const int4 *)", "moe_gemm"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<8> > >(flash::Params)",
            "attention",
        ),
        (
            "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(int)",
            "kv_cache",
        ),
        ("triton_poi_fused_add_all_reduce_mul_7", "other"),
        ("<unnamed>::multimem_all_reduce_kernel", "allreduce_custom"),
        ("void fused_a_gemm_kernel<1, 2112, 7168, 16, 8, 256, 16>(__nv_bfloat16*)", "gemm"),
        ("triton_per_fused_17", "fused_other"),
        ("memcpy128", "memcpy"),
        ("_C::shm_allreduce", "allreduce_custom"),
        ("_C::onednn_mm", "gemm"),
        ("_C::weight_packed_linear", "gemm"),
        ("_C::bmm_cpu", "gemm"),
        ("_C::cpu_fused_moe", "moe_gemm"),
        ("vllm::unified_mla_attention_with_output", "attention"),
        ("vllm::unified_mla_kv_cache_update", "kv_cache"),
    ],
)
def test_traps(rules, name, category):
    assert rules.category(name) == category


def test_operations_of_collectives(rules):
    assert rules.operation("ncclDevKernel_AllGather_RING_LL(x)") == "allgather"
    assert rules.operation("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)") == "reducescatter"
    assert rules.operation("ncclDevKernel_Reduce_Sum_bf16_RING_LL(x)") == "reduce"
    assert rules.operation("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(int)") == "allreduce"
    assert rules.operation("ncclDevKernel_SendRecv(x)") == "sendrecv"
    assert rules.operation("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") is None


def test_folds_keep_unknown_apart(rules):
    for group in GROUPS:
        assert rules.fold("unknown", group) == "unknown"
    assert rules.fold("moe_gemm", "operation") == "gemm"
    assert rules.fold("allreduce_custom", "role") == "allreduce"
    assert {rules.fold(c, "operation") for _, c in CORPUS} == {
        "allreduce", "gemm", "attention", "rms_norm", "rope", "silu_mul", "other",
    }  # fmt: skip
    assert {rules.fold(c, "role") for _, c in CORPUS} == {
        "allreduce", "attention", "other_gemm", "moe_gemm", "routing", "other",
    }  # fmt: skip


def test_a_users_rules_come_first(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "[[rule]]\ncategory = 'moe_gemm'\npattern = 'hyper_kernel|nvjet_mine'\n[groups.role]\nmy_own = 'routing'\n"
    )
    mine = Categories(file)
    assert mine.category("void acme::hyper_kernel(int)") == "moe_gemm"
    assert mine.category("nvjet_mine") == "moe_gemm"
    assert mine.category("nvjet_tst") == "gemm"
    assert mine.fold("my_own", "role") == "routing"


@pytest.mark.parametrize(
    "text",
    [
        "[[rule]]\ncategory='x'\npattern='.*'\n",
        "[[rule]]\ncategory='x'\npattern='.'\n",
        "[[rule]]\ncategory='x'\npattern='[a-z]+'\n",
        "[[rule]]\ncategory='x'\npattern='('\n",
        "[[rule]]\ncategory=['x']\npattern='nccl'\n",
        "[[rule]]\ncategory=1\npattern='nccl'\n",
        "[[collective]]\noperation=''\npattern='nccl'\n",
        "[groups]\nrole = 3\n",
        "[groups.role]\ndefault = 3\n",
        "[groups.kind]\ndefault = 'x'\n",
        "[[rule]]\npattern='x'\n",
        "[[rule]]\ncategory='x'\n",
        "rule = 3\n",
        "not toml",
    ],
)
def test_bad_rules_are_told_in_one_line(tmp_path, text):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as told:
        Categories(file)
    assert "\n" not in str(told.value)
    assert "bad.toml" in str(told.value)


def test_missing_rules_file(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml"):
        Categories(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "category", "operation"),
    [
        ("ncclSymDevKernel_AllReduce_RSxLD_AGxSTMC_bf16(ncclSymDevArgs)", "allreduce_nccl", "allreduce"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", "other_comm", "allgather"),
        ("void tensorrt_llm::mnnvl::oneshotAllreduceFusionKernel<8>(Params)", "allreduce_custom", "allreduce"),
        ("void kernels::mnnvl_allreduce_lamport<bf16>(float*)", "allreduce_custom", "allreduce"),
        ("void moe::all2all::dispatch_kernel<1>(float*)", "other_comm", "alltoall"),
        ("void flashinfer::moeA2ADispatchKernel<1>(float*)", "other_comm", "alltoall"),
        ("triton_poi_fused_add_all_reduce_mul_1", "other", None),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1", "gemm", None),
        ("void (anonymous namespace)::store_kvcache<2048l, 4, false, long>(Params)", "kv_cache", None),
    ],
)
def test_names_of_other_libraries(name, category, operation):
    rules = Categories()
    assert (rules.category(name), rules.operation(name)) == (category, operation)
