"""Nets of engines for evaluation."""
