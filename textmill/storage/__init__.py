"""Files on disk: atomic writes, checksums, stage folders, safetensors, model hub, fault injection, progress bars."""
