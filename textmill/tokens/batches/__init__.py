"""Batches by arithmetic: one file a layout."""
