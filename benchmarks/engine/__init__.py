"""The engine, measured on a real vLLM server: what our client costs, what prefixes save, what an update takes."""
