"""Prepare a corpus: read sources, clean and deduplicate documents, split them, and account for every record."""
