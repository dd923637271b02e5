"""GPT-2: its facts in numpy, its torch net, its JAX net and its fast decoding.

facts.py describes the shape and every weight; net_torch.py is the net, as a reader of nanoGPT knows it. The other
families have the same files.
"""
