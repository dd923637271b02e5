"""The section for `textmill plan`: the machine to plan for and its price."""

from __future__ import annotations

from textmill.config.section import Section, per_call


class PlanConfig(Section):
    """The machine that `textmill plan` estimates a run for; default: this one. No folder records these settings."""

    gpu: str | None = per_call(None)
    """The GPU by its product name, such as H100, A100 or V100: sets memory and peak FLOP/s; default: this machine's
    device."""
    devices: int | None = per_call(None, ge=1)
    """How many devices, on all machines together; default: as many as `engine.mesh` needs."""
    memory_gb: float | None = per_call(None, gt=0)
    """Memory of one device in GB (2^30 bytes); default: that of `plan.gpu`, or of this machine's device."""
    tflops: float | None = per_call(None, gt=0)
    """Peak of one device in 10^12 operations per second, dense, in the precision of the run; default: that of
    `plan.gpu`."""
    mfu: float = per_call(0.4, gt=0, le=1)
    """The fraction of the peak that training is assumed to reach, if no step can be timed here."""
    price: float | None = per_call(None, ge=0)
    """Price of one device for an hour, in any currency; default: no cost is printed."""
    tokens: int | None = per_call(None, ge=1)
    """Tokens of the train split; default: counted in the token store, if there is one."""
    probe_steps: int = per_call(20, ge=0)
    """How many training steps are timed, if the run fits on this machine's device; 0: none."""
