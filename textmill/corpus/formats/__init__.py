"""A format = a file: `read(piece, config)` yields its records; `ranges(source, documents)`, where it can be cut, says where."""
