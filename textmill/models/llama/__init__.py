"""Llama, Qwen2 and Qwen3: their facts in numpy, their torch net and their JAX net."""
