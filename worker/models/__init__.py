"""Decoder models, without rank arithmetic."""
