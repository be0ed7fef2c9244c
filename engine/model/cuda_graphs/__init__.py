"""Captures decode and prefill steps as CUDA graphs."""
