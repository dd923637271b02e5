"""Batches for training and evaluation, computed from a step number; one file per layout.

loader.py     `open_batches`: the layout of `train.layout` over the stores of a split; `Batches.batch_at(step)`
blend.py      which samples a step has, and which store each comes from
batch.py      `Batch`, the interface of a layout, and what the layouts share: shuffling, prefix sums
packed.py, padded.py, chat.py, masked.py, features.py, labelled.py    the layouts, each with an example
"""
