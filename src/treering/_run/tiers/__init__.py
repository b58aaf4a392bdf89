"""A run in two tiers: steps are committed on local disks, and uploaded from there to the remote tier."""
