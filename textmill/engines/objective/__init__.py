"""What an engine minimises: where a batch has labels, and the losses of a net's heads there.

A batch becomes micro-batches (micro_batches_torch.py), the net runs on each, and its heads compute the losses
(heads_torch.py; label_heads_torch.py for finetuned heads; heads_jax.py). The cross-entropy itself is in
engines/losses_torch.py.
"""
