"""Dropout in JAX: the same hash as in torch, so the same elements are dropped."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

PRIME = 0x9E3779B1
FIRST = 0x85EBCA6B
SECOND = 0xC2B2AE35


def drop(x: Array, fraction: float, keys_N: Array | None, site: int) -> Array:
    """Zero a fraction of x [samples, ...] and scale up the rest; no dropout without keys."""
    if keys_N is None or fraction == 0:
        return x
    counters = jnp.arange(math.prod(x.shape[1:]), dtype=jnp.uint32).reshape(x.shape[1:])
    keys = _mix(keys_N + jnp.uint32(site * PRIME % (1 << 32))).reshape(-1, *[1] * (x.ndim - 1))
    keep = (_mix(counters * (keys | 1) + keys) >> 8) >= jnp.uint32(int(fraction * (1 << 24)))
    return x * keep * (1 / (1 - fraction))


def _mix(x: Array) -> Array:
    """Murmur3's finaliser on 32-bit integers."""
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 13)) * jnp.uint32(SECOND)
    return x ^ (x >> 16)
