"""What several formats have in common."""
