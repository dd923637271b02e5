"""BERT: an encoder that is trained to predict masked tokens and, optionally, a class for each sentence pair."""
