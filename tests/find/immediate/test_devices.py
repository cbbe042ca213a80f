"""What estimates take a GPU to be that is not here."""

from __future__ import annotations

import pytest

from miofind.device.device import Device
from miofind.errors import NoDeviceError
from miofind.find.immediate.devices import described


@pytest.mark.parametrize(
    ("identity", "clock_hz", "tb_per_s", "l2_mib"),
    [
        ("NVIDIA H200|132|9.0|", 1.98e9, 4.92, 60),
        ("NVIDIA H100 80GB HBM3|132|9.0|", 1.98e9, 3.35, 50),
        ("NVIDIA H100 PCIe|114|9.0|", 1.755e9, 2.04, 50),
        ("NVIDIA A100-SXM4-80GB|108|8.0|", 1.41e9, 2.04, 40),
        ("NVIDIA A100 80GB PCIe|108|8.0|", 1.41e9, 1.94, 40),
        ("NVIDIA A100-SXM4-40GB|108|8.0|", 1.41e9, 1.56, 40),
        ("NVIDIA A100-PCIE-40GB|108|8.0|", 1.41e9, 1.56, 40),
        ("NVIDIA B200|148|10.0|", 1.856e9, 7.67, 126),
        ("NVIDIA L40S|142|8.9|", 2.52e9, 0.86, 96),
        ("NVIDIA L4|58|8.9|", 2.04e9, 0.30, 48),
        ("NVIDIA A10|72|8.6|", 1.695e9, 0.60, 6),
        ("Tesla T4|40|7.5|", 1.59e9, 0.32, 4),
        ("NVIDIA GeForce RTX 3090|82|8.6|", 1.695e9, 0.94, 6),
        ("NVIDIA GeForce RTX 4090|128|8.9|", 2.52e9, 1.01, 72),
        ("NVIDIA GeForce RTX 5090|170|12.0|", 2.407e9, 1.79, 96),
    ],
)
def test_a_known_gpu_has_the_figures_of_its_kind(identity: str, clock_hz: float, tb_per_s: float, l2_mib: int) -> None:
    """An H100 was taken to move 1 TB/s."""
    device = described(identity)
    assert device.identity == identity
    assert (device.clock_hz, device.l2_bytes) == (clock_hz, l2_mib << 20)
    assert device.bandwidth_bytes_per_s == pytest.approx(tb_per_s * 1e12, rel=0.02)


@pytest.mark.parametrize(
    ("identity", "tb_per_s"),
    [
        ("NVIDIA GH200 480GB|132|9.0|", 3.35),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb|16|9.0|1g.10gb", 0.41),
        ("NVIDIA A30|56|8.0|", 1.06),
        ("NVIDIA B300|148|10.3|", 7.67),
        ("NVIDIA RTX PRO 6000 Blackwell|188|12.0|", 1.98),
    ],
)
def test_an_unknown_gpu_is_like_another_of_its_capability(identity: str, tb_per_s: float) -> None:
    """By multiprocessor: all of them were taken to move 1 TB/s."""
    device = described(identity)
    assert device.identity == identity
    assert device.bandwidth_bytes_per_s == pytest.approx(tb_per_s * 1e12, rel=0.02)


def test_a_gpu_of_an_unknown_capability_has_guessed_figures() -> None:
    assert described("Some GPU|20|12.1|").bandwidth_bytes_per_s == Device.virtual("121").bandwidth_bytes_per_s


def test_processors_stay_as_they_are() -> None:
    assert described("Some processor|64|0.0|").bandwidth_bytes_per_s == Device.cpu().bandwidth_bytes_per_s


def test_what_is_no_identity_is_refused() -> None:
    with pytest.raises(NoDeviceError, match=r"none that can be described: one is 'NVIDIA H200\|132\|9.0\|'"):
        described("NVIDIA H200,132,9.0")
    assert described("NVIDIA H200|132|9.0|").sm_count == 132
