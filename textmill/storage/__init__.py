"""Files on disk: atomic writes, checksums, stage folders, safetensors, the model hub, fault injection, progress bars."""
