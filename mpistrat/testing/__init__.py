"""Conformance tests for authors of transports and algorithms."""
