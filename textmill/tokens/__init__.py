"""Documents in, token ids out, batches out.

vocabulary/          tokenizers: fitting, opening, encoding
tokenize.py          the command: encodes the corpus (encoding.py) into token stores, with their lineage (lineage.py)
store.py             a token store: memory-mapped ids, and where each document starts
merge.py             the command that joins token stores
splits.py            the stores of a run's train, valid and test splits, with their weights in a blend
batches/             from stores to the batches of a step
labelled.py          examples with labels
chat.py              conversations as token ids
existing_tokens.py   token ids that other tools wrote; bert_examples.py and tfrecord.py: BERT's TFRecord files
"""
