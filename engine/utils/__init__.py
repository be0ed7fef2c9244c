"""Helpers around the processor, the device and the interpreter."""
