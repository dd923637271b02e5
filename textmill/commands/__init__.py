"""Commands that have no package of their own: run, new, check, show, recipes."""
