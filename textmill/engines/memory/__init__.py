"""How much memory of a device a run takes, by part: for `textmill plan` and for `engine.micro_batch: auto`."""
