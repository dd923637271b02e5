"""Documents in, token ids out, batches out.

vocabulary/   tokenizers: fitting, opening, encoding
tokenize.py   the command: encodes the corpus (shard_encoding.py) into token stores (store_writer.py)
store.py      a token store: memory-mapped ids, and where each document starts
splits.py     the stores of a run's train, valid and test splits, with their weights in a blend
batches/      from stores to the batches of a step
labelled/     examples with labels

Chat: chat_template.py, jinja_template.py, chat_rendering.py, chat_checks.py. Existing token ids of other tools:
existing_tokens.py, token_tables.py, and tfrecord.py, example_messages.py, bert_examples.py for BERT's TFRecord files.
"""
