"""Defines the attention interface, and implements it by torch and by FlashInfer."""
