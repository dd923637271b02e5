"""Reports of runs for people: the files of a run, curves for the terminal, SVG and HTML."""
