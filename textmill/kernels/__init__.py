"""Fused operations with torch fallbacks: matmuls, QKV, norms, GELU, fp8, cross-entropy, decoding, sampling; dropout."""
