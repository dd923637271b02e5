"""Tokenizers: fitting, opening, encoding, and moving a model to another vocabulary."""
