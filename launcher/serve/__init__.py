"""Requests over HTTP, in the shapes of OpenAI's API."""
