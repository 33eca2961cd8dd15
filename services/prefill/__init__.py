"""The prefill service: reads prompts, makes their KV, and lets decode workers read it."""
