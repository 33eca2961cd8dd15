"""Which decode worker runs a sequence and which prefill workers it may ask: policies, and what they know."""
