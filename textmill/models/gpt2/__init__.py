"""GPT-2: its facts in numpy, its torch net, its JAX net and its fast decoding."""
