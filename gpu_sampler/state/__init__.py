"""Keeps the sampling state of each request, on the host and on the device."""
