"""Documents in, token ids out, batches out."""
