"""Clean documents: rules change a text, then filters drop a document."""
