"""AdamW and Muon for torch and JAX."""
