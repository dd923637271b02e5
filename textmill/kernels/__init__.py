"""Fused operations with torch fallbacks: matmuls, attention, norms, GELU, fp8, cross-entropy, optimizers, decoding."""
