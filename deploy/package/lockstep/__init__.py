"""Lockstep: a multi-GPU decode worker for large language models."""
