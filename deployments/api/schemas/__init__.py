"""Declares the pydantic models of request and response bodies, one module for each endpoint."""
