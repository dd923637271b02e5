"""What an engine minimises: where a batch has labels, and the losses of a net's heads there."""
