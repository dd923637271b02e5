"""AdamW and Muon for torch and JAX: step_torch.py and step_jax.py choose between them for each weight.

Parameter groups (weight decay, learning-rate factors, frozen weights) come from models/parameter_groups.py.
"""
