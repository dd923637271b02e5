"""Checkpoint folders: writing, finding, verifying and pruning them; which rank writes which file; LoRA adapters."""
