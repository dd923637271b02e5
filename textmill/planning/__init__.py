"""Choose settings for a text, a machine and a number of minutes."""
