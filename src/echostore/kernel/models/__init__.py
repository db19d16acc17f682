"""The models: the replicated state machines of items."""
