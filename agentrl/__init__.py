"""Train language models to use tools over many turns, asynchronously."""
