"""Text to token ids and back, as the model's own files say. Needs neither torch nor transformers."""
