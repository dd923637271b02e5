"""Examples with labels: read from CSV, JSON, CoNLL and SQuAD files, checked, and split."""
