"""Answers on the wire: SSE chunks and whole bodies in the OpenAI forms."""
