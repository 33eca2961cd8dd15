"""Bodies to domain types: every value that could hurt a worker is checked here, before anything is dispatched."""
