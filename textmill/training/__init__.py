"""The training loop and its parts: starting and resuming a run, its length, logging, saving, divergence checks."""
