"""Read-only tools over a run: its batches looked into, proven, made again, compared, asked and shown."""
