"""Find exact and near-duplicate documents, and decide which ones to keep.

decisions.py runs these steps, in this order:

    1. find_kept_equals                        drop documents with the same digest
    2. near_duplicates.sketch_chunk            a MinHash sketch of each document, as LSH bands (minhash.py)
    3. near_duplicates.find_candidate_pairs    pairs of documents that share a band, found by sorting
    4. near_duplicates.write_shingle_sets      the shingles of documents that are in a pair
    5. near_duplicates.confirm_pairs           the true Jaccard similarity of each pair
    6. keep_one_per_cluster                    of documents that confirmed pairs connect, keep one

Steps 2, 4 and 5 are tasks for a runner. They communicate by files in the folder `work`, and a finished file is not made
again. Documents are numbered over all chunks, without exact duplicates; a pair is the number `first << 32 | second`.
"""
