"""The attention seam: the interface, its CPU and FlashInfer backends, and their plans."""
