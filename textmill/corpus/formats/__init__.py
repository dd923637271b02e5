"""One module per file format. `read` yields the records of a chunk; the optional `ranges` splits a file into chunks."""
