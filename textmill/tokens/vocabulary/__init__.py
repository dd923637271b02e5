"""Tokenizers: fitting, opening, encoding, and changing the vocabulary of a model."""
