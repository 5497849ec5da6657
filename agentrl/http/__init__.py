"""What every HTTP listener of a run needs, and what orchestrator and learner say to each other."""
