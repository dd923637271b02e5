"""Distillation: teachers, and the terms of the loss that compare a net with them."""
