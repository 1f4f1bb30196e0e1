"""Checkpoints on disk: quantize one without loading it (`stream`), and see what one holds (`inspect`)."""
