"""Batches for training and evaluation, computed from a step number; one file per layout.

from_config.py    `open_batches`: the layout of `train.layout` over the stores of a split
by_step.py        `Batches.batch_at(step)`: which samples, from which store (batch_sizes.py, blend.py, history.py)
layout.py         the interface of a layout: sample numbers in, arrays out
packed.py, padded.py, chat.py, masked.py, features.py, labelled.py    the layouts, each with an example
windows.py        sliding windows, for the loss of an entire split
shuffle.py        a permutation by arithmetic, without a list of all items
"""
