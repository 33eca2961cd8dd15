"""The decode service: generates tokens, and owns the hand-off that brings a prompt's KV here."""
