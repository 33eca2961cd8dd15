"""The page at /ui: static files that live on GET /status and the OpenAI endpoints, and the routes that serve them."""
