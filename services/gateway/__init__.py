"""The OpenAI-compatible HTTP edge. Imports no torch."""
