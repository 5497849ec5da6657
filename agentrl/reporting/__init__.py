"""Numbers for people: statistics, figures, the terminal."""
