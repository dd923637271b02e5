"""Llama, Qwen2 and Qwen3: their numbers and weights, their torch net and their JAX net."""
