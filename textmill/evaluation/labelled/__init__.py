"""Evaluation of models with finetuned heads: predictions for a split or for files, and their metrics."""
