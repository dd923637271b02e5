"""Decontamination: find documents that share long n-grams of words with evaluation data.

1. evaluation_data.write_index    hash all n-grams of the evaluation data into a sorted index of keys
2. pass 1 of prepare              find these keys in each cleaned document (ngrams.NgramIndex.find): pairs of a
                                  document and a key, the hits
3. decisions.drop_contaminated    drop or mark documents with hits, except those of common phrases
"""
