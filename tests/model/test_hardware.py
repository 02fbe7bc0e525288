"""Devices by the names that drivers and people give them."""

import pytest

from k25lib import hardware


@pytest.mark.parametrize(
    ("given", "name", "dram_gb_s"),
    [
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell", 1792),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell", 1792),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 1792),
        ("NVIDIA L40S", "L40S", 864),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM", 2039),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 1935),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 3352),
        ("NVIDIA H100 PCIe", "H100 PCIe", 2039),
        ("NVIDIA H200", "H200 SXM", 4800),
        ("b200", "B200", 8000),
    ],
)
def test_find(given, name, dram_gb_s):
    device = hardware.find(given)
    assert (device.name, device.dram_gb_s, device.measured) == (name, dram_gb_s, False)


@pytest.mark.parametrize("given", ["", "NVIDIA RTX 6000 Ada Generation", "Tesla T4", "NVIDIA GeForce RTX 4090", "L40"])
def test_an_unlisted_device_is_not_guessed(given):
    assert hardware.find(given) is None


def test_every_device_has_its_source_and_finds_itself():
    for device in hardware.known():
        assert device.source
        assert device.l2_bytes > 2**20
        assert device.bf16_tflop_s > 0
        assert hardware.find(device.name) == device


def test_a_measured_device_is_labelled():
    device = hardware.measure("cpu", megabytes=8, repeats=2)
    assert device.measured
    assert device.source.startswith("measured here: best of 2 copies of 8 MiB")
    assert device.dram_gb_s > 0
    assert device.bf16_tflop_s > 0
