"""Text in, clean documents out: sources are read, cleaned, deduplicated and split, with an account of every record."""
