"""How model-written code is walled in: one backend a file."""
