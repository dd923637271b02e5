"""Read MongoDB collections by position, and write to them."""
