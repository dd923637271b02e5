"""MongoDB collections: read by position, and written to."""
