"""Find exact and near-duplicate documents, and decide which ones to keep."""
