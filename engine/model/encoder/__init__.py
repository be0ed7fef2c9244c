"""Encoders: bidirectional models that read packed rows in one pass, without a KV pool."""
