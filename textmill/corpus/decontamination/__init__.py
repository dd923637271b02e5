"""Decontamination: find documents that share long n-grams of words with evaluation data."""
