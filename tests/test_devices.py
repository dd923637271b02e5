"""Which precision a device computes in, and the line about a slow one."""

from __future__ import annotations

import warnings

import pytest
import torch

from textmill import devices
from textmill.devices import torch_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("supported", [False, True])
def test_a_cpu_without_bf16_is_reported_in_one_line(
    supported: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch would warn with the stack of its C++ functions."""
    monkeypatch.setattr(devices, "rank_of_launcher", lambda: 0)
    devices._report_slow_bf16.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [torch_dtype(name, CPU) for name in ("bf16", "bf16", "auto", "fp32")] == [
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
            torch.float32,
        ]
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: no\nframe #0: c10::Error", stacklevel=1)
    printed = capsys.readouterr().err.splitlines()
    assert len(seen) == int(supported), "the stack of C++ functions is left out"
    assert len(printed) == int(not supported)
    assert all(line.startswith("textmill: engine.precision: this CPU has no") for line in printed)


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_reports_it(
    variable: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun, mpirun and srun each tell a process its rank by another variable."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, rank)
    devices._report_slow_bf16.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with warnings.catch_warnings():
        torch_dtype("bf16", CPU)
    assert ("no instructions for bf16" in capsys.readouterr().err) == (rank == "0")


def test_a_torch_without_onednn_takes_bf16_without_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a torch has none of oneDNN's operations."""
    devices._report_slow_bf16.cache_clear()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert torch_dtype("bf16", CPU) == torch.bfloat16
    assert capsys.readouterr().err == ""
