"""Where tasks come from: files, the hub, endless sources, and which of them to ask next."""
