"""Whether the parts of a run live and move on, and who ends them if not."""
