"""Exact and near-duplicate documents: found, clustered and dropped."""
