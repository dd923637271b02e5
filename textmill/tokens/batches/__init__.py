"""Batches for training and evaluation, computed from a step number; one file per layout."""
