"""The arena: judges kernel submissions honestly, offline, on the machine at hand."""
