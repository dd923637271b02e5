"""GPT-2: its numbers and weights, its torch net, its JAX net and its fast decoding.

family.py describes the shape and every weight; net_torch.py is the net, as a reader of nanoGPT knows it. The other
families have the same files.
"""
