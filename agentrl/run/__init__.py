"""One training run, wired: its processes, its folder, its steps, its learner."""
