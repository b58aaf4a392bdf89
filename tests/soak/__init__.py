"""Training jobs that are killed, preempted, moved and starved for hours; each must continue bit for bit."""
