"""Ways to isolate a session. `probe.py` picks one; importing this package loads none of them."""
