"""Machines as the planner sees them."""

from __future__ import annotations

from textmill.planning.plan import MachineProfile

TWO_CORES = MachineProfile("cpu", "CPU", 2, 16 << 30, ((163_840, 2.2e10), (1_966_080, 3.4e10)), 8.0)
H200 = MachineProfile("cuda", "NVIDIA H200", 16, 140 << 30, ((7_500_000, 2.0e14), (124_000_000, 4.5e14)), 28.0)
