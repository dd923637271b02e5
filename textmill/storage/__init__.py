"""Files on disk: written atomically, checked by checksums, kept in stage folders; safetensors, the model hub, fault injection, progress bars."""
