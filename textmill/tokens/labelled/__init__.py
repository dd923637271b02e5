"""Examples with labels as token ids: how they are encoded, and the stores that training reads."""
