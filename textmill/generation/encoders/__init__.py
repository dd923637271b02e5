"""Embeddings of texts and filled masks: what a model computes from whole texts, without new tokens."""
